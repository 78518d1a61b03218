"""Kinds of models in a real Trainer, against torch's own counter and against a count by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from architectures.__main__ import measure
from architectures.plain import plain_cases


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", plain_cases(), ids=lambda case: case.name)
def test_a_batch_costs_what_is_counted_by_hand(case: Any) -> None:
    """All calls are counted; where torch's counter differs, its known faults are the difference."""
    if case.name.startswith("LSTM, bf16") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 LSTM: oneDNN raises")
    row = measure(case)
    assert row.by_hand == row.ours
    assert row.torch + sum(row.reasons.values()) == row.ours
