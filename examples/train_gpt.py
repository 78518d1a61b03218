"""Train a small GPT on the source code of Python's standard library, and measure its speed.

All settings, callbacks included, are in ``configs/demo.yaml``::

    python examples/train_gpt.py fit --config configs/demo.yaml
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One transformer layer: attention, then a feed-forward network.

    Args:
        width: Size of the residual stream.
        heads: Attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(LightningModule):
    """A decoder-only transformer over bytes.

    Args:
        layers: Number of blocks.
        width: Size of the residual stream.
        heads: Attention heads.
        context: The longest sequence, in bytes.
        learning_rate: The learning rate of AdamW.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 192,
        heads: int = 6,
        context: int = 128,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes ``[batch, time]`` to logits ``[batch, time, 256]``."""
        where = torch.arange(text.shape[1], device=text.device)
        x = self.tokens(text) + self.positions(where)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of the next byte, in nats."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the same loss on held-out text."""
        self.log("validate/loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def get_num_tokens_in_batch(self, batch: tuple[Tensor, Tensor]) -> int:
        """Count the tokens of a batch: the only method that is here for lightning_perf."""
        return batch[0].numel()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        text, following = batch
        return F.cross_entropy(self(text).flatten(0, 1), following.flatten())


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the same piece shifted by one byte."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = self.text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class StandardLibrary(LightningDataModule):
    """The source code of Python's standard library: a text that exists on every machine.

    Args:
        context: Bytes in a sequence.
        batch_size: Sequences in a batch.
        megabytes: Megabytes of text to read.
        num_workers: Data loader workers.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 16, megabytes: float = 4, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.context, self.batch_size = context, batch_size
        self.megabytes, self.num_workers = megabytes, num_workers

    def setup(self, stage: str) -> None:
        """Read the text and hold out a tenth of it for validation."""
        text = torch.frombuffer(_source(int(self.megabytes * 1e6)), dtype=torch.uint8)
        held_out = len(text) // 10
        self.train = Pieces(text[:-held_out], self.context)
        self.validation = Pieces(text[-held_out:], self.context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled pieces."""
        return DataLoader(
            self.train, self.batch_size, shuffle=True, num_workers=self.num_workers, drop_last=True
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return pieces in order."""
        return DataLoader(self.validation, self.batch_size, num_workers=self.num_workers)


def _source(size: int) -> bytearray:
    """Return the first bytes of the standard library, its modules sorted by name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return text[:size]


if __name__ == "__main__":
    # Lightning saves the config into the logger's folder, but MLFlowLogger has none.
    LightningCLI(GPT, StandardLibrary, save_config_callback=None)
