"""neuralforecast: keeps the Trainer's arguments as hyperparameters, and builds its own Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparison import compare
from torch import nn

neuralforecast = pytest.importorskip("neuralforecast")


@pytest.mark.parametrize("name", ["NHITS", "PatchTST", "LSTM"])
def test_forecasters_train_as_without_us(tmp_path: Path, name: str) -> None:
    """Convolutions, attention and recurrence: same weights, and torch's FLOPs where it counts."""
    from neuralforecast.utils import generate_series

    series = generate_series(4, min_length=80, max_length=120)

    def train(**options: Any) -> nn.Module:
        kind = getattr(neuralforecast.models, name)
        model = kind(h=8, input_size=16, max_steps=8, windows_batch_size=32, **options)
        forecaster = neuralforecast.NeuralForecast([model], freq="D")
        forecaster.fit(series)
        return forecaster.models[0]

    ours, torchs = compare(train, tmp_path)
    print(name, ours, torchs)
