"""The base class of our callbacks."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cached_property
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from lightning_perf.checks import name_arguments
from lightning_perf.errors import ConfigError, RecorderBusy, warn, without_credentials
from lightning_perf.run import compat
from lightning_perf.run.context import RunContext
from lightning_perf.run.hooks import HOOKS, UNUSED, install_stage_hooks, with_ours
from lightning_perf.run.termination import signals_held
from lightning_perf.schedule import Schedule, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_perf.run.stages import Progress
else:
    Callback = compat.callback_class()


#: Set-up errors that the user can fix: these stop the run before it starts.
_FOR_THE_USER = (ConfigError, RecorderBusy, FileExistsError)
#: Methods of the module, which holds the Trainer, that Lightning attaches to each callback.
_ATTACHED = ("log", "log_dict")


class PerfCallback(Callback):
    """The base of our callbacks: override the lifecycle methods, which are alike in all stages.

    ``prepare`` acquires what a run needs and may refuse an argument; ``on_start`` and ``on_end``
    frame a stage, ``before_batch`` and ``after_batch`` a batch; ``close`` releases everything.
    Sanity-check validation is ignored. If a method raises, this callback is disabled for the rest
    of the run with one warning, and training continues.
    """

    #: Whether checkpoints carry the run's progress in this callback's state.
    keeps_progress = True
    #: Whether the summary of the run is printed at its end.
    show_summary = False
    #: The units of its metrics, by key or pattern (``"timings/*"``), for the run's params.
    units: Mapping[str, str] = {}
    #: Codes and severities of the verdicts that it may reach.
    reaches: Collection[str] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = name_arguments(cls.__init__)  # type: ignore[method-assign]
        for name in HOOKS & vars(cls).keys():
            setattr(cls, name, with_ours(getattr(PerfCallback, name), vars(cls)[name]))

    def __init__(self) -> None:
        self._context: RunContext | None = None
        #: The context that Lightning's hooks advance: None if another callback hosts this one, and
        #: during a subclass's hook.
        self._driven: RunContext | None = None
        self._progress: Progress | None = None
        # Progress that was loaded before the set-up of a run.
        self._loaded: dict[str, Any] | None = None
        self._disabled = False
        #: Whether another callback hosts this one and receives Lightning's hooks in its place.
        self._hosted = False
        self._settled = False
        # Parts that override `before_batch` and `after_batch`.
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
        """The callbacks that run, in this order: this one, those that it hosts, or both."""
        return [self]

    @property
    def with_parts(self) -> list[PerfCallback]:
        """This callback and its parts, each once."""
        return list(dict.fromkeys((self, *self.parts)))

    # -- lifecycle: override what you need ----------------------------------------------------

    def prepare(self, context: RunContext) -> None:
        """The run is set up, on all ranks: check arguments against it and acquire resources."""

    def on_start(self, context: RunContext) -> None:
        """A stage starts: ``context.stage``."""

    def on_epoch(self, context: RunContext) -> None:
        """An epoch of training starts, the first one too."""

    def before_batch(self, context: RunContext, batch: Any) -> None:
        """A batch is on the device."""

    def after_batch(self, context: RunContext, batch: Any) -> None:
        """A batch has ended; ``context.moment`` is after it."""

    def on_end(self, context: RunContext) -> None:
        """The stage ended without an exception."""

    def close(self, context: RunContext, reason: str) -> None:
        """Release everything; may be called more than once.

        The reason is ``"teardown"``, ``"exception"`` or ``"failure"`` (of this callback).
        """

    def summary_sections(self) -> Mapping[str, Any]:
        """What this callback adds to `summary.json` at the end of a run, by section; on rank 0."""
        return {}

    # -- dispatch -----------------------------------------------------------------------------

    def call(self, method: Callable[..., Any], *args: Any, reraise: bool = False) -> Any:
        """Call a bound method of this callback so that its failure does not reach training.

        With ``reraise``, errors that the user can fix are raised instead of disabling the callback.

        Returns:
            What it returns; None if it failed or this callback is disabled.
        """
        if self._disabled:
            return None
        try:
            return method(*args)
        except Exception as error:
            if reraise and isinstance(error, _FOR_THE_USER):
                raise
            self.disable(method.__name__, error)
            return None

    def disable(self, method: str, error: Exception) -> None:
        """Switch this callback, and those that it hosts, off for the rest of this run."""
        # Warnings that the user turned into errors must not stop training either.
        with suppress(Exception):
            failed, advice = _explained(self, method, error)
            warn(
                f"{type(self).__name__} is off for the rest of this run: {failed} failed "
                f"({type(error).__name__}: {error}). Training continues.{advice}"
            )
        for each in self.with_parts:
            each._disabled = True
            with suppress(Exception):
                if self._context is not None and method != "close":
                    each.close(self._context, "failure")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the trainer's run context."""
        if self._hosted:
            return
        if self._context is not None:
            if self._context.trainer is trainer:
                self._context.abandon()  # its last run ended without a hook
            else:
                warn(
                    f"this {type(self).__name__} was attached to another Trainer, which it leaves: "
                    "give each Trainer its own callback."
                )
            self.leave("teardown")
        for each in self.with_parts:  # from now on checkpoints keep their state
            each._settled = True
            vars(each).pop("state_key", None)
        try:
            context = RunContext.join(trainer, pl_module, self)
        except Exception as error:
            # With several ranks the others would wait for this one, so the error must end all
            # ranks.
            if isinstance(error, _FOR_THE_USER) or trainer.world_size > 1:
                raise
            self.disable("setup", error)
            return
        self._attach(context)
        self._driven = context
        self._skip_hooks(*UNUSED)
        context.describe({key: v for part in self.parts for key, v in part.settings().items()})

    def _attach(self, context: RunContext) -> None:
        """Prepare for a run; errors that the user can fix are raised."""
        for each in self.with_parts:
            each._context, each._progress, each._disabled = context, context.progress, False
            each._hosted = each is not self
            each.call(each.prepare, context, reraise=True)
            loaded, each._loaded = each._loaded, None
            if loaded is not None:
                context.resume(loaded)

    def overrides(self, method: str) -> bool:
        """Whether this class overrides ``before_batch`` or ``after_batch``."""
        return getattr(type(self), method) is not getattr(PerfCallback, method)

    def _detach(self) -> None:
        """Detach from the run, and remove the module's methods that Lightning attached."""
        for each in self.with_parts:
            each._context = each._driven = None
            each._hosted = False
            for name in (*each._skipped_hooks, *_ATTACHED):
                vars(each).pop(name, None)
            each._skipped_hooks.clear()

    def _skip_hooks(self, *hooks: str) -> None:
        """Disable unused Lightning hooks on this instance: Lightning skips what is not callable.

        On the instance, so that a subclass may define them and call super(). Unused hooks are most
        of what a callback costs per batch.
        """
        for hook in hooks:
            if getattr(getattr(self, hook), "__func__", None) is getattr(PerfCallback, hook):
                setattr(self, hook, None)
                self._skipped_hooks.append(hook)

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to one process: spawned processes and copies join their own.
        left_out = {*self._skipped_hooks, *_ATTACHED, "state_key"}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        none = dict.fromkeys(("_context", "_driven", "_progress"))
        flags = {"_hosted": False, "_settled": False}
        lists = ("_before_batch_parts", "_after_batch_parts", "_skipped_hooks")
        return own | none | flags | {name: [] for name in lists}

    def settings(self) -> dict[str, object]:
        """The constructor's arguments, for the run's params."""
        name = type(self).__name__
        arguments = inspect.signature(type(self)).parameters
        given = {key: getattr(self, key) for key in arguments if hasattr(self, key)}
        return {f"{name}/{key}": _readable(value) for key, value in given.items()}

    def state_dict(self) -> dict[str, Any]:
        """The run's progress, as plain values."""
        if self._loaded is not None:
            return {"progress": self._loaded}
        if not self.keeps_progress or self._progress is None:
            return {}
        return {"progress": self._progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress of the next run; ``on_load_checkpoint`` does it during a run."""
        if self._context is None:
            self._loaded = _progress_in(state_dict)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue from the progress that any of our callbacks has saved, alone or in a Suite."""
        states = checkpoint["callbacks"].items()
        saved = [state for key, state in states if str(key).startswith("lightning_perf.")]
        progress = next(filter(None, map(_progress_in, saved)), None)
        if self._context is not None and progress:
            self._context.resume(progress)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the run."""
        self.leave("teardown")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the run; the user's exception propagates."""
        self.leave("exception")

    def leave(self, reason: str) -> None:
        """Close, and leave the run context, if there is one; ``reason`` as for ``close``."""
        context = self._context
        if self._hosted:
            return
        if context is None:
            self._detach()  # set-up failed earlier, but Lightning has attached its methods
            return
        if context.is_forked:
            return
        try:
            with signals_held():
                context.finish_reports(reason)  # callbacks receive them while they are in the run
                for part in self.parts:
                    part.call(part.close, context, reason)
                self._detach()
                context.leave(self, reason)
        except Exception as error:
            self.disable("leave", error)
        finally:
            if not context.members:
                context.termination.restore()

    def _begin(self, stage: str, word: str) -> None:
        context = self._driven
        if context is None:
            return
        leads, last = context.members[0] is self, context.members[-1] is self
        if leads:
            if context.stages.within_loop:  # it began with the loop
                context.stages.begin_batches()
            else:
                context.advance(context.enter, stage)
        self._before_batch_parts = [part for part in self.parts if part.overrides("before_batch")]
        self._after_batch_parts = [part for part in self.parts if part.overrides("after_batch")]
        if not self._before_batch_parts:
            self._skip_hooks(f"on_{word}_batch_start")
        if not (self._after_batch_parts or leads or last):
            self._skip_hooks(f"on_{word}_batch_end")
        # Before training starts an error may still stop it; validation inside of fit comes later.
        for part in self.parts:
            part.call(part.on_start, context, reraise=not context.stages.nested)

    def _end(self, stage: str) -> None:
        context = self._driven
        if context is None or context.stage != stage:
            return
        for part in self.parts:
            part.call(part.on_end, context)
        if context.members[-1] is self:
            context.advance(context.end)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the length of the epoch."""
        self._at_epoch(RunContext.begin_epoch)
        context = self._driven
        for part in self.parts if context is not None and context.stage == "train" else ():
            part.call(part.on_epoch, context)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance the epoch."""
        self._at_epoch(RunContext.end_epoch)

    def _at_epoch(self, step: Callable[[RunContext], None]) -> None:
        context = self._driven
        if context is not None and context.stage == "train" and context.members[0] is self:
            context.advance(step, context)


def _is_ours(value: object) -> bool:
    """Whether the class of an object is this package's."""
    return type(value).__module__.startswith("lightning_perf.")


def _progress_in(state: object) -> Any:
    """The progress in the state of a callback; None if there is none."""
    return state.get("progress") if isinstance(state, dict) else None


def _explained(callback: PerfCallback, method: str, error: Exception) -> tuple[str, str]:
    """The method that failed, and what to do about it."""
    if raised := _raised_by_schedule(error):
        return raised, ""
    # Authors of a callback write `on_window`, which `receive` calls.
    failed = "on_window" if method == "receive" else method
    if isinstance(error, OSError | ConfigError) or not _is_ours(callback):
        return failed, ""
    schedule = getattr(callback, "schedule", None)
    own = [] if schedule is None else [x for x in walk(schedule) if not _is_ours(x)]
    if own and isinstance(error, TypeError | ValueError):
        names = ", ".join(type(each).__name__ for each in own)
        wanted = "window() a hashable value or None, quiet_until() a number"
        return failed, f" Check what {names} returns: {wanted}."
    return failed, " Please report this."


def _raised_by_schedule(error: Exception) -> str | None:
    """The method of a user's schedule that raised an error, if one did."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Schedule) and not _is_ours(owner):
            found = f"{type(owner).__name__}.{frame.f_code.co_name}"
    return found


def _readable(value: object) -> object:
    """A function by its name, whose address differs from run to run; a URL without passwords."""
    if isinstance(value, str):
        return without_credentials(value)
    return getattr(value, "__qualname__", value) if callable(value) else value


install_stage_hooks(PerfCallback)
