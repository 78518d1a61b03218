"""Drives a run: from the set-up of the first of our callbacks on a Trainer to its end."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import inf
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_perf.background import wait_until
from lightning_perf.core.progress import Limits
from lightning_perf.errors import ConfigError, describe, let_through, warn
from lightning_perf.patches import PatchSet
from lightning_perf.run import compat
from lightning_perf.run.batches import BatchCounter, BatchRecord
from lightning_perf.run.flop_meter import COUNTING
from lightning_perf.run.run import Run
from lightning_perf.run.summary import LiveSummary, end_summary, hang_summary, log_folder
from lightning_perf.run.termination import Termination, signals_held
from lightning_perf.tracking.summary import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.run.summary import RunSummary

#: Seconds that the end of a run waits for the last report of other ranks, and for uploads: what is
#: not sent by then is listed for ``lightning-perf upload``.
GATHER_TIMEOUT = 10.0
UPLOAD_TIMEOUT = {"teardown": 30.0, "exception": 10.0}
#: Seconds that it waits for files that are being made of recordings.
FILE_TIMEOUT = {"teardown": 600.0, "exception": 60.0}
#: Seconds that a rank waits until the others have done this, too.
LEAVE_TIMEOUT = 10.0
#: Items of recorded spans that are kept until they are added up: reports may be far apart.
MOST_SPAN_ITEMS = 50_000


class RunContext(Run):
    """A run with what drives it: Lightning's hooks and loops, and the end.

    All ranks construct it together. Only the callbacks keep it alive, so a run whose end was never
    announced is freed with them.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        #: The trainer's callbacks before the run, and those that are added for the run.
        self.given: list[Any] = []
        self.added: list[Any] = []
        self._live = LiveSummary()
        # Counts samples and tokens, from the first stage on.
        self._counter: BatchCounter | None = None
        self._loop: compat.TrainingLoop  # read anew in each stage: modules may change it late
        # Batches or steps between two reports.
        self._every: float = inf
        #: Whether a report may be due after the last batch.
        self.report_possible = False
        # Seconds to wait for what is monitored.
        self._patience = GATHER_TIMEOUT
        # None if what is saved is not readable.
        self._resumed: bool | None = False
        #: Whether the run has ended.
        self.ended = False
        self._pid = os.getpid()
        # Lightning's tuners replace the callbacks, so no hook of ours is called on an error there.
        self._patches = PatchSet()
        this = weakref.ref(self)
        self._patches.wrap_in_context(trainer.strategy, "on_exception", partial(_failed, this))
        self._termination = Termination(partial(_end, this))
        torn_down = partial(_torn_down, this)
        self._patches.wrap_in_context(compat.signal_connector(trainer), "teardown", torn_down)
        epoch = compat.training_epoch_loop(trainer)
        self._patches.wrap_in_context(epoch, "run", partial(_batches_of_epoch, this))
        for loop, *stages in compat.evaluation_loops(trainer):
            self._patches.wrap_in_context(loop, "run", partial(_evaluation, this, *stages))
        self._patches.wrap(epoch, "_build_kwargs", compat.StepArguments)
        for worker in (self.worker, self.file_worker):  # freed without a close: threads end
            weakref.finalize(self, worker.close, 0.0).atexit = False
        _CONTEXTS[id(trainer)] = self
        # Registered again for each run, to run before handlers registered since the last one.
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)

    @property
    def begun(self) -> bool:
        """Whether a stage has begun."""
        return self._counter is not None

    def join(self, member: Any) -> None:
        """Add a callback; ConfigError if there is one of its kind."""
        known = [other.state_key for other in self.members]
        if member.keeps_progress and member.state_key in known:
            named = [type(callback).__name__ for callback in self.given]
            problem = f"has two of {type(member).__name__}: remove one (a Suite has its own)"
            raise ConfigError("callbacks", named, problem, None)
        self.members.append(member)

    # -- the end ----------------------------------------------------------------------------------

    def end_if_raised(self, callbacks: Iterable[Any]) -> None:
        """End the run also if one of these callbacks raises in its ``on_exception``."""
        failed = partial(_ended_if_raised, weakref.ref(self))
        for callback in callbacks:
            if getattr(type(callback), "on_exception", None) is not Callback.on_exception:
                self._patches.wrap_in_context(callback, "on_exception", failed)

    def leave(self, reason: str) -> None:
        """End the run: close its callbacks, and then what they share; ``reason`` as for `close`."""
        if self.ended or self._pid != os.getpid():  # or this process was forked in the run
            return
        try:
            with signals_held():
                self.ended = True  # not before: what raises on the way here ends the run again
                for step in self._closing_steps(reason):
                    try:
                        step()
                    except Exception as error:  # the other steps may hold recordings
                        warn(f"the end of the run failed ({describe(error)}).")
        finally:
            self._termination.restore()

    def fail(self) -> None:
        """End the run after an exception, while Lightning handles it.

        A signal may come now, such as of a DataLoader worker that was killed. What its handler
        raises waits until Lightning has torn down: here, it would skip the hooks of other callbacks
        and leave Lightning's handlers and the workers behind.
        """
        handled = sys.exc_info()[1]
        try:
            self.leave("exception")
        except BaseException as error:
            if not isinstance(handled, KeyboardInterrupt):  # then Lightning ends the process
                patches = PatchSet()
                raised = partial(_raised_after, patches, error, handled)
                patches.wrap_in_context(compat.signal_connector(self.trainer), "teardown", raised)

    def _closing_steps(self, reason: str) -> Iterator[Callable[[], object]]:
        """The steps of the end of the run; further ones may be registered by earlier ones."""
        summary: list[RunSummary | None] = []
        yield self._patches.restore
        if reason == "exception":
            yield self.windows.gatherer.fail
            yield self.windows.interrupt
        else:
            # Other ranks' last reports; callbacks receive them before they close.
            yield partial(self.windows.gatherer.finish, GATHER_TIMEOUT)
        yield partial(self.batches.fold, "train")
        for member in self.members:
            yield partial(member.call, member.close, self, reason)
        for member in self.members:
            yield member.detach
        yield self._restore_callbacks
        yield partial(_CONTEXTS.pop, id(self.trainer), None)
        yield lambda: summary.append(end_summary(self, self.members, reason))
        yield self.meter.close
        yield self.spans.restore
        timeouts = FILE_TIMEOUT[reason], UPLOAD_TIMEOUT[reason]
        yield partial(self.reporting.close, *timeouts)
        yield from self.reporting.closing
        yield self.reporting.remove_temporary
        yield self.reporting.warnings_digest.summarize
        yield lambda: self._show(summary[0] if summary else None, reason)
        if reason != "exception":
            yield partial(self.windows.gatherer.leave_together, LEAVE_TIMEOUT)
        yield self.windows.gatherer.close

    def _restore_callbacks(self) -> None:
        trainer: Any = self.trainer
        # Not in place: Lightning may be in a loop over them.
        trainer.callbacks = [each for each in trainer.callbacks if each not in self.added]

    def _show(self, summary: RunSummary | None, reason: str) -> None:
        with suppress(Exception):  # such as a closed stdout
            shown = summary is not None and summary.show()
            here = reason == "teardown" and self.ranks.global_rank == 0
            if here and not (shown or self.trainer.loggers):
                log_folder(self)

    # -- stages and batches -----------------------------------------------------------------------

    def begin(self, stage: str) -> None:
        """Lightning calls the hooks at the start of a stage, which may have begun with its loop."""
        if self.stages.within_loop:
            self.stages.begin_batches()
        else:
            self.advance(self.enter, stage)

    def enter(self, stage: str) -> None:
        """A stage starts."""
        self.spans.enter(stage)
        if not self.begun:
            self._counter = BatchCounter([self.module, *self._data_owners])
        limits = Limits()
        if self.spans.recorder is not None:
            self.meter.span = self.spans.recorder.cache["callbacks", COUNTING]
            self.reporting.own_calls = self.spans.recorder.own_calls
        self.meter.start(stage)
        if stage == "train":
            limits = self._read_limits()
            self.progress.reconcile(self.trainer, bool(self._resumed))
            self.attempt.resumed = self.progress.stages["train"].total_wct
        if stage == "train" or self.trainer.state.fn != "fit":
            version = {"version": installed_version()}
            self.reporting.describe(version | self.setup())
        self.stages.enter(stage, limits)
        self._select_stage()
        if not self.nested:  # reports before its first batch get its step
            self.stages.step = self._loop.step + (stage != "train")
        self.windows.enter()

    def _select_stage(self) -> None:
        """Another stage is current."""
        self.windows.quiet_until = 0
        if self.stage:
            trainer: Any = self.trainer
            self._loop, self._every = compat.TrainingLoop(trainer), trainer.log_every_n_steps or inf
            assert self._counter is not None  # made when the first stage began
            size = partial(compat.batch_size, trainer, self.stage, self.nested)
            self._counter.enter(self.stage, size)

    def end_batch(self, batch: Any) -> None:
        """A batch has ended: count it, and decide whether a report may be due."""
        assert self._counter is not None  # made when the first stage began
        stages, meter, windows = self.stages, self.meter, self.windows
        counters = stages.counters
        samples, tokens = self._counter.count(batch)
        if meter.wanted:
            meter.after_batch(batch)
        timer, recorder = self.batches.timer, self.spans.recorder
        timed = None if timer is None else timer.end()
        train = stages.stage == "train"
        if train:
            stages.step, steps, last = self._loop.counts
            number = stages.step + 1
        else:
            steps, last, number = 0, False, counters.batches + 1
            if not stages.nested:
                stages.step = self._loop.step + number
        waiting, now = max(meter.began - counters.mark, 0.0), perf_counter()
        if recorder is not None and train:
            recorder.clock.log.extend((now, None, None))
        seconds = counters.add(now, samples, tokens, steps, last)
        firsts = counters.batches == 1, counters.begins_epoch
        counting = meter.counting_seconds if meter.counted else None
        record = BatchRecord(
            seconds, samples, tokens, meter.work, meter.counted, *firsts, waiting, counting
        )
        self.batches.end_batch(stages.stage, record, timed)
        if record.first:
            windows.begin_batches()
        if recorder is not None and len(recorder.clock.log) > MOST_SPAN_ITEMS:
            recorder.clock.add_up()
        self.logs_now = number % self._every == 0 and not (
            self._loop.accumulating if train else stages.nested
        )
        if windows.pending:
            windows.gatherer.poll()
        self.report_possible = self.logs_now or counters.batch >= windows.quiet_until

    def advance(self, step: Callable[..., None], *args: Any) -> None:
        """Advance the run by one step; an error switches all callbacks off."""
        try:
            step(*args)
        except Exception as error:
            let_through(error)
            self.disable(step.__name__, error)

    def disable(self, step: str, error: Exception) -> None:
        """Switch all callbacks off."""
        for member in self.members:
            if not member.disabled:
                member.disable(step, error)

    def begin_epoch(self) -> None:
        """An epoch of training starts. Its data may differ, because loaders may be reloaded."""
        self.stages.limit(self._read_limits())
        self.windows.quiet_until = 0

    @override
    def refresh_summary(self) -> None:
        hang_summary(self)

    @override
    def note_summary(self) -> None:
        self._live.write(self)

    def begin_attempt(self) -> None:
        """Start the attempt before the first batch of a fit; later calls do nothing."""
        try:
            self.attempt.begin(self)
        except Exception as error:
            let_through(error)
            warn(f"the goodput of the job is not measured ({describe(error)}).")

    def _read_limits(self) -> Limits:
        self.limits = compat.limits_of(self.trainer, self._data_owners, self.sharing)
        return self.limits

    @property
    def _data_owners(self) -> list[Any]:
        """What may define the samples of a batch or an epoch besides the module, by precedence."""
        return [getattr(self.trainer, "datamodule", None), *self.members]

    def end_epoch(self) -> None:
        """An epoch of training has ended."""
        self.meter.resume(self.stage)
        self.counters.end_epoch()

    def report_monitored(self) -> None:
        """Report what callbacks of Lightning monitor, before they read it."""
        offered = any(getattr(member, "monitored", False) for member in self.members)
        if offered and self.is_monitored:
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
                if not self.nested:  # the callbacks that come next may close loggers
                    self.deliver(last=True)
        finally:
            self.batches.end_stage(self.stage)
            self.stages.exit()
            self._select_stage()
            self.spans.enter(self.stage)
            self.meter.resume(self.stage)

    # -- params, progress and metrics -------------------------------------------------------------

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
        """Log metrics as `Run.log`, and keep `summary.json` up to date."""
        super().log(metrics, step)
        if monotonic() >= self._live.due:
            self._live.refresh(self)


