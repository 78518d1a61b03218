"""The base class of our callbacks."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cached_property, partial
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from lightning_perf.checks import name_arguments
from lightning_perf.errors import ConfigError, RecorderBusy, warn, without_credentials
from lightning_perf.run import compat
from lightning_perf.run.context import RunContext
from lightning_perf.run.hooks import ENDS, STAGES, UNUSED, Hooks
from lightning_perf.run.termination import signals_held
from lightning_perf.schedule import Schedule, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_perf.run.run import Run
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

    def __init__(self) -> None:
        self._engine: RunContext | None = None
        self._hooks = Hooks()
        self._progress: Progress | None = None
        # Progress that was loaded before the set-up of a run.
        self._loaded: dict[str, Any] | None = None
        self._disabled = False

    @cached_property
    def state_key(self) -> str:
        """One key per kind of callback, from the first set-up on.

        Before that it is this object's alone: for two of a kind, which cannot both keep state,
        Lightning's constructor would raise an error that does not say what to do. Cached, since
        Lightning asks for it at every hook.
        """
        return f"{self.kind} {id(self)}"

    @property
    def kind(self) -> str:
        """The key of this kind of callback in checkpoints."""
        return f"lightning_perf.{type(self).__name__}"

    @property
    def _context(self) -> Run | None:
        """The run that this callback takes part in."""
        return self._engine

    @property
    def parts(self) -> Sequence[PerfCallback]:
        """Callbacks that this one adds to the Trainer for a run, after itself."""
        return ()

    # -- lifecycle: override what you need ----------------------------------------------------

    def prepare(self, context: Run) -> None:
        """The run is set up, on all ranks: check arguments against it and acquire resources."""

    def on_start(self, context: Run) -> None:
        """A stage starts: ``context.stage``."""

    def on_epoch(self, context: Run) -> None:
        """An epoch of training starts, the first one too."""

    def before_batch(self, context: Run, batch: Any) -> None:
        """A batch is on the device."""

    def after_batch(self, context: Run, batch: Any) -> None:
        """A batch has ended; ``context.moment`` is after it."""

    def on_end(self, context: Run) -> None:
        """The stage ended without an exception."""

    def close(self, context: Run, reason: str) -> None:
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
        """Switch this callback off for the rest of this run."""
        # Warnings that the user turned into errors must not stop training either.
        with suppress(Exception):
            failed, advice = _explained(self, method, error)
            warn(
                f"{type(self).__name__} is off for the rest of this run: {failed} failed "
                f"({type(error).__name__}: {error}). Training continues.{advice}"
            )
        self._disabled = True
        with suppress(Exception):
            if self._engine is not None and method != "close":
                self.close(self._engine, "failure")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the trainer's run context."""
        if self._engine is not None:
            if self._engine.trainer is trainer:
                self._engine.abandon()  # its last run ended without a hook
            else:
                warn(
                    f"this {type(self).__name__} was attached to another Trainer, which it leaves: "
                    "give each Trainer its own callback."
                )
            self.leave("teardown")
        for name, reason in zip(ENDS, ("teardown", "exception"), strict=True):
            self._attach(name, partial(self._leave, reason))
        if type(self).state_key is PerfCallback.state_key:  # now checkpoints keep its state
            vars(self)["state_key"] = self.kind
        try:
            context = RunContext.join(trainer, pl_module, self)
        except Exception as error:
            # With several ranks the others would wait for this one, so the error must end all
            # ranks.
            if isinstance(error, _FOR_THE_USER) or trainer.world_size > 1:
                raise
            self.disable("setup", error)
            return
        self._engine, self._progress, self._disabled = context, context.progress, False
        self.call(self.prepare, context, reraise=True)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            context.resume(loaded)
        context.describe(self.settings())
        self._attach_hooks(leads=context.members[0] is self)
        self._add_parts(trainer, pl_module)

    def _attach(self, hook: str, ours: Callable[..., object] | None) -> None:
        self._hooks.attach(self, PerfCallback, hook, ours)

    def _attach_hooks(self, leads: bool) -> None:
        """Attach Lightning's hooks; those of batches follow when a stage begins."""
        for word in STAGES:
            self._attach(f"on_{word}_start", partial(self._begin, word))
            self._attach(f"on_{word}_end", partial(self._end, word))
        self._attach("on_train_epoch_start", self._begin_epoch)
        self._attach("on_train_epoch_end", self._end_epoch if leads else None)
        for hook in UNUSED:
            self._attach(hook, None)

    def _add_parts(self, trainer: Any, module: LightningModule) -> None:
        """Add the parts to the Trainer: in place, so that Lightning sets them up next."""
        callbacks: list[Any] = trainer.callbacks
        at = callbacks.index(self) + 1 if self in callbacks else len(callbacks)
        callbacks[at:at] = [part for part in self.parts if part not in callbacks]
        for part in self.parts:
            vars(part).update({name: getattr(module, name) for name in _ATTACHED})

    def _detach(self) -> None:
        """Detach from the run; remove the parts, and the methods that Lightning attached."""
        context, self._engine = self._engine, None
        self._hooks.restore(vars(self))
        self._hooks.clear()
        for name in _ATTACHED:
            vars(self).pop(name, None)
        if context is not None and self.parts:
            trainer: Any = context.trainer
            # Not in place: Lightning may be in a loop over them.
            trainer.callbacks = [each for each in trainer.callbacks if each not in self.parts]

    def overrides(self, method: str) -> bool:
        """Whether this class overrides ``before_batch`` or ``after_batch``."""
        return getattr(type(self), method) is not getattr(PerfCallback, method)

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to one process: spawned processes and copies join their own.
        own = dict(vars(self))
        self._hooks.restore(own)
        for name in (*_ATTACHED, "state_key"):
            own.pop(name, None)
        return own | {"_engine": None, "_progress": None, "_hooks": Hooks()}

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
        """Restore the progress of the run that is resumed, or else of the next run."""
        progress = state_dict.get("progress")
        if self._engine is None:
            self._loaded = progress
        elif progress is not None:
            self._engine.resume(progress)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Continue from the progress that any of our callbacks has saved, alone or in a Suite."""
        states = checkpoint["callbacks"].items()
        saved = [state for key, state in states if str(key).startswith("lightning_perf.")]
        progress = next((state["progress"] for state in saved if "progress" in state), None)
        if self._engine is not None and progress is not None:
            self._engine.resume(progress)

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
        context = self._engine
        if context is None:
            self._detach()  # set-up failed earlier, but Lightning has attached its methods
            return
        if context.is_forked:
            return
        try:
            with signals_held():
                if reason == "teardown":  # reports in flight find all callbacks attached
                    self.call(context.finish_reports, reason)
                self.call(self.close, context, reason)
                self._detach()
                context.leave(self, reason)
        except Exception as error:
            self.disable("leave", error)
        finally:
            if context.ended:
                context.termination.restore()

    # -- Lightning's hooks during a run: the first callback advances it, the last one reports -----

    def _leave(self, reason: str, *_: object, **__: object) -> None:
        self.leave(reason)

    def _begin(self, word: str, trainer: Trainer, *_: object) -> None:
        context = self._engine
        if context is None or trainer.sanity_checking:
            return
        if context.members[0] is self:
            context.begin(STAGES[word])
        before, after = (partial(f, STAGES[word]) for f in (self._before_batch, self._after_batch))
        wanted = self.overrides("before_batch")
        self._attach(f"on_{word}_batch_start", before if wanted else None)
        wanted = self in (context.members[0], context.reporter) or self.overrides("after_batch")
        self._attach(f"on_{word}_batch_end", after if wanted else None)
        # Before training starts an error may still stop it; validation inside of fit comes later.
        self.call(self.on_start, context, reraise=not context.stages.nested)

    def _end(self, word: str, *_: object) -> None:
        context = self._engine
        if context is None or context.stage != STAGES[word]:
            return
        self.call(self.on_end, context)
        if context.members[-1] is self:
            context.advance(context.end)

    def _begin_epoch(self, *_: object) -> None:
        context = self._engine
        if context is None or context.stage != "train":
            return
        if context.members[0] is self:
            context.advance(context.begin_epoch)
        self.call(self.on_epoch, context)

    def _end_epoch(self, *_: object) -> None:
        context = self._engine
        if context is not None and context.stage == "train":
            context.advance(context.end_epoch)

    def _before_batch(self, stage: str, *arguments: Any) -> None:
        context, batch = self._engine, arguments[2]
        if context is not None and context.stages.stage == stage:
            self.call(self.before_batch, context, batch)

    def _after_batch(self, stage: str, *arguments: Any) -> None:
        """A batch has ended: this runs once per batch, and makes few calls."""
        context, batch = self._engine, arguments[3]
        if context is None or context.stages.stage != stage:
            return
        if context.members[0] is self:
            context.advance(context.tracker.end_batch, batch)
        if not self._disabled:
            try:
                self.after_batch(context, batch)
            except Exception as error:
                self.disable("after_batch", error)
        if context.tracker.report_possible and context.reporter is self:
            context.advance(context.report)


def _is_ours(value: object) -> bool:
    """Whether the class of an object is this package's."""
    return type(value).__module__.startswith("lightning_perf.")


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
