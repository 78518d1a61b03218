"""Measurements of the training on rank 0 that only a diagnosis needs, and when it is made."""

from __future__ import annotations

import sys
import time
from array import array
from collections import UserDict, deque
from dataclasses import replace
from functools import partial
from itertools import islice
from math import nan
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_perf.cgroup import usable_cpus
from lightning_perf.core.progress import Moment
from lightning_perf.diagnosis.rules import without_none
from lightning_perf.diagnosis.signals import (
    COMPILE,
    RECORDING,
    SAVES,
    SQUARES,
    Loader,
    Setup,
    Signals,
    Step,
)
from lightning_perf.flops import is_compiled
from lightning_perf.flops.batch import MOST_OBJECTS, PLAIN, attributes, container, shape_of
from lightning_perf.run import compat
from lightning_perf.run.batches import MOST_RECORDS
from lightning_perf.timing.clock import run_queue
from lightning_perf.timing.totals import CATEGORIES, Action, Cost, Totals
from lightning_perf.tracking.page import SENSORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis import Findings
    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.run import Run
    from lightning_perf.run.window_log import WindowLog
    from lightning_perf.run.windows import Subscriber
    from lightning_perf.schedule import Schedule

#: The part of the time that only this rank knows from which on its own time is analysed.
_MISSING = 0.1
#: Maximum steps whose times are kept.
_MOST_STEPS = 20_000
#: torch's name for the time of one compilation.
_COMPILED = "_compile.compile_inner"
#: The maximum share of the time for analyses during training, because they compete for the GIL, and
#: additional seconds for the first ones.
MOST_TIME, FIRST_SECONDS = 0.002, 0.01


