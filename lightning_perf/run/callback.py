"""The base class of our callbacks."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import Callback

from lightning_perf.core.progress import STAGES
from lightning_perf.errors import ConfigError, RecorderBusy, warn, without_credentials
from lightning_perf.run.context import RunContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.core.reduce import Rows
    from lightning_perf.run.flop_meter import BatchCost
    from lightning_perf.run.stages import Progress

    #: What came of one batch: seconds, samples and tokens (None where they cannot be told), FLOPs
    #: (None where they are not known), whether it took longer because these were counted, and
    #: whether it was the first of its stage. A plain tuple, since one is made of every batch.
    BatchRecord = tuple[float, int | None, int | None, BatchCost | None, bool, bool]


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has to say at one time."""

    #: Sent to the other ranks.
    values: Sequence[float]
    stage: str
    #: The loggers'.
    step: int
    #: Kept here.
    at_end: bool = False
    own: Mapping[str, float] = field(default_factory=dict)


class Part(Protocol):
    """One callback that reports, as ``PerfCallback`` documents."""

    state_key: str
    reports: bool

    @property
    def quiet_until(self) -> float:
        """The batch of the stage before which it is due only where Lightning logs."""
        ...

    def overrides(self, verb: str) -> bool:
        """Whether it has anything to do at a verb of every batch."""
        ...

    def due(self, context: RunContext, at_end: bool) -> bool:
        """Whether there is something to report now, on all ranks alike."""
        ...

    def call(self, verb: str, *args: Any) -> Any:
        """Call a verb so that no failure reaches training."""
        ...


class Member(Protocol):
    """What the driver knows of the callbacks that it drives."""

    @property
    def parts(self) -> list[Any]:
        """The callbacks that it is, or hosts."""
        ...

    @property
    def state_key(self) -> str:
        """What tells it from others of the Trainer."""
        ...

    def leave(self, reason: str) -> None:
        """End its part in the run; harmless once it is over."""
        ...


class Verbs:
    """The few verbs into which Lightning's hooks are folded; none of them has to be written.

    ``prepare`` acquires what a run needs and may refuse a setting; ``on_start`` and ``on_end``
    frame a stage, ``before_batch`` and ``after_batch`` a batch; ``after_batches`` tells of many at
    a time; ``due``, ``collect`` and ``publish`` make a report; ``close`` lets everything go.
    """

    @property
    def quiet_until(self) -> float:
        """The batch of the stage before which it is due only where Lightning logs."""
        return math.inf

    def prepare(self, context: RunContext) -> None:
        """The run is set up, on all ranks: check settings against it."""

    def on_start(self, context: RunContext) -> None:
        """``driver.stage`` begins."""

    def before_batch(self, context: RunContext, batch: Any) -> None:
        """A batch has arrived on the device."""

    def after_batch(self, context: RunContext, batch: Any) -> None:
        """A batch has been worked on; ``driver.moment`` is past it."""

    def after_batches(self, context: RunContext, batches: Sequence[BatchRecord]) -> None:
        """What came of the batches since the last call, before each report at the latest.

        For what need not be known at once: it takes a fraction of the time of ``after_batch``.
        """

    def on_end(self, context: RunContext) -> None:
        """``driver.stage`` ends as it should."""

    def due(self, context: RunContext, at_end: bool) -> bool:
        """Whether there is something to report now, on all ranks alike.

        Asked after every batch and at a stage's end, on every rank, even where this callback has
        given up: it must follow from what all ranks share, and not fail. Before ``quiet_until``
        only where Lightning logs (``driver.report_due``) and at the end.
        """
        return False

    def collect(self, context: RunContext, at_end: bool) -> Report | None:
        """This rank's numbers for a report that is due."""
        raise NotImplementedError

    def publish(self, context: RunContext, report: Report, rows: Rows) -> None:
        """Log a report, from one row of numbers a rank: some batches later, with several ranks."""

    def close(self, context: RunContext, reason: str) -> None:
        """Let go of everything; called once or more.

        Args:
            context: The run's.
            reason: ``"teardown"``, ``"exception"`` or ``"failure"`` (of this callback).
        """


_WORDS = dict(zip(STAGES, ("train", "validation", "test", "predict"), strict=True))


def _install_stage_hooks(callback: type[PerfCallback]) -> None:
    """Give a class the hooks of all stages, which call a few methods of its own."""
    for stage, word in _WORDS.items():
        hooks = {
            "start": _start(stage, word),
            "end": _end(stage),
            "batch_start": _batch_start(stage),
            "batch_end": _batch_end(stage),
        }
        for name, hook in hooks.items():
            hook.__name__ = f"on_{word}_{name}"
            setattr(callback, hook.__name__, hook)


