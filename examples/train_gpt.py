"""Train a small GPT on the source code of Python's standard library, and measure its speed.

All settings, callbacks included, are in ``configs/demo.yaml``::

    python examples/train_gpt.py fit --config configs/demo.yaml
"""

from __future__ import annotations

import io
import sysconfig
import tokenize
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # bytes
LONGEST = 30_000  # characters of a file that is used


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
    """Pieces of source files without comments, each with the same piece shifted by one byte.

    Args:
        files: Source code, a text per file.
        context: Bytes in a piece.
        cached: Keep the files without comments, instead of reading the whole file for each piece.
    """

    def __init__(self, files: list[str], context: int, cached: bool) -> None:
        self.context = context
        self.files: list[str | Tensor] = [_without_comments(f) if cached else f for f in files]
        self.starts = [
            (number, start)
            for number, file in enumerate(files)
            for start in range(0, len(file) - context, context)
        ]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, start = self.starts[index]
        file = self.files[number]
        text = _without_comments(file) if isinstance(file, str) else file
        # Without comments a file is shorter.
        start = start % max(1, len(text) - self.context)
        piece = text[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class StandardLibrary(LightningDataModule):
    """The source code of Python's standard library: a text that exists on every machine.

    Args:
        context: Bytes in a sequence.
        batch_size: Sequences in a batch.
        megabytes: Megabytes of text to read.
        cached: Remove the comments of each file once, instead of for each piece of it.
        num_workers: Data loader workers.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 16,
        megabytes: float = 4,
        cached: bool = True,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.context, self.batch_size, self.megabytes = context, batch_size, megabytes
        self.cached, self.num_workers = cached, num_workers

    def setup(self, stage: str) -> None:
        """Read the files and hold out a tenth of them for validation."""
        files = _source(int(self.megabytes * 1e6), self.context)
        held_out = max(1, len(files) // 10)
        self.train = Pieces(files[:-held_out], self.context, self.cached)
        self.validation = Pieces(files[-held_out:], self.context, self.cached)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return shuffled pieces."""
        return DataLoader(
            self.train, self.batch_size, shuffle=True, num_workers=self.num_workers, drop_last=True
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return pieces in order."""
        return DataLoader(self.validation, self.batch_size, num_workers=self.num_workers)


def _without_comments(source: str) -> Tensor:
    """Return the bytes of a Python file without its comments."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return torch.frombuffer(bytearray("".join(lines), "utf-8"), dtype=torch.uint8)


def _source(size: int, shortest: int) -> list[str]:
    """Return modules of the standard library, sorted by name, until they have enough characters."""
    files: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8")
        if 2 * shortest < len(text) <= LONGEST:
            files.append(text)
            size -= len(text)
        if size <= 0 and len(files) > 1:
            break
    return files


if __name__ == "__main__":
    # Lightning saves the config into the logger's folder, but MLFlowLogger has none.
    LightningCLI(GPT, StandardLibrary, save_config_callback=None)
