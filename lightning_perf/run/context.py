"""The context of a run, which all of our callbacks on a Trainer share."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from lightning_perf.background import Worker, wait_until
from lightning_perf.core.progress import Limits, Moment
from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.patches import PatchSet
from lightning_perf.run import compat
from lightning_perf.run.batch_tracker import BatchCounter, BatchTracker
from lightning_perf.run.batches import BatchTotals
from lightning_perf.run.destination import Reporting
from lightning_perf.run.flop_meter import FlopMeter
from lightning_perf.run.hardware import (
    GPU_COLUMNS,
    MemorySignal,
    NodeSignal,
    node_gpus,
    node_sampler,
)
from lightning_perf.run.profiler import Spans
from lightning_perf.run.signals import ProgressSignal, SpanSignal, WaitSignal
from lightning_perf.run.stages import Counters, Progress, StageStack
from lightning_perf.run.summary import LONG, LiveSummary, end_summary, log_locations
from lightning_perf.run.termination import Termination
from lightning_perf.run.windows import Windows
from lightning_perf.schedule import Context
from lightning_perf.timing.cuda_events import DeviceTimer, clocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.core.progress import Timestamp
    from lightning_perf.run.run import Member
    from lightning_perf.run.summary import RunSummary
    from lightning_perf.run.windows import Signal
    from lightning_perf.system import Sampler


_log = logging.getLogger("lightning_perf")

#: Seconds that the end of a run waits for the last report of other ranks, and for uploads: what is
#: not sent by then is listed for ``lightning-perf upload``.
GATHER_TIMEOUT = 10.0
UPLOAD_TIMEOUT = {"teardown": 30.0, "exception": 10.0}
#: Seconds that it waits for files that are being made of recordings.
FILE_TIMEOUT = {"teardown": 600.0, "exception": 60.0}


class RunContext:
    """Owns what the callbacks of one Trainer share: progress, FLOPs, windows, workers, loggers.

    The first callback drives it, the last one to leave closes it. All ranks construct it together.
    Only the callbacks keep it alive, so a run whose end was never announced is freed with them.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.members: list[Member] = []
        # All callbacks that have joined.
        self._joined: list[Any] = []
        self.ranks = compat.ranks_of(trainer)
        self.limits = compat.limits_of(trainer)
        #: One thread talks to servers, the other makes files.
        self.worker, self.file_worker = Worker("lightning_perf"), Worker("lightning_perf maker")
        self.reporting = Reporting(trainer, self.worker, self.file_worker)
        self.meter = FlopMeter(trainer, module)
        self.progress = _PROGRESS.setdefault(trainer, Progress())
        timer = DeviceTimer() if clocked(trainer.strategy.root_device) else None
        self.stages = StageStack(self.progress, self.ranks, self.reporting.run_name, timer)
        self.spans = Spans(trainer, module, timer)
        self.batches = BatchTotals(timer)
        self.share_batches(compat.data_parallel_size(trainer))
        self.windows = Windows(trainer, self.stages, self.batches, self.spans, self.log)
        self.tracker = BatchTracker(
            trainer, self.stages, self.spans, self.meter, self.batches, self.windows
        )
        self._live = LiveSummary()
        self.windows.sources = self._sources()
        rank = self.ranks.global_rank
        # Not a method: the strategy, which is patched, must not keep the run alive.
        self.meter.report_untracked = partial(_report_untracked, self.reporting, rank)
        # Seconds to wait for what is monitored.
        self._patience = GATHER_TIMEOUT
        # None if what is saved is not readable.
        self._resumed: bool | None = False
        self._pid, self._started = os.getpid(), monotonic()
        # Lightning's tuners replace the callbacks, so no hook of ours is called on an error there.
        self._patches = PatchSet()
        this = weakref.ref(self)
        self._patches.wrap_in_context(trainer.strategy, "on_exception", partial(_end, this))
        self.termination = Termination(partial(_abandon, this))
        handled = partial(_handled_by_lightning, this)
        self._patches.wrap_in_context(compat.signal_connector(trainer), "teardown", handled)
        epoch = compat.training_epoch_loop(trainer)
        self._patches.wrap_in_context(epoch, "run", partial(_batches_of_epoch, this))
        for loop, *stages in compat.evaluation_loops(trainer):
            self._patches.wrap_in_context(loop, "run", partial(_evaluation, this, *stages))
        self._patches.wrap(epoch, "_build_kwargs", compat.StepArguments)
        for worker in (self.worker, self.file_worker):  # freed without a close: threads end
            weakref.finalize(self, worker.close, 0.0).atexit = False
        # Registered again for each run, to run before handlers registered since the last one.
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)

    def share_batches(self, data_parallel_size: int) -> None:
        """Count samples, tokens and declared FLOPs once where several ranks train on one batch."""
        ranks = self.ranks.world_size
        if ranks % data_parallel_size:
            problem = f"does not divide the world size, {ranks}"
            raise ConfigError("data_parallel_size", data_parallel_size, problem, str(ranks))
        self.batches.sharing = self.meter.sharing = ranks // data_parallel_size

    def _sources(self) -> dict[str, Callable[[], Signal]]:
        """Functions that start the signals, called when a callback subscribes to their columns.

        With several ranks all call this together.
        """
        node, device = self.ranks.node_rank, self.trainer.strategy.root_device
        gpus: Callable[[], int] = partial(node_gpus, self.trainer, self.ranks)
        if self.ranks.world_size > 1:
            # Nodes may differ, but all ranks must have the same columns. They agree now, because a
            # callback may fail on one rank before it subscribes.
            gatherer = self.windows.gatherer
            slots = gatherer.largest(gpus())
            gatherer.width += slots * GPU_COLUMNS
            gpus = partial(int, slots)

        def flops() -> BatchTotals:
            self.meter.require(None, "peak_flops")
            return self.batches.start()

        def sampler() -> Sampler | None:
            found = self.sampler
            if found is not None and not found.subscribed:
                found.subscribe("windows", 1.0)
                self.on_close(partial(found.unsubscribe, "windows"))
            return found

        return {
            "batch": self.batches.start,
            "flops": flops,
            "progress": lambda: ProgressSignal(self.progress),
            "timings": lambda: SpanSignal(self.spans.require()),
            "waits": lambda: WaitSignal(self.spans.require(), node),
            "system": lambda: NodeSignal(sampler(), gpus()),
            "memory": lambda: MemorySignal(device, sampler(), node),
        }

    # -- membership -------------------------------------------------------------------------------

    @classmethod
    def join(cls, trainer: Trainer, module: LightningModule, member: Member) -> RunContext:
        """The trainer's context, made for the first callback that joins.

        Raises:
            ConfigError: Another callback of the kind has joined.
        """
        context = _CONTEXTS.get(id(trainer))
        if context is not None and context.tracker.counter is not None:
            context.abandon()  # an earlier run whose end was not announced
            context = None
        if context is None:
            context = _CONTEXTS[id(trainer)] = cls(trainer, module)
        keys = {each.state_key for known in context.members for each in known.with_parts}
        for each in member.with_parts:
            if each.state_key in keys and each.keeps_progress:
                kind = type(each).__name__
                named = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
                problem = f"has two of {kind}: remove one (a Suite has its own)"
                raise ConfigError("callbacks", named, problem, None)
        context.members.append(member)
        context._joined += member.with_parts
        return context

    def leave(self, member: Member, reason: str) -> None:
        """Remove a callback; the last one closes what is shared."""
        if member in self.members:
            self.members.remove(member)
        if self.members or _CONTEXTS.get(id(self.trainer)) is not self:
            return
        del _CONTEXTS[id(self.trainer)]
        for step in self._closing_steps(reason):
            try:
                step()
            except Exception as error:  # the other steps may hold recordings
                warn(f"the end of the run failed ({describe(error)}).")

    def _closing_steps(self, reason: str) -> Iterator[Callable[[], object]]:
        """The steps of the end of the run; further ones may be registered by earlier ones."""
        summary: list[RunSummary | None] = []
        yield self._patches.restore
        yield self.windows.gatherer.close
        yield lambda: summary.append(end_summary(self, self._joined, reason))
        yield self.meter.close
        yield self.spans.restore
        timeouts = FILE_TIMEOUT[reason], UPLOAD_TIMEOUT[reason]
        yield partial(self.reporting.close, *timeouts)
        yield from self.reporting.closing
        yield self.reporting.remove_temporary
        yield self.reporting.warnings_digest.summarize
        yield lambda: self._show(summary[0] if summary else None, reason)

    def _show(self, summary: RunSummary | None, reason: str) -> None:
        with suppress(Exception):  # such as a closed stdout
            shown = summary is not None and summary.show()
            here = reason == "teardown" and self.ranks.global_rank == 0
            if here and not (shown or self.trainer.loggers):
                log_locations(self, self._joined)

    def finish_reports(self, reason: str) -> None:
        """Wait a bounded time for the last reports of all ranks; not after an exception."""
        try:
            if reason != "exception":
                self.windows.gatherer.finish(GATHER_TIMEOUT)
        except Exception as error:  # the end of the run may hold recordings
            warn(f"the last reports failed ({describe(error)}).")

    def abandon(self) -> None:
        """Remove all callbacks: the run has ended without their hooks being called."""
        for member in list(self.members):
            member.leave("exception")

    # -- position ---------------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """The running stage, by Lightning's name; empty between stages."""
        return self.stages.stage

    @property
    def counters(self) -> Counters:
        """The counts of the current stage."""
        return self.stages.counters

    @property
    def step(self) -> int:
        """The step at which loggers write what is reported now."""
        return self.stages.step

    @property
    def timestamp(self) -> Timestamp:
        """The progress of the current stage."""
        return self.counters.timestamp()

    @property
    def moment(self) -> Moment:
        """The current moment, before the next batch."""
        return self.stages.moment

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child that was forked in the run, which is its parent's."""
        return self._pid != os.getpid()

    @property
    def parts(self) -> list[Any]:
        """All callbacks on this trainer, those in suites included."""
        return [part for member in self.members for part in member.parts]

    @property
    def leaves_files(self) -> bool:
        """Whether this run has something to leave: files, and a description.

        Not before its first batch, so that a failed start changes nothing of an earlier run. Not
        for a short prediction or test without a logger: packages run many of them.
        """
        alone = self.trainer.state.fn != "fit" and not self.trainer.loggers
        short = alone and monotonic() - self._started < LONG
        return self.windows.ran and not short

    # -- called by the first callback -------------------------------------------------------------

    def enter(self, stage: str) -> None:
        """A stage starts."""
        self.spans.enter(stage)
        if self.tracker.counter is None:
            self.tracker.counter = BatchCounter([self.module, *self._data_owners])
            self.describe({"units": _units(self.parts)})
        limits = Limits()
        self.meter.start(stage)
        if stage == "train":
            limits = self._read_limits()
            self.progress.reconcile(self.trainer, bool(self._resumed))
            self.describe(self.setup())
        self.stages.enter(stage, limits)
        self._select_stage()
        self.tracker.begin()
        self.windows.enter()

    def _select_stage(self) -> None:
        """Another stage is current."""
        self.windows.quiet_until = 0
        if self.stage:
            self.tracker.enter()

    def advance(self, step: Callable[..., None], *args: Any) -> None:
        """Advance the run by one step; an error switches all callbacks off."""
        try:
            step(*args)
        except Exception as error:
            for member in list(self.members):
                if not member._disabled:
                    member.disable(step.__name__, error)

    def report(self) -> None:
        """A batch has ended after which a report may be due."""
        self.windows.report(self, False)

    def begin_epoch(self) -> None:
        """An epoch of training starts. Its data may differ, because loaders may be reloaded."""
        self.stages.limit(self._read_limits())
        self.windows.quiet_until = 0

    def _read_limits(self) -> Limits:
        self.limits = compat.limits_of(self.trainer, self._data_owners, self.batches.sharing)
        return self.limits

    @property
    def _data_owners(self) -> list[Any]:
        """What may define the samples of a batch or an epoch besides the module, by precedence."""
        return [getattr(self.trainer, "datamodule", None), *self.parts]

    def end_epoch(self) -> None:
        """An epoch of training has ended."""
        self.meter.resume(self.stage)
        self.counters.end_epoch()

    def report_monitored(self) -> None:
        """Report what callbacks of Lightning monitor, before they read it."""
        offered = any(getattr(part, "monitored", False) for part in self.parts)
        if offered and compat.monitored(self.trainer):
            poll = self.windows.gatherer.poll
            if poll():
                self._patience = GATHER_TIMEOUT
            self.windows.report(self, False, monitored=True)
            wait_until(poll, self._patience)
            if self.windows.pending:  # no further wait before the others answer
                self._patience = 0.0
            compat.complete_monitored(self.trainer)

    def end(self) -> None:
        """The current stage has ended, or ends when the loop that called its hooks returns."""
        self.stages.end()
        if not self.stages.within_loop:
            self.exit()

    def exit(self) -> None:
        """Leave the current stage; one without hooks was skipped."""
        try:
            if self.stages.ended:
                self.stages.settle()
                self.windows.report(self, True)
        finally:
            self.batches.end_stage(self.stage)
            self.stages.exit()
            self._select_stage()
            self.spans.enter(self.stage)
            self.meter.resume(self.stage)

    # -- for callbacks ------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """The run's name in files and reports, the same on every rank."""
        return self.reporting.run_name

    def offer(self, prefix: str, signal: Signal) -> None:
        """Offer a signal, whose columns begin with the prefix, to subscribers."""
        self.windows.sources[prefix] = lambda: signal

    def on_close(self, finish: Callable[[], None]) -> None:
        """Call a function at the end of the run, after the workers have stopped."""
        self.reporting.closing.append(finish)

    def write_files(
        self, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str, **options: Any
    ) -> None:
        """Write files of the run, if it has something to leave: `Reporting.write_files`."""
        if self.leaves_files:
            stamp = self.progress.timestamp(stage)
            self.reporting.write_files(folder, files, stage, stamp, **options)

    @property
    def schedule_context(self) -> Context:
        """What schedules may read of the run."""
        trainer: Any = self.trainer
        tags, reached = self.reporting.tags, self.reporting.reached
        # A trial run has no loggers.
        read_tags = tags.read if tags is not None else dict if trainer.fast_dev_run else None
        # Of the Trainer, because callbacks join one after the other.
        ours = (part for each in trainer.callbacks for part in getattr(each, "with_parts", ()))
        reachable = {code for part in ours for code in part.reaches}
        return Context(self.ranks, self.limits, read_tags, reached, reachable)

    @cached_property
    def sampler(self) -> Sampler | None:
        """The sampler of this node's hardware, on its first rank; None on the others."""
        return node_sampler(self.trainer, self.ranks)

    def describe(self, settings: Mapping[str, object]) -> None:
        """Log settings of the run or of a callback as params."""
        self.reporting.describe_settings(settings)

    def setup(self) -> dict[str, object]:
        """Device, its peak if it is known, precision and strategy."""
        peak = self.meter.peaks.setup() if self.meter.wanted else {}
        return compat.setup_of(self.trainer) | peak

    def resume(self, progress: dict[str, Any]) -> None:
        """Restore the progress of the training that is resumed."""
        if self.trainer.state.fn == "fit" and self._resumed is not None:
            try:
                self.progress.load_state_dict(progress)
                self._resumed = True
            except Exception as error:  # damaged, or of another version
                self._resumed = None
                text = f"the counts in the checkpoint are not readable ({describe(error)})"
                warn(f"{text}: they continue from those of Lightning.")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics to every logger of the trainer, from rank 0, and show them on every rank."""
        compat.show_metrics(self.trainer, metrics)
        self.reporting.log(metrics, step)
        if monotonic() >= self._live.due:
            self._live.refresh(self)


def _report_untracked(reporting: Reporting, rank: int, names: set[str]) -> None:
    listed = ", ".join(sorted(names))
    reporting.describe_settings({"untracked_operations": listed})
    if rank == 0:
        _log.warning(
            "lightning_perf: FLOPs of these operators are unknown and not counted: %s.", listed
        )


def _end(reference: weakref.ref[RunContext]) -> AbstractContextManager[None]:
    """End a run before the strategy handles an exception, which then propagates."""
    _abandon(reference)
    return nullcontext()


def _abandon(reference: weakref.ref[RunContext]) -> None:
    context = reference()
    with suppress(Exception):
        if context is not None:
            context.abandon()


@contextmanager
def _handled_by_lightning(reference: weakref.ref[RunContext]) -> Iterator[None]:
    """Lightning handles SIGTERM up to now; from now on, until its end, the run does."""
    yield
    if (context := reference()) is not None:
        context.termination.handle()


@contextmanager
def _batches_of_epoch(reference: weakref.ref[RunContext]) -> Iterator[None]:
    """The batches of an epoch of training: hooks before the first one are not part of it."""
    context = reference()
    if context is None or context.stage != "train":
        yield
        return
    context.stages.begin_batches()
    yield
    context.advance(context.report_monitored)


@contextmanager
def _evaluation(reference: weakref.ref[RunContext], stage: str, around: str) -> Iterator[None]:
    """A call of an evaluation loop, which is a stage: it makes its iterators before its hooks.

    Not if no stage of ours surrounds it: sanity checking, and a tuner's trials.
    """
    context = reference()
    if context is None or context.stage != around or context.trainer.sanity_checking:
        yield
        return
    if around:
        context.advance(context.report_monitored)
    context.advance(context.enter, stage)
    context.stages.within_loop = context.stage == stage
    yield  # an exception ends the run in this stage
    if context.stages.within_loop and context.members:
        context.advance(context.exit)


def _units(callbacks: Iterable[Member]) -> str:
    """The keys of metrics by their units, in one line."""
    keys: dict[str, dict[str, None]] = {}
    for each in callbacks:
        for key, unit in each.units.items():
            keys.setdefault(unit, {})[key] = None
    return "; ".join(f"{', '.join(names)}: {unit}" for unit, names in keys.items())


def _leave_at_exit() -> None:
    """End runs whose end was not announced: another callback's ``on_exception`` raised first."""
    for context in list(_CONTEXTS.values()):
        context.abandon()


# By the trainer's id, which is unique while the context lives.
_CONTEXTS: WeakValueDictionary[int, RunContext] = WeakValueDictionary()
# A trainer's progress outlives its contexts, which live for one fit or test each.
_PROGRESS: WeakKeyDictionary[Trainer, Progress] = WeakKeyDictionary()
