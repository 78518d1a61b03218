"""Trainings of several forked ranks, one of which is late in one phase."""

from __future__ import annotations

import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from helpers.small import Small, trainer
from lightning_perf import Timings

PHASES = ("input", "forward", "backward", "callback")
#: Seconds of each phase on all ranks.
USUAL = 0.002


class Late(Small):
    """Sleeps in each phase, and longer in one of them on some ranks."""

    def __init__(self, ranks: set[int], phase: str, seconds: float, seed: int = 0) -> None:
        super().__init__()
        self.ranks, self.phase, self.seconds, self.seed = ranks, phase, seconds, seed
        torch.manual_seed(seed)
        self._random = random.Random(seed)

    def wait(self, phase: str) -> None:
        """Sleep, up to a fifth more or less than usual."""
        late = self.seconds if phase == self.phase and self.global_rank in self.ranks else 0.0
        time.sleep((USUAL + late) * self._random.uniform(0.8, 1.2))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.wait("input")
        return batch

    def forward(self, inputs: Tensor) -> Tensor:
        self.wait("forward")
        hidden = self.net[1](self.net[0](inputs))
        hidden.register_hook(lambda gradient: self.wait("backward"))
        output: Tensor = self.net[2](hidden)
        return output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # Called as a module, because TraceML times calls of modules.
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])


class Sleeps(L.Callback):
    """A user's callback that the module makes slow."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.wait("callback")


class Kept(Timings):
    """Writes its result on rank 0 to a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: list[dict[str, float]] = []

    def receive(self, window: Any) -> Any:
        found = super().receive(window)
        keys = [key for key in found if key.startswith("straggler/")]
        self.seen.append({key: found[key] for key in keys})
        if window.rank == 0 and found:
            late = self.straggler
            named = None
            if late is not None:
                fields = ("rank", "node", "phase", "share", "seconds", "chronic")
                named = {name: getattr(late, name) for name in fields}
            text = json.dumps({"straggler": named, "seen": self.seen})
            (self.folder / "found.json").write_text(text)
        return found


def options(
    world_size: int, batches: int = 60, every: int = 6, strategy: str = "ddp_fork"
) -> dict[str, Any]:
    """Options of a Trainer with several ranks."""
    return {
        "strategy": strategy, "devices": world_size, "log_every_n_steps": every,
        "max_steps": batches, "max_epochs": -1,
    }  # fmt: skip


def find(
    folder: Path, world_size: int, model: Late, batches: int = 60, strategy: str = "ddp_fork"
) -> dict[str, Any]:
    """Train with several ranks, and return the result of `Timings` on rank 0."""
    fit(folder, world_size, model, batches, strategy)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def fit(
    folder: Path, world_size: int, model: Late, batches: int = 60, strategy: str = "ddp_fork"
) -> None:
    """Train with several ranks; rank 0 writes the result of `Timings` to ``found.json``."""
    torch.set_num_threads(1)
    given = options(world_size, batches, strategy=strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(folder, Sleeps(), Kept(folder), **given).fit(model)
