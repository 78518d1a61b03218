"""The signals of a run: what windows can measure, by the first part of the columns' names."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from lightning_perf.run.spans import BUFFERS, GRADIENTS, START
from lightning_perf.timing.totals import CATEGORIES, Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
_DEVICE_WAITS = {"waits/device/start": START, "waits/device/backward": GRADIENTS}


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
        self.columns = ("waits/node_rank", "waits/exchange", *_WAITS, *device)

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds of a stage, without stages within it."""
        totals, none = self._recorder.totals(), Cost(0.0, 0)
        host = [totals.costs.get(Action(stage, *action), none) for action in _WAITS.values()]
        device = [totals.device.get(Action(stage, name, "device"), none) for name in self._device]
        exchange = self._recorder.exchange.total() if stage == "train" else 0.0
        return [self._node, exchange, *(cost.seconds for cost in (*host, *device))]


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
            if flops and cost.total and record.timed:
                self._ideal_seconds += cost.ideal_seconds * flops / cost.total

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds at the peak, and FLOPs of the last batch."""
        return (self._ideal_seconds, self._last) if stage == "train" else (0.0, 0.0)
