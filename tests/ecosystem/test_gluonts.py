"""gluonts: its batches come from transformations, not from a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import compare
from torch import nn

pytest.importorskip("gluonts")


def test_forecasters_train_as_without_us(tmp_path: Path) -> None:
    """Same weights, torch's FLOPs."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import SimpleFeedForwardEstimator

    series = [
        {"target": np.sin(np.arange(200) / 5 + shift), "start": "2024-01-01"} for shift in range(4)
    ]

    def train(**options: Any) -> nn.Module:
        estimator = SimpleFeedForwardEstimator(
            prediction_length=8, num_batches_per_epoch=8, batch_size=8,
            trainer_kwargs={"max_epochs": 1, **options},
        )  # fmt: skip
        return estimator.train_model(ListDataset(series, freq="h")).trained_net

    ours, torchs = compare(train, tmp_path)
    assert ours == torchs
