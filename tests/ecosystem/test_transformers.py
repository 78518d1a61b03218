"""transformers: a language model with random weights, in a user's module."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import lightning as L
import pytest
import torch
from comparison import compare
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_perf.flops.formulas import PROVEN

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTH, BATCH, LAYERS, WIDTH = 128, 32, 4, 2, 32


class Finetuned(L.LightningModule):
    """A transformers model on batches like those of its collators."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_language_models_train_as_without_us(tmp_path: Path, kind: str, attention: str) -> None:
    """Same weights; torch's FLOPs plus those of SDPA that its counter omits on a CPU."""
    tokens = torch.randint(
        VOCABULARY, (8 * BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    def train(**options: Any) -> nn.Module:
        auto = (
            transformers.AutoModelForMaskedLM
            if kind == "bert"
            else transformers.AutoModelForCausalLM
        )
        config = transformers.AutoConfig.for_model(kind, **SIZES)
        module = Finetuned(auto.from_config(config, attn_implementation=attention))
        trainer = L.Trainer(max_steps=8, enable_checkpointing=False, **options)
        trainer.fit(module, DataLoader(rows, batch_size=BATCH, shuffle=True))
        return module

    ours, torchs = compare(train, tmp_path)
    # Without dropout there is another kernel: two products in forward and four in backward.
    fused = kind == "llama" and attention == "sdpa"
    assert ours - torchs == (LAYERS * 6 * 2 * BATCH * LENGTH**2 * WIDTH if fused else 0)


FAMILIES = run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py"))


@pytest.mark.parametrize("family", sorted(PROVEN))
def test_the_formula_of_each_proven_family_is_its_count(family: str) -> None:
    """A tiny model of each family that the formulas accept; others are refused."""
    (row,) = FAMILIES["families"]([family])
    assert row.exact
    assert row.palm == row.ours
    assert row.megatron == 1
    assert row.matrices  # of `nanogpt`, which assumes biases and norms