def _end(
    reference: weakref.ref[RunContext], reason: str = "exception"
) -> AbstractContextManager[None]:
    """End a run, before a signal ends the process or where no hook has."""
    with suppress(Exception):
        if (context := reference()) is not None:
            context.leave(reason)
    return nullcontext()


def _failed(this: weakref.ref[RunContext]) -> AbstractContextManager[None]:
    """End a run before the strategy handles an exception, which then propagates."""
    if (run := this()) is not None:
        run.fail()
    return nullcontext()


def _end_without_hooks(this: weakref.ref[RunContext]) -> AbstractContextManager[None]:
    """End a run whose hooks the user removed from the Trainer's callbacks."""
    if (run := this()) is None:
        return nullcontext()
    trainer: Any = run.trainer
    _, last_hooks, *_ = run.added
    return nullcontext() if last_hooks in trainer.callbacks else _end(this, "teardown")


@contextmanager
def _torn_down(this: weakref.ref[RunContext]) -> Iterator[None]:
    """Lightning handles SIGTERM up to now; from now on, until its end, the run does.

    Lightning itself sets the run's handler: SIGTERM may come right after it has set one. Only the
    hooks at the end of Lightning's function are left, and then the profiler's summary.
    """
    if (context := this()) is not None:
        context._termination.replace(compat.handlers_before(context.trainer))
    yield
    if context is not None:
        context._termination.handle()
        profiler = getattr(context.trainer, "profiler", None)
        end = partial(_end_without_hooks, this)
        context._patches.wrap_in_context(profiler, "describe", end)
        end()


