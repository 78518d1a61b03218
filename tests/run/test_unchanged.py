"""The promise: training is the same with us and without us, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.outcome import outcome
from helpers.small import Records

from lightning_perf import Flops, PyTorch, SpeedMonitor, Suite, SystemMetrics


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16-mixed"}, {"precision": "64-true"}, {"compiled": True}],
    ids=str,
)
def test_losses_weights_and_rng_are_bit_identical(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Counting, measuring and recording change no number of the training."""
    options: dict[str, Any] = {"logger": Records(), **changes}
    plain = outcome(tmp_path / "plain", **options)
    watched = outcome(
        tmp_path / "watched",
        SpeedMonitor(window_size=4),
        SystemMetrics(interval=0.1),
        Suite([Flops(peak_flops="measure")]),
        PyTorch(schedule="every 10ba for 2ba"),
        **options,
    )
    assert plain["losses"] == watched["losses"]
    assert plain["steps"] == watched["steps"]
    assert torch.equal(plain["rng"], watched["rng"])
    for before, after in zip(plain["weights"], watched["weights"], strict=True):
        assert torch.equal(before, after)
