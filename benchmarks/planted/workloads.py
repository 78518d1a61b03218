"""Small trainings without a problem, in which faults can be planted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

#: Called at a named place with the index of the batch.
Hook = Callable[[int], Any]


class Samples(Dataset[list[Tensor]]):
    """Samples in memory, whose loading can be slowed."""

    def __init__(self, rows: list[Tensor], length: int) -> None:
        self.rows, self.length, self.item = rows, length, lambda index: None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[Tensor]:
        self.item(index)
        return [row[index % len(row)] for row in self.rows]


class Workload(L.LightningModule):
    """A training of a few milliseconds per step.

    Args:
        seed: Varies its sizes.
        batches: Per epoch.
    """

    #: Seconds of a step, about.
    step = 0.012
    batch_size = 8

    def __init__(self, seed: int, batches: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.data = Samples(self.build(), batches * self.batch_size)
        #: Called in the places of the same names.
        self.places: dict[str, Hook] = {}
        self.loader: dict[str, Any] = {}
        self.sampler: Any = None

    def build(self) -> list[Tensor]:
        """Create the network; return the columns of the data."""
        raise NotImplementedError

    def loss(self, batch: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def at(self, place: str, index: int) -> None:
        if place in self.places:
            self.places[place](index)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.at("forward", self.global_step)
        loss = self.loss(batch)
        if "backward" in self.places:
            loss.register_hook(lambda _: self.at("backward", self.global_step))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.at("validation", batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.at("transfer", self.global_step)
        return batch

    def train_dataloader(self) -> Any:
        shuffle = None if self.sampler is not None else True
        return DataLoader(
            self.data, self.batch_size, shuffle=shuffle, sampler=self.sampler, drop_last=True,
            **self.loader,
        )  # fmt: skip

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(self.data.rows, 8 * self.batch_size), self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Emulated(Workload):
    """A device that computes while the host sleeps: nearly unaffected by other programs."""

    def build(self) -> list[Tensor]:
        self.seconds = self.step * self.random.uniform(0.8, 1.2)
        self.net = nn.Linear(8, 1)
        return [torch.randn(64, 8), torch.randn(64, 1)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        time.sleep(self.seconds * len(batch[0]) / self.batch_size)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Perceptron(Workload):
    """Matrix products on the CPU."""

    def build(self) -> list[Tensor]:
        width = 64 * self.random.randint(6, 8)
        layers = [nn.Linear(width, width), nn.ReLU()]
        self.net = nn.Sequential(
            *layers, *[nn.Linear(width, width), nn.ReLU()], nn.Linear(width, 1)
        )
        return [torch.randn(64, 64, width), torch.randn(64, 64, 1)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Gpt(Workload):
    """Held out: a small language model on tokens. No threshold was tuned on it."""

    def build(self) -> list[Tensor]:
        width, length = 64 * self.random.randint(2, 3), 48
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        return [torch.randint(0, 256, (64, length + 1))]

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[0]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        found = self.head(self.body(self.embed(tokens[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


WORKLOADS: dict[str, type[Workload]] = {"emulated": Emulated, "perceptron": Perceptron}
HELD_OUT: dict[str, type[Workload]] = {"gpt": Gpt}
