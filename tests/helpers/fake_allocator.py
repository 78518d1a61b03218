"""PyTorch's CUDA allocator without a device, and a training that runs out of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small import Records, Small, left_in, trainer
from lightning_perf.profilers import memory_snapshot

MIB = 1 << 20


def stack(filename: str, *names: str) -> list[dict[str, Any]]:
    """Frames as the allocator reports them, the innermost first."""
    return [{"filename": filename, "line": 7, "name": name} for name in reversed(names)]


#: An allocation as reported by PyTorch's allocator.
HISTORY = {
    "action": "alloc",
    "addr": 0x100,
    "size": 3 * MIB,
    "stream": 0,
    "time_us": 5,
    "frames": stack("train.py", "main", "forward"),
}


def segment(address: int, frames: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """A segment of four MiB with one block."""
    block = {"size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
    block["address"] = address
    free = {"size": 4 * MIB - size, "requested_size": 0, "state": "inactive", "frames": []}
    return {"address": address, "stream": 0, "total_size": 4 * MIB, "blocks": [block, free]}


class Allocator:
    """Answers like PyTorch's CUDA allocator, without a device."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.segments = [segment(0x100, stack("train.py", "forward"), 3 * MIB)]
        self.observer: Any = None

    def record(self, enabled: str | None = "all", **options: Any) -> None:
        self.calls.append((enabled, options))

    def snapshot(self) -> dict[str, Any]:
        traces = [HISTORY] * bool(self.recording)
        return {"segments": self.segments, "device_traces": [traces], "allocator_settings": {}}

    def attach(self, observer: Any) -> None:
        self.observer = observer

    @property
    def recording(self) -> bool:
        return bool(self.calls) and self.calls[-1][0] is not None


@contextmanager
def simulated_cuda() -> Iterator[Allocator]:
    """Replaces the calls of CUDA, so that the machine appears to have a device."""
    fake = Allocator()
    memory_snapshot._attach.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_perf.profilers.memory_snapshot.has_cuda", lambda: True)
        patch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
        patch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.attach, raising=False)
        yield fake
    memory_snapshot._attach.cache_clear()


def files(folder: Path) -> list[str]:
    """The files in the folder of one run, by relative path."""
    folder = folder / "records-version_0" / "memory_snapshots"
    return [str(path.relative_to(folder)) for path in left_in(folder)]


def fit(folder: Path, profiler: Any, model: Any = None, **options: Any) -> list[str]:
    trainer(folder, profiler, logger=Records(), **options).fit(model or Small())
    return files(folder)


class OutOfMemory(Small):
    """Allocates more than the available memory in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)