class Collector:
    """Collects the steps and further costs of a run, in bounded memory, and has them analysed.

    Args:
        context: The run.
        schedule: When to analyse during training. The end is always analysed.
        analyse: Called with the signals, during training on a worker thread.
        recordings: The number of recordings of this process so far, and whether one is open.
    """

    def __init__(
        self,
        context: Run,
        schedule: Schedule | None,
        analyse: Callable[[Signals], Findings],
        recordings: Callable[[], tuple[int, bool]],
    ) -> None:
        self._context, self._recordings_now = context, recordings
        self._schedule, self._analyse = schedule, analyse
        if schedule is not None:
            schedule.setup(context.schedule_context)
        # When training began, and CPU seconds of analyses since.
        self._began: float | None = None
        self._spent = 0.0
        #: Whether an analysis runs on the worker thread.
        self.analysing = False
        self._setup = Setup()
        self._begin_step = 0
        self._log: WindowLog
        # The fields of one `Step` after another: no objects that a garbage collection visits.
        self._steps = array("d")
        self._count = 0
        # Seconds of each category in the same batches and those that the device has not completed,
        # one row after another, and the number of all rows.
        self._phases = array("f")
        self._rows = 0
        self._first: float | None = None
        # torch's list of compilations, how many of them are counted, and their cost so far by
        # category of training.
        self._compiled: Sequence[float] = ()
        self._counted, self._compilations = 0, dict[str, Cost]()
        # Windows in which a profiler recorded, and recordings of this process.
        self._recordings = self._opened = 0
        # Costs before the training.
        self._origin, self._closed = Totals({}), False
        self._clock = context.require_times().clock
        self._clock.by_batch = deque()
        context.listen(self._add_steps)

    def enter(self, callback: Subscriber) -> bool:
        """A stage starts; return whether training begins. The callback receives its windows."""
        context = self._context
        self.add_compilations("forward")
        if context.stage != "train" or self._began is not None:
            return False
        self._began, self._log = time.monotonic(), context.log_of(callback, "train")
        self._opened, _ = self._recordings_now()
        self._origin = Totals(self._costs())
        self._setup, self._begin_step = _setup(context), context.trainer.global_step
        return True

    def receive(self, window: Window) -> None:
        """A window has arrived; on rank 0 the schedule may select an analysis."""
        if window.stage != "train":
            return
        context = self._context
        if window.rank != 0:
            return
        if not (window.at_end or self.analysing) and self._selects(window):
            self.analysing = True
            job = partial(self._run, self.signals())
            if not context.file_worker.submit(job, "the diagnosis"):
                self.analysing = False

    def _selects(self, window: Window) -> bool:
        if self._schedule is None or self._began is None:
            return False
        context = self._context
        moment = Moment(
            window.stage, window.last, window.first, context.limits, context.ranks, context.run_name
        )
        self._schedule.observe(moment)
        allowed = FIRST_SECONDS + MOST_TIME * (time.monotonic() - self._began)
        return self._schedule(moment) and self._spent <= allowed

    def _run(self, signals: Signals) -> Findings:
        """Analyse signals, and tell schedules of the result."""
        began = time.thread_time()
        try:
            findings = self._analyse(signals)
        finally:
            self._spent += time.thread_time() - began
            self.analysing = False
        reached = self._context.reached
        verdicts = findings.verdicts
        names = (name for verdict in verdicts for name in (verdict.code, verdict.severity))
        reached += [name for name in dict.fromkeys(names) if name not in reached]
        return findings

    def costs(self) -> Mapping[Action, Cost]:
        """The costs of compilations, waits for a CPU, recordings and collections so far."""
        context = self._context
        self._add_phases()
        self.add_compilations("validation" if context.nested else "forward")
        if context.stage == "train" and context.ranks.global_rank == 0:
            before = self._opened
            self._opened, recording = self._recordings_now()
            self._recordings += before != self._opened or recording
        return (Totals(self._costs()) - self._origin).costs

    def _costs(self) -> Mapping[Action, Cost]:
        compilations = {
            Action(COMPILE, category, "torch.compile"): cost
            for category, cost in self._compilations.items()
            if cost.calls
        }
        recordings = {RECORDING: Cost(0.0, self._recordings)}
        collections = self._clock.collections
        squares = {SQUARES: Cost(self._clock.squares, 0)}
        saves = {SAVES: Cost(0.0, self._clock.saves)}
        return {**compilations, **run_queue(), **recordings, **collections, **squares, **saves}

    def add_compilations(self, category: str) -> None:
        """Add the compilations since the last call."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        compiled = getattr(utils, "compilation_time_metrics", {}).get(_COMPILED, ())
        # torch.compiler.reset() begins another list.
        new = compiled[self._counted if compiled is self._compiled else 0 :]
        self._compiled, self._counted = compiled, len(compiled)
        seconds, calls = self._compilations.get(category, (0.0, 0))
        self._compilations[category] = Cost(seconds + sum(new), calls + len(new))

    def _add_steps(self, stage: str, records: Sequence[BatchRecord]) -> None:
        if stage != "train" or self._closed:
            return
        if not self._steps:
            self._first = next((record.seconds for record in records if record.first), None)
        for record in records:
            seconds = nan if record.first else record.seconds
            flops = nan if record.cost is None else record.cost.total
            self._steps.extend(Step(seconds, flops, record.begins_epoch))
        del self._steps[: -_MOST_STEPS * len(Step._fields)]
        self._count += len(records)

    def _add_phases(self) -> None:
        """Add what the clock has measured of batches that have ended."""
        while tables := self._clock.by_batch:
            table = tables.popleft()
            self._phases.frombytes(table.astype(np.float32).tobytes())
            self._rows += len(table)
        del self._phases[: -(_MOST_STEPS + MOST_RECORDS) * len(CATEGORIES)]

    def _phases_of(self, count: int) -> NDArray[np.float64]:
        """Seconds of categories in the latest batches of which steps are known, one row each."""
        self._add_phases()
        rows = np.array(self._phases, float).reshape(-1, len(CATEGORIES))
        begin = self._count - count - (self._rows - len(rows))
        found = rows[max(begin, 0) : begin + count]
        return found if len(found) == count else found[:0]

    def signals(self) -> Signals:
        """The signals collected so far; safe to use on another thread."""
        context = self._context
        # Lightning creates this loader with the first validation.
        loader = _loader(compat.validation_loaders(context.trainer))
        done = context.trainer.global_step - self._begin_step
        setup = replace(
            self._setup, validation_loader=loader,
            steps_per_batch=done / self._count if done and self._count else 1.0,
        )  # fmt: skip
        steps = np.array(self._steps).reshape(-1, len(Step._fields))
        times, flops, begins_epoch = steps.T
        return Signals(
            self._windows(), times, flops, np.flatnonzero(begins_epoch),
            self._count - len(steps), self._first, context.training_mfu(),
            setup, any(getattr(each, "hangs", ()) for each in context.members),
            self._phases_of(len(steps)),
        )  # fmt: skip

    def _windows(self) -> Sequence[Window]:
        """The windows of all ranks, or of this one if the others' last part is missing."""
        end = self._context.windows.interrupted.get("train")
        if end is None:
            return self._log.windows()
        own = self._log.windows_of(end.rank, end)
        seconds = [sum(each.own(f"timings/{name}") for name in CATEGORIES) for each in own]
        return own if seconds[-1] > _MISSING * sum(seconds) else self._log.windows()

    def close(self, reason: str) -> dict[str, object]:
        """Stop collecting, and analyse the whole training, on rank 0.

        Returns:
            Sections of the summary: the costs by name, and averages of the machine's sensors.
        """
        context = self._context
        self._closed = True
        if self._schedule is not None:
            self._schedule.close()
        if reason == "failure" or self._began is None or context.ranks.global_rank != 0:
            return {}
        signals = self.signals()
        context.log_from_worker(self._run(signals).metrics, context.step)
        context.deliver(last=True)
        idle = signals.gpu_idle
        averages = {name: signals.average(f"system/{name}") for name in SENSORS}
        averages["gpu_util"] = None if idle is None else 100 * (1 - idle)
        averages["ofu"] = signals.gpu_average("ofu") if idle is not None else None
        culprits = [row._asdict() for row in self._log.table(context.times())]
        return {"culprits": culprits, "system": without_none(**averages)}


