"""A fake device with a queue, as seen through CUDA events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helpers.small import Small
from lightning_perf.run import run
from lightning_perf.timing import cuda_events
from lightning_perf.timing.cuda_events import DeviceTimer, Events


class Device:
    """A queue of work that is done later, as CUDA events see a GPU."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.made = 0
        self.capturing = False
        self.touched_while_capturing = False
        #: Seconds of work done at each query.
        self.pace = 0.0

    def event(self) -> Event:
        self.made += 1
        return Event(self)

    def device_timer(self, most: int = 2048) -> DeviceTimer:
        return DeviceTimer(self.events(most))

    def events(self, most: int) -> Events:
        return Events("a loss", most, self.event, lambda: self.capturing)

    def replace_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Use this device and its clock instead of the CPU."""
        monkeypatch.setattr(cuda_events, "CLOCKED", {"cpu"})
        monkeypatch.setattr(run, "DeviceTimer", self.device_timer)

    def work(self, seconds: float) -> None:
        """Queue work and complete it at once."""
        self.queued += seconds
        self.done = self.queued


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.device.touched_while_capturing |= self.device.capturing
        self.at = self.device.queued

    def query(self) -> bool:
        self.device.touched_while_capturing |= self.device.capturing
        self.device.done = min(self.device.done + self.device.pace, self.device.queued)
        return self.at <= self.device.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "it would raise, or wait"
        return 1e3 * (end.at - self.at)

    def synchronize(self) -> None:
        raise AssertionError("never")


class Unsynchronized(Small):
    """On a real GPU: synchronizing calls are forbidden from the second batch to the last."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if batch_idx else "default")

    def on_train_end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def train_dataloader(self) -> Any:
        x = torch.ones(64, 8).pin_memory()
        return [(x[i : i + 4], x[i : i + 4, :1]) for i in range(0, 64, 4)]


@contextmanager
def synchronization_restored() -> Iterator[None]:
    """Allow synchronizing calls again for later tests, also after an exception."""
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
