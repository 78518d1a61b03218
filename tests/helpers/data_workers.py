"""A training whose batches come from worker processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from helpers.small import Small


class Work(Dataset[list[torch.Tensor]]):
    """Samples that a worker must work for."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.work(index)

    def work(self, index: int) -> list[torch.Tensor]:
        waste = len(bytearray(10_000_000))
        return [torch.full((8,), index / waste), torch.ones(1)]


class Loading(Small):
    """Twenty batches from two workers, and steps long enough for these while a window is open.

    Else a window of this test would be over before a worker looks.
    """

    def __init__(self, profiler: Any, context: str) -> None:
        super().__init__()
        self.profiler, self.context = profiler, context
        self.steps = 0  # in the window that is open
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        options = {"multiprocessing_context": self.context, "persistent_workers": True}
        return DataLoader(Work(), 4, num_workers=2, **options)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        recording = self.profiler is not None and self.profiler._open is not None
        self.steps = self.steps + 1 if recording else 0
        if self.steps:
            # Work wakes a worker, and the loader hands it to one of them a step.
            if self.steps > 2 and batch_idx < 15:
                self.wait_for_workers()
            time.sleep(0.2)
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def wait_for_workers(self) -> None:
        """A spawned one may have to import its tracer first, on a busy machine for seconds."""
        folder = self.profiler._children._folders[-1]
        until = time.monotonic() + 30.0
        while len(list(folder.glob("*.on"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
