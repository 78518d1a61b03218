"""darts: trains with a ``pytorch_lightning`` Trainer, on a series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import compare
from torch import nn

darts = pytest.importorskip("darts")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("NBEATSModel", {"num_stacks": 2, "layer_widths": 32}),
        ("TCNModel", {}),
        ("TransformerModel", {"d_model": 16, "dim_feedforward": 32}),
        ("BlockRNNModel", {}),
    ],
)
def test_forecasters_train_as_without_us(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """Same weights under the other package's Trainer, torch's FLOPs."""
    from darts import models

    series = darts.TimeSeries.from_values(np.sin(np.arange(200, dtype=np.float32) / 5))

    def train(**options: Any) -> nn.Module:
        model = getattr(models, name)(
            input_chunk_length=16, output_chunk_length=4, n_epochs=2, batch_size=32,
            random_state=7, pl_trainer_kwargs=options, work_dir=str(tmp_path / "darts"), **sizes,
        )  # fmt: skip
        model.fit(series)
        return model.model

    ours, torchs = compare(train, tmp_path)
    assert ours == torchs
