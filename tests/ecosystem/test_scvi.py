"""scvi-tools: a Trainer and training plans of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comparison import compare
from torch import nn

scvi = pytest.importorskip("scvi")


def test_a_variational_autoencoder_trains_as_without_us(tmp_path: Path) -> None:
    """Random draws in the forward pass: same weights, torch's FLOPs."""
    # These draws are not seeded.
    cells = scvi.data.synthetic_iid(batch_size=64)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")

    def train(**options: Any) -> nn.Module:
        # It splits the cells by its own seed, which is random by default.
        scvi.settings.seed = 7
        model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
        model.train(max_epochs=3, batch_size=32, train_size=1.0, **options)
        return model.module

    ours, torchs = compare(train, tmp_path)
    assert ours == torchs