def _setup(context: Run) -> Setup:
    """The settings of a run that begins."""
    trainer: Any = context.trainer
    known: Any = context.setup()
    checkpoints = trainer.checkpoint_callbacks
    return Setup(
        device=trainer.strategy.root_device.type,
        world_size=context.ranks.world_size,
        cpus=usable_cpus(),
        threads=torch.get_num_threads(),
        precision=str(trainer.precision),
        peak_flops=known.get("peak_flops"),
        float32_peak_flops=known.get("float32_peak_flops"),
        compiled=is_compiled(context.module),
        log_every_n_steps=trainer.log_every_n_steps,
        batches_per_epoch=context.limits.batches_per_epoch,
        automatic_optimization=context.module.automatic_optimization,
        savers=frozenset(type(each).__name__ for each in checkpoints),
        weights_only=all(getattr(each, "save_weights_only", False) for each in checkpoints),
        reloads=getattr(trainer, "reload_dataloaders_every_n_epochs", 0) == 1,
        loader=_loader(compat.training_loaders(trainer), context),
        ours=frozenset({"lightning_perf", *(type(each).__name__ for each in context.members)}),
    )


#: Items of a container that are inspected: those of a dataset are alike.
_MOST_ITEMS = 16
#: The beginning of the names of modules whose iterators only wait for what workers load.
_LOADING = ("torch.utils.data.", "torchdata.")


def _loader(loaders: Sequence[Any], context: Run | None = None) -> Loader | None:
    """The settings of the first one; with a run, whether it uses its module."""
    loader = next(iter(loaders), None)
    own = attributes(loader)
    pipeline = own.get("pipeline")
    if type(pipeline) is list and pipeline:  # webdataset's WebLoader begins with a DataLoader
        loaders = pipeline  # each stage works on batches
        loader, own = pipeline[0], attributes(pipeline[0])
    if "num_workers" not in own:
        return None
    iterate = getattr(type(loader), "__iter__", None)
    own_code = not str(getattr(iterate, "__module__", "")).startswith(_LOADING)
    return Loader(
        num_workers=int(own["num_workers"]),
        batch_size=compat.loader_batch_size(loader),
        pin_memory=bool(own.get("pin_memory")),
        persistent_workers=bool(own.get("persistent_workers")),
        iterable=issubclass(type(own.get("dataset")), IterableDataset),
        sampler=compat.sampler_name(own.get("batch_sampler")),
        alone=len(loaders) == 1 and not own_code,
        uses_module=context is not None and _uses_module(own, context),
        prefetch_factor=int(own.get("prefetch_factor") or 2),
    )


def _uses_module(own: Mapping[str, Any], context: Run) -> bool:
    """Whether what workers copy of a DataLoader leads to the module, or a part with parameters.

    By attributes, items and the variables of functions: no code of the user runs.
    """
    module, trainer = context.module, context.trainer
    parts = {id(each) for each in module.modules() if next(each.parameters(), None) is not None}
    wanted = {id(module), *parts}
    # Each DataModule leads to the module by its Trainer.
    seen = {id(trainer), id(getattr(trainer, "datamodule", None))}
    waiting = deque([own.get("dataset"), own.get("collate_fn")])
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) in wanted:
            return True
        if type(value) not in PLAIN and id(value) not in seen:
            seen.add(id(value))
            waiting += _referents(value)
    return False


def _referents(value: Any) -> Iterable[Any]:
    kind: Any = type(value)
    if kind is MethodType:
        return value.__self__, value.__func__
    if kind is partial:
        return value.func, *value.args, *value.keywords.values()
    if kind is FunctionType:
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # not empty
        return [*(cell.cell_contents for cell in cells), *(value.__defaults__ or ())]
    if shape_of(value) is not None:
        return ()
    base: Any = container(kind)
    if base not in (None, UserDict):
        return islice(dict.values(value) if base is dict else base.__iter__(value), _MOST_ITEMS)
    functions = [each for one in kind.__mro__ for each in vars(one).values()]
    nested = [each for each in functions if type(each) is FunctionType and each.__closure__]
    return [*attributes(value).values(), *nested]
