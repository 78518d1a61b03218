"""chemprop: batches are graphs, and change their shape with every molecule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from comparison import compare
from torch import nn

chemprop = pytest.importorskip("chemprop")
MOLECULES = [
    "CCO",
    "c1ccccc1",
    "CC(=O)O",
    "CCN(CC)CC",
    "C1CCCCC1O",
    "CC(C)Cc1ccccc1",
    "O=C=O",
    "CN",
]


def test_message_passing_trains_as_without_us(tmp_path: Path) -> None:
    """Graphs in a batch: same weights, and torch's FLOPs, predicted for too many shapes."""
    data, parts = chemprop.data, chemprop.nn

    def train(**options: Any) -> nn.Module:
        points = [
            data.MoleculeDatapoint.from_smi(text, [float(len(text))]) for text in MOLECULES * 8
        ]
        loader = data.build_dataloader(
            data.MoleculeDataset(points), batch_size=4, num_workers=0, seed=7
        )
        model = chemprop.models.MPNN(
            parts.BondMessagePassing(d_h=32),
            parts.MeanAggregation(),
            parts.RegressionFFN(input_dim=32),
        )
        L.Trainer(max_steps=40, enable_checkpointing=False, **options).fit(model, loader)
        return model

    ours, torchs = compare(train, tmp_path)
    assert ours == torchs