@contextmanager
def _ended_if_raised(this: weakref.ref[RunContext]) -> Iterator[None]:
    """End a run if the ``on_exception`` of a callback raises: Lightning calls no other one then."""
    try:
        yield
    except BaseException:
        _end(this)
        raise


@contextmanager
def _raised_after(
    patches: PatchSet, error: BaseException, handled: BaseException | None
) -> Iterator[None]:
    """Raise an error after the last step of the teardown with which Lightning handles another."""
    patches.restore()
    yield
    if sys.exc_info()[1] is handled:  # otherwise this is the teardown of a later training
        raise error


@contextmanager
def _batches_of_epoch(reference: weakref.ref[RunContext]) -> Iterator[None]:
    """The batches of an epoch of training: hooks before the first one are not part of it."""
    context = reference()
    if context is None or context.stage != "train":
        yield
        return
    context.stages.begin_batches()
    context.begin_attempt()
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
    if context.stages.within_loop and not context.ended:
        context.advance(context.exit)


def _leave_at_exit() -> None:
    """End runs whose end was not announced: another callback's ``on_exception`` raised first."""
    for context in list(_CONTEXTS.values()):
        context.leave("exception")


# By the trainer's id, which is unique while the context lives.
_CONTEXTS: WeakValueDictionary[int, RunContext] = WeakValueDictionary()


def current_run(trainer: Trainer) -> RunContext | None:
    """The run of a trainer that was set up and has not ended."""
    return _CONTEXTS.get(id(trainer))
