"""Signals of the hardware: the node's sensors, and the memory of each rank."""

from __future__ import annotations

import os
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.errors import describe, warn
from lightning_perf.system import HOST, Sampler, node_sensors
from lightning_perf.system.gpus import GPU, count_gpus, gpu_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Ranks
    from lightning_perf.core.window import Window

#: Keys of torch.cuda.memory_stats_as_nested_dict by Composer's names.
_MEMORY = {
    f"{moment}_{name}_mem": (kind, moment)
    for moment in ("current", "peak")
    for name, kind in {
        "allocated": "allocated_bytes",
        "active": "active_bytes",
        "inactive": "inactive_split_bytes",
        "reserved": "reserved_bytes",
    }.items()
}
#: All names that `cuda_memory` returns.
CUDA_MEMORY = (*_MEMORY, "alloc_retries")
#: Of the processes of a node.
HOST_MEMORY = ("rss", "peak_rss")
_NOTHING = (0.0, 0.0)
#: Columns of a GPU: its number, its sensors, and their seconds.
GPU_COLUMNS = 2 + len(GPU)


def node_sampler(trainer: Trainer, ranks: Ranks) -> Sampler | None:
    """Return the sampler of this node on its first rank, None on the others."""
    if ranks.local_rank != 0:
        return None
    return Sampler(partial(node_sensors, **_gpu_options(trainer, ranks)))


def node_gpus(trainer: Trainer, ranks: Ranks) -> int:
    """Return how many GPUs this rank samples. It never raises, since all ranks exchange it."""
    try:
        return 0 if ranks.local_rank else count_gpus(**_gpu_options(trainer, ranks))
    except Exception as error:
        warn(f"GPUs are not sampled ({describe(error)}).")
        return 0


def _gpu_options(trainer: Trainer, ranks: Ranks) -> dict[str, Any]:
    # torch calls AMD devices "cuda" too, but NVML does not support them.
    if trainer.strategy.root_device.type != "cuda" or torch.version.hip is not None:
        return {"visible": None, "ranks": 0}
    # Those that torch sees, after CUDA_VISIBLE_DEVICES.
    numbers = range(torch.cuda.device_count())
    visible = [str(torch.cuda.get_device_properties(number).uuid) for number in numbers]
    return {"visible": visible, "ranks": ranks.local_world_size}


def cuda_memory(device: torch.device) -> dict[str, float]:
    """The state of CUDA's caching allocator by Composer's names; empty for other devices.

    Gigabytes to five significant digits, and the number of retries.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    figures = {
        name: gigabytes(stats[kind]["all"][moment])
        for name, (kind, moment) in _MEMORY.items()
        if kind in stats
    }
    return {**figures, "alloc_retries": float(stats.get("num_alloc_retries", 0))}


def gigabytes(number: float) -> float:
    """Convert bytes to gigabytes (1e9), to five significant digits.

    Example:
        >>> gigabytes(12345678901)
        12.346
    """
    return float(f"{number / 1e9:.5g}")


def sample_ranks(sampler: Sampler | None, window: Window) -> None:
    """Count the processes of all ranks on this node as this training's, by ``memory/*``."""
    if sampler is not None and window.world_size > 1:  # the sampler knows its own process
        nodes = window["memory/node_rank"]
        here = window["memory/pid"][nodes == nodes[window.rank]]
        sampler.processes.update(here.astype(int).tolist())


class NodeSignal:
    """The node's sensors as columns: value x seconds, and the seconds beside it.

    Each GPU has a slot, in the order in which they are first sampled; ``system/gpu_slot_0`` is the
    number of the GPU in it. Its values share one column of seconds. There are as many slots on
    every rank; ranks that do not sample have zeros.
    """

    def __init__(self, sampler: Sampler | None, slots: int) -> None:
        self._sampler, self._slots = sampler, slots
        self._numbers: dict[str, int] = {}
        host = [f"system/{name}" for name in HOST]
        gpus = [f"system/gpu_slot_{slot}" for slot in range(slots)]
        sensors = [f"{gpu}/{name}" for gpu in gpus for name in (*GPU, "seconds")]
        self.columns = (*host, *(f"{name}/seconds" for name in host), *gpus, *sensors)
        self.gauges = frozenset(gpus)
        # What was sampled last, and its columns: reports may be more frequent than samples.
        self._sums: Mapping[str, tuple[float, float]] | None = None
        self._values = [0.0] * len(self.columns)

    def totals(self, stage: str) -> Sequence[float]:
        """The sums since sampling began, whatever the stage."""
        if self._sampler is not None and (sums := self._sampler.totals()) != self._sums:
            self._sums, self._values = sums, self._row(sums)
        return self._values

    def _row(self, sums: Mapping[str, tuple[float, float]]) -> list[float]:
        for name in sorted(sums):
            gpu, slash, _ = name.partition("/")
            if slash and gpu not in self._numbers and len(self._numbers) < self._slots:
                self._numbers[gpu] = len(self._numbers)
        host = [sums.get(name, _NOTHING) for name in HOST]
        values = [total for total, _ in host] + [seconds for _, seconds in host]
        gpus = [*self._numbers, *[""] * (self._slots - len(self._numbers))]
        values += [gpu_number(gpu) if gpu else -1.0 for gpu in gpus]
        for gpu in gpus:
            pairs = [sums.get(f"{gpu}/{name}", _NOTHING) for name in GPU]
            longest = max(seconds for _, seconds in pairs)
            # A reading that ended before the others has no mean over the shared seconds.
            values += [total if seconds == longest else nan for total, seconds in pairs]
            values.append(longest)
        return values


class MemorySignal:
    """Memory of this rank's allocator in gigabytes, and of its node's processes in bytes."""

    def __init__(self, device: torch.device, sampler: Sampler | None, node_rank: int) -> None:
        self._device, self._sampler, self._node = device, sampler, node_rank
        self._measured = device.type == "cuda"
        self._cuda = CUDA_MEMORY if self._measured else ()
        names = [f"memory/{name}" for name in (*HOST_MEMORY, *self._cuda)]
        self.columns = ("memory/node_rank", "memory/pid", *names)
        self.gauges = frozenset(self.columns)

    def totals(self, stage: str) -> Sequence[float]:
        """The present values; NaN where one is unknown."""
        latest = self._sampler.latest if self._sampler is not None else {}
        host = [latest.get(f"process_{name}", nan) for name in HOST_MEMORY]
        held: Mapping[str, float] = {}
        if self._measured:
            try:
                held = cuda_memory(self._device)
            except RuntimeError as error:  # an allocator of the user's without statistics
                self._measured = False
                warn(f"CUDA's allocator is not measured ({describe(error)}).")
        return [self._node, os.getpid(), *host, *(held.get(name, nan) for name in self._cuda)]
