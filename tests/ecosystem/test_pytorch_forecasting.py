"""pytorch-forecasting: batches are nested dicts and tuples with None inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from comparison import compare
from torch import nn

forecasting = pytest.importorskip("pytorch_forecasting")
BATCH, PAST, FUTURE, HIDDEN = 16, 12, 4, 8
#: Omitted by torch's counter: an LSTM over past and future, forward and twice that for backward.
LSTM_FLOPS = 3 * BATCH * (PAST + FUTURE) * 2 * 4 * HIDDEN * (HIDDEN + HIDDEN)


def test_a_temporal_fusion_transformer_trains_as_without_us(tmp_path: Path) -> None:
    """Recurrence and attention: same weights; FLOPs are torch's plus those of its LSTMs."""
    import pandas as pd

    steps = np.tile(np.arange(60), 3)
    frame = pd.DataFrame(
        {"step": steps, "series": np.repeat(["a", "b", "c"], 60), "value": np.sin(steps / 5.0)}
    )

    def train(**options: Any) -> nn.Module:
        data = forecasting.TimeSeriesDataSet(
            frame, time_idx="step", target="value", group_ids=["series"],
            max_encoder_length=PAST, max_prediction_length=FUTURE,
            time_varying_unknown_reals=["value"],
        )  # fmt: skip
        model = forecasting.TemporalFusionTransformer.from_dataset(
            data, hidden_size=HIDDEN, lstm_layers=1, hidden_continuous_size=HIDDEN, log_interval=-1
        )
        trainer = L.Trainer(max_steps=8, enable_checkpointing=False, **options)
        trainer.fit(model, data.to_dataloader(train=True, batch_size=BATCH, num_workers=0))
        return model

    ours, torchs = compare(train, tmp_path)
    assert ours - torchs == LSTM_FLOPS
