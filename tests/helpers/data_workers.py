"""A training whose batches come from worker processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from helpers.small import Small
from lightning_perf.profilers.base import OpenRecording


class Work(Dataset[list[torch.Tensor]]):
    """Samples that take a worker some time to compute."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return self.work(index)

    def work(self, index: int) -> list[torch.Tensor]:
        waste = len(bytearray(10_000_000))
        return [torch.full((8,), index / waste), torch.ones(1)]


class Loading(Small):
    """Twenty batches from two workers, with steps that wait for the workers while a window is open.

    Otherwise a window would end before a worker sees it.
    """

    def __init__(self, context: str) -> None:
        super().__init__()
        self.context = context
        self.steps = 0  # in the open window
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        options = {"multiprocessing_context": self.context, "persistent_workers": True}
        return DataLoader(Work(), 4, num_workers=2, **options)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        recording = OpenRecording.current is not None
        self.steps = self.steps + 1 if recording else 0
        if self.steps:
            # An item wakes a worker; the loader gives one item per step to one of the workers.
            if self.steps > 2 and batch_idx < 15:
                self.wait_for_workers()
            time.sleep(0.2)
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def wait_for_workers(self) -> None:
        """A spawned worker may first import its tracer, which takes seconds on a busy machine."""
        assert OpenRecording.current is not None
        path = OpenRecording.current.path
        folder = path.with_name(f"{path.name}.children")
        until = time.monotonic() + 30.0
        while len(list(folder.glob("*.on"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
