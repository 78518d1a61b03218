"""neuralforecast: keeps the Trainer's arguments as hyperparameters, and builds its own Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparison import compare
from torch import nn

neuralforecast = pytest.importorskip("neuralforecast")


WINDOWS, LENGTH, HIDDEN = 32, 16, 128
#: Omitted by torch's counter: an LSTM of two layers, forward and twice that for backward.
LSTM_FLOPS = 3 * WINDOWS * LENGTH * 2 * 4 * HIDDEN * ((1 + HIDDEN) + (HIDDEN + HIDDEN))


@pytest.mark.parametrize(
    ("name", "sizes", "left_out"),
    [
        ("NHITS", {}, 0),
        ("PatchTST", {}, 0),
        ("LSTM", {"encoder_n_layers": 2, "encoder_hidden_size": HIDDEN}, LSTM_FLOPS),
    ],
)
def test_forecasters_train_as_without_us(
    tmp_path: Path, name: str, sizes: dict[str, int], left_out: int
) -> None:
    """Same weights; FLOPs are torch's plus those that torch omits."""
    from neuralforecast.utils import generate_series

    series = generate_series(4, min_length=80, max_length=120)

    def train(**options: Any) -> nn.Module:
        kind = getattr(neuralforecast.models, name)
        model = kind(
            h=8, input_size=LENGTH, max_steps=8, windows_batch_size=WINDOWS, **sizes, **options
        )
        forecaster = neuralforecast.NeuralForecast([model], freq="D")
        forecaster.fit(series)
        return forecaster.models[0]

    ours, torchs = compare(train, tmp_path)
    assert ours - torchs == left_out