def _start(stage: str, word: str) -> Callable[..., None]:
    def start(self: PerfCallback, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin(stage, word)

    return start


def _end(stage: str) -> Callable[..., None]:
    def end(self: PerfCallback, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(stage)

    return end


# Each call of Python's takes a microsecond of every batch, so these two make few.


def _batch_start(stage: str) -> Callable[..., None]:
    def batch_start(
        self: PerfCallback, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        context = self._context
        if context is None or context.stage != stage:
            return
        for part in self._before_batch_parts:
            part.call("before_batch", context, batch)

    return batch_start


def _batch_end(stage: str) -> Callable[..., None]:
    def batch_end(
        self: PerfCallback,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        context = self._context
        if context is None or context.stage != stage:
            return
        if context.members[0] is self:
            try:
                context.end_batch(batch)
            except Exception as error:
                self._all_give_up("end_batch", error)
        for part in self._after_batch_parts:
            if not part._given_up:
                try:
                    part.after_batch(context, batch)
                except Exception as error:
                    part._give_up("after_batch", error)
        if context.exchange.asked and context.members[-1] is self:
            self._drive("report", False)

    return batch_end


#: Errors of set-up that the user can mend: these stop the run before it starts.
_FOR_THE_USER = (ConfigError, RecorderBusy, FileExistsError)
#: Lightning's hooks of every batch that no verb needs.
_UNUSED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: What Lightning puts on each callback of a run: methods of the module, which has the Trainer.
_ATTACHED = ("log", "log_dict")


class PerfCallback(Verbs, Callback):
    """The base of our callbacks: override the verbs, never Lightning's hooks.

    The sanity check of validation is no stage. A verb that raises switches this callback off,
    with one warning, and training goes on.
    """

    #: Whether ``due`` is asked.
    reports = False
    #: Whether checkpoints carry the run's progress in this callback's state.
    keeps_progress = True

    def __init__(self) -> None:
        self._context: RunContext | None = None
        self._progress: Progress | None = None
        self._given_up = False
        #: Whether a Suite hosts this, which hears Lightning in its place.
        self._hosted = False
        self._settled = False
        # Those of its parts that have something to do before and after each batch.
        self._before_batch_parts: list[PerfCallback] = []
        self._after_batch_parts: list[PerfCallback] = []
        self._skipped_hooks: list[str] = []

    @cached_property
    def state_key(self) -> str:
        """One key per kind of callback, from the first set-up on.

        Before that it is this object's alone: for two of a kind, which cannot both keep state,
        Lightning's constructor would raise an error that does not say what to do. Cached, since
        Lightning asks for it at every hook.
        """
        return self.kind if self._settled else f"{self.kind} {id(self)}"

    @property
    def kind(self) -> str:
        """The key of this kind of callback in checkpoints."""
        return f"lightning_perf.{type(self).__name__}"

    @property
    def parts(self) -> list[PerfCallback]:
        """The callbacks that this is, or hosts."""
        return [self]

    # -- dispatch ---------------------------------------------------------------------------------

    def call(self, verb: str, *args: Any, reraise: bool = False) -> Any:
        """Call a verb so that no failure of ours reaches training.

        Args:
            verb: The method's name.
            *args: Its arguments.
            reraise: Whether errors that the user can mend are raised all the same.

        Returns:
            What it returns; None if it failed, or this callback has given up.
        """
        if self._given_up:
            return None
        try:
            return getattr(self, verb)(*args)
        except Exception as error:
            if reraise and isinstance(error, _FOR_THE_USER):
                raise
            self._give_up(verb, error)
            return None

    def _give_up(self, verb: str, error: Exception) -> None:
        self._given_up = True
        # Warnings that the user turned into errors must not stop training either.
        theirs = isinstance(error, OSError | ConfigError)
        ours = "" if theirs else " Please report this."
        with suppress(Exception):
            warn(
                f"{type(self).__name__} is off for the rest of this run: {verb} failed "
                f"({type(error).__name__}: {error}). Training goes on.{ours}"
            )
        with suppress(Exception):
            if self._context is not None and verb != "close":
                self.close(self._context, "failure")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the trainer's driver."""
        if self._hosted:
            return
        if self._context is not None:
            if self._context.trainer is trainer:
                self._context.abandon()  # nobody told of the end of its last run
            else:
                warn(
                    f"this {type(self).__name__} leaves the Trainer that it watched for another "
                    "one: give each Trainer a callback of its own."
                )
            self.leave("teardown")
        self.settle_key()
        context = RunContext.join(trainer, pl_module, self)
        self.attach(context)
        self._skip_hooks(*_UNUSED)
        context.describe(self.settings())

    def settle_key(self) -> None:
        """Take the key of this kind, under which checkpoints have its state."""
        self._settled = True
        vars(self).pop("state_key", None)

    def attach(self, context: RunContext) -> None:
        """Get ready for a run; errors that the user can mend are raised."""
        self._context, self._progress, self._given_up = context, context.progress, False
        self.call("prepare", context, reraise=True)

    def overrides(self, verb: str) -> bool:
        """Whether it has anything to do at a verb of every batch."""
        return getattr(type(self), verb) is not getattr(Verbs, verb)

    def detach(self) -> None:
        """Know the run no more, nor the module that Lightning made it log by."""
        self._context, self._hosted = None, False
        for name in (*self._skipped_hooks, *_ATTACHED):
            vars(self).pop(name, None)
        self._skipped_hooks.clear()

    def _skip_hooks(self, *hooks: str) -> None:
        """Have Lightning pass over hooks: it does so with what is not callable.

        On the object, so that a subclass may have them and call super(). That is most of what a
        callback costs a batch.
        """
        for hook in hooks:
            if getattr(getattr(self, hook), "__func__", None) is getattr(PerfCallback, hook):
                setattr(self, hook, None)
                self._skipped_hooks.append(hook)

    def __getstate__(self) -> dict[str, Any]:
        # A run is a process's own: spawned processes and copies join theirs.
        left_out = {*self._skipped_hooks, *_ATTACHED, "state_key"}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        none = {"_context": None, "_progress": None, "_hosted": False, "_settled": False}
        return {
            **own,
            **none,
            "_before_batch_parts": [],
            "_after_batch_parts": [],
            "_skipped_hooks": [],
        }

    def settings(self) -> dict[str, object]:
        """The arguments that this was made with, for the run's params."""
        name = type(self).__name__
        arguments = list(inspect.signature(type(self).__init__).parameters)[1:]
        given = {key: getattr(self, key) for key in arguments if hasattr(self, key)}
        return {f"{name}/{key}": _readable(value) for key, value in given.items()}

    def state_dict(self) -> dict[str, Any]:
        """The run's progress, for callbacks that measure; plain values only."""
        if not self.keeps_progress or self._progress is None:
            return {}
        return {"progress": self._progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the progress of the run that is resumed."""
        if self._context is not None and "progress" in state_dict:
            self._context.resume(state_dict["progress"])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave it."""
        self.leave("teardown")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave it; the user's exception goes on."""
        self.leave("exception")

    def leave(self, reason: str) -> None:
        """Close, and leave the trainer's driver; harmless without one.

        Args:
            reason: As for ``close``.
        """
        context = self._context
        if self._hosted:
            return
        if context is None:
            self.detach()  # it has not got so far, but Lightning has put its methods here
            return
        self.call("close", context, reason)
        self.detach()
        try:
            context.leave(self, reason)
        except Exception as error:
            self._give_up("leave", error)

    def _begin(self, stage: str, word: str) -> None:
        context = self._context
        if context is None or self._hosted:
            return
        leads, last = context.members[0] is self, context.members[-1] is self
        if leads:
            self._drive("enter", stage)
        self._before_batch_parts = [part for part in self.parts if part.overrides("before_batch")]
        self._after_batch_parts = [part for part in self.parts if part.overrides("after_batch")]
        if not self._before_batch_parts:
            self._skip_hooks(f"on_{word}_batch_start")
        if not (self._after_batch_parts or leads or last):
            self._skip_hooks(f"on_{word}_batch_end")
        # Before the first batch a user can still be told; within training no more.
        self.call("on_start", context, reraise=not context.nested)

    def _end(self, stage: str) -> None:
        context = self._context
        if context is None or context.stage != stage or self._hosted:
            return
        self.call("on_end", context)
        if context.members[-1] is self:
            self._drive("report", True)
            self._drive("exit")

    def _drive(self, verb: str, *args: Any) -> None:
        """Move the shared driver on."""
        try:
            getattr(self._context, verb)(*args)
        except Exception as error:
            self._all_give_up(verb, error)

    def _all_give_up(self, verb: str, error: Exception) -> None:
        """What all share has failed: none of us can go on."""
        assert self._context is not None  # the hooks look first
        for member in list(self._context.members):
            if isinstance(member, PerfCallback) and not member._given_up:
                member._give_up(verb, error)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the epoch."""
        context = self._context
        if context is not None and context.stage == "train" and context.members[0] is self:
            self._drive("end_epoch")


def _readable(value: object) -> object:
    """A function by its name, whose address differs from run to run; a URL without passwords."""
    if isinstance(value, str):
        return without_credentials(value)
    return getattr(value, "__qualname__", value) if callable(value) else value


_install_stage_hooks(PerfCallback)
