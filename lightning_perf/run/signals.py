"""The signals of a run: what windows can measure, by the first part of the columns' names."""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.errors import describe, warn
from lightning_perf.run.spans import BUFFERS, GRADIENTS, START
from lightning_perf.system import HOST, Sampler, node_sensors
from lightning_perf.system.gpus import GPU, count_gpus
from lightning_perf.timing.totals import CATEGORIES, Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Ranks
    from lightning_perf.run.batches import BatchRecord, BatchTotals
    from lightning_perf.run.spans import SpanRecorder
    from lightning_perf.run.stages import Progress, StageStack

#: The columns of the device's own time, by category.
DEVICE_COLUMNS = {
    "to_device": "device/to_device",
    "forward": "device/forward",
    "backward": "device/backward",
    "optimizer_step": "device/optimizer_step",
    "other": "device/other",
    "dataloader_next": "exposed_input",
}
#: By column of waiting: the category and name of an action; on the device, the name.
_WAITS = {
    "waits/start": ("other", START),
    "waits/forward": ("forward", BUFFERS),
    "waits/backward": ("backward", GRADIENTS),
}
#: By column of an exchange: the action in which ranks wait for it.
_EXCHANGES = {
    "waits/exchange": GRADIENTS,
    "waits/exchange/start": START,
    "waits/exchange/forward": BUFFERS,
}
_DEVICE_WAITS = {"waits/device/start": START, "waits/device/backward": GRADIENTS}
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
#: Columns of memory of a node's processes.
HOST_MEMORY = ("rss", "peak_rss", "rss_level")
_NOTHING = (0.0, 0.0)
#: Columns of a GPU: its number, its sensors, and their seconds.
GPU_COLUMNS = 2 + len(GPU)


class ProgressSignal:
    """The signal of progress: all batches and seconds of a stage, whether timed or not."""

    columns = (
        "progress/batches",
        "progress/seconds",
        "progress/total_seconds",
        "progress/validation_seconds",
    )
    #: These two include the run that was resumed.
    gauges = frozenset(columns[2:])

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def totals(self, stage: str) -> Sequence[float]:
        """Batches and seconds of a stage, and seconds of all validation inside of fit."""
        counters = self._progress.stages[stage]
        seconds = counters.total_wct
        return counters.batch, seconds, seconds, self._progress.validation_seconds


class SpanSignal:
    """Seconds by category as columns.

    Training's columns hold all of the run, validation inside of it as one category.
    """

    gauges: frozenset[str] = frozenset()

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        device = (*DEVICE_COLUMNS.values(), "device/batches") if recorder.device else ()
        self._device = bool(device)
        self.columns = tuple(f"timings/{name}" for name in (*CATEGORIES, "train_batch", *device))
        self._main = ""

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds of each category; the run's first stage includes those within it."""
        self._main = self._main or stage
        costs = self._recorder.totals()
        values = [*costs.by_category(stage, own=stage != self._main).values(), costs.train_batch]
        if self._device:
            spent = {a.category: cost for a, cost in costs.device.items() if a.stage == stage}
            seconds = {name: cost.seconds for name, cost in spent.items()}
            for within, name in (("other", START), ("backward", GRADIENTS)):
                seconds[within] = seconds.get(within, 0.0) + seconds.get(name, 0.0)
            values += [seconds.get(name, 0.0) for name in DEVICE_COLUMNS]
            values.append(spent["other"].calls if "other" in spent else 0)
        return values


class WaitSignal:
    """Seconds of waiting for other ranks, as columns, and each rank's node."""

    gauges = frozenset({"waits/node_rank"})

    def __init__(self, recorder: SpanRecorder, node_rank: int) -> None:
        self._recorder, self._node = recorder, node_rank
        self._device = tuple(_DEVICE_WAITS.values()) if recorder.device else ()
        device = tuple(_DEVICE_WAITS) if recorder.device else ()
        names = "waits/node_rank", *_EXCHANGES, "waits/validation"
        self.columns = (*names, *_WAITS, *device)

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds of a stage, without stages within it."""
        totals, none = self._recorder.totals(), Cost(0.0, 0)
        host = [totals.costs.get(Action(stage, *action), none) for action in _WAITS.values()]
        device = [totals.device.get(Action(stage, name, "device"), none) for name in self._device]
        exchanges, nested = [0.0] * len(_EXCHANGES), 0.0
        if stage == "train":
            exchanges = [self._recorder.exchange[name].total() for name in _EXCHANGES.values()]
            nested = totals.by_category("validate", own=True)["reduce_metrics"]
        return [self._node, *exchanges, nested, *(cost.seconds for cost in (*host, *device))]


class FormulaSignal:
    """The signal of a formula's FLOPs, for the batches of training."""

    columns = ("formula/ideal_seconds", "formula/batch")
    gauges = frozenset({"formula/batch"})

    def __init__(
        self, formula: Callable[[Any], float], stages: StageStack, batches: BatchTotals
    ) -> None:
        self._formula, self._stages, self._batches = formula, stages, batches
        batches.listeners.append(self._fold)
        # FLOPs of batches whose records are not yet folded.
        self._pending: deque[float] = deque()
        self._ideal_seconds, self._last = 0.0, 0.0

    def count(self, batch: Any) -> None:
        """Apply the formula to a batch of training."""
        if self._stages.stage != "train":
            return
        flops = 0.0 if batch is None else float(self._formula(batch))  # None: Lightning skipped it
        self._pending.append(flops / self._batches.sharing)

    def _fold(self, stage: str, records: Sequence[BatchRecord]) -> None:
        """Add batches whose time is known by now."""
        if stage != "train":
            return
        for record in records:
            flops, cost = self._pending.popleft() if self._pending else 0.0, record.cost
            if cost is None:
                continue
            self._last = flops
            if flops and cost.total and not record.first:
                self._ideal_seconds += cost.ideal_seconds * flops / cost.total

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds at the peak, and FLOPs of the last batch."""
        if stage != "train":
            return 0.0, 0.0
        # Batches are in no column before one of them is timed.
        timed = self._batches.stages[stage].edges[-1].batch_count
        return self._ideal_seconds if timed else 0.0, self._last


def node_sampler(trainer: Trainer, ranks: Ranks, processes: set[int]) -> Sampler | None:
    """Return the sampler of this node and its ranks' processes on its first rank, else None."""
    if ranks.local_rank != 0:
        return None
    sampler = Sampler(partial(node_sensors, **_gpu_options(trainer, ranks)))
    sampler.processes |= processes
    return sampler


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
    # The GPUs that torch sees, as CUDA_VISIBLE_DEVICES selects them.
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
        values += [float(gpu.removeprefix("gpu_") or -1) for gpu in gpus]
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
