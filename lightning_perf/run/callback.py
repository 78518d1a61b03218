"""The base class of our callbacks."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import (
    ConfigError,
    RecorderBusy,
    let_through,
    warn,
    without_credentials,
)
from lightning_perf.run import compat
from lightning_perf.run.context import RunContext, current_run
from lightning_perf.run.hooks import FirstHooks, LastHooks, restore_unused, skip_unused
from lightning_perf.schedule import walk

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
    #: Whether it has hooks of Lightning's. Otherwise, as part of another callback, it is not among
    #: the Trainer's callbacks, each of which costs a step some calls.
    has_hooks = True
    #: Whether the summary of the run is printed at its end.
    show_summary = False
    #: Codes and severities of the verdicts that it may reach.
    reaches: Collection[str] = ()
    _context: RunContext | None = None

    def __init__(self) -> None:
        self._progress: Progress | None = None
        # Progress that was loaded before the set-up of a run.
        self._loaded: dict[str, Any] | None = None
        #: Whether it is switched off for the rest of the run.
        self.disabled = False

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
        if self.disabled:
            return None
        try:
            return method(*args)
        except Exception as error:
            let_through(error)
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
        self.disabled = True
        with suppress(Exception):
            if self._context is not None and method != "close":
                self.close(self._context, "failure")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the trainer's run."""
        if "disabled" not in vars(self):
            problem = "has an __init__ that must call super().__init__() first"
            raise ConfigError("class", type(self).__name__, problem, None)
        try:
            run = self._find_run(trainer, pl_module)
        except Exception as error:
            let_through(error)
            # With several ranks the others would wait for this one, so the error must end all
            # ranks.
            if isinstance(error, _FOR_THE_USER) or trainer.world_size > 1:
                raise
            self.disable("setup", error)
            return
        self._attach(trainer, pl_module)
        run.join(self)
        self._context, self._progress, self.disabled = run, run.progress, False
        self.call(self.prepare, run, reraise=True)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            run.resume(loaded)
        run.reporting.settings |= self.settings()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        after: PerfCallback = self
        for part in self.parts:
            if part.has_hooks:
                if part not in callbacks:
                    at = callbacks.index(after) + 1 if after in callbacks else len(callbacks)
                    callbacks.insert(at, part)
                    run.added.append(part)
                after = part
            if part not in run.given:  # otherwise Lightning does it
                part.setup(trainer, pl_module, stage)

    def _find_run(self, trainer: Any, module: LightningModule) -> RunContext:
        """The run of a trainer, which begins with the first of our callbacks."""
        given, run = trainer.callbacks, current_run(trainer)
        if run is not None and (run.begun or self._context is run):
            run.leave("exception")  # it ended without a hook
        elif self._context is not None:
            warn(
                f"this {type(self).__name__} was attached to another Trainer, which it leaves: "
                "give each Trainer its own callback."
            )
            self._context.leave("teardown")
        if (run := current_run(trainer)) is None:
            run = RunContext(trainer, module)
            run.given, callbacks = given, [*trainer.callbacks]
            ours = [at for at, one in enumerate(callbacks) if isinstance(one, PerfCallback)]
            first, last = run.added = [FirstHooks(run), LastHooks(run)]
            end = ours[-1] + 1 if ours else len(callbacks)
            run.end_if_raised(each for each in callbacks[:end] if not _is_ours(each))
            callbacks.insert(end, last)
            callbacks.insert(ours[0] if ours else 0, first)
            # Not in place: Lightning is in a loop over the others.
            trainer.callbacks = callbacks
        return run

    def _attach(self, trainer: Any, module: LightningModule) -> None:
        """A run begins: checkpoints keep the state, and Lightning skips unused hooks."""
        if type(self).state_key is PerfCallback.state_key:
            vars(self)["state_key"] = self.kind
        vars(self).update({name: getattr(module, name) for name in _ATTACHED})
        # A callback of the user's that delegates to this one calls all of its hooks.
        if any(each is self for each in trainer.callbacks):
            skip_unused(self)

    def detach(self) -> None:
        """The run has ended: remove what was set on this object for it."""
        self._context = None
        restore_unused(vars(self))
        for name in _ATTACHED:
            vars(self).pop(name, None)

    def overrides(self, method: str) -> bool:
        """Whether this class overrides ``before_batch`` or ``after_batch``."""
        return getattr(type(self), method) is not getattr(PerfCallback, method)

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to one process: spawned processes and copies join their own.
        own = dict(vars(self))
        restore_unused(own)
        for name in (*_ATTACHED, "state_key"):
            own.pop(name, None)
        return own | {"_context": None, "_progress": None}

    def settings(self) -> dict[str, dict[str, object]]:
        """The constructor's arguments that are not their defaults, by the class's name."""
        arguments = inspect.signature(type(self)).parameters.items()
        values = [(key, getattr(self, key, x.default), x.default) for key, x in arguments]
        given = {key: value for key, value, default in values if value != default}
        return {type(self).__name__: {key: _readable(value) for key, value in given.items()}}

    def state_dict(self) -> dict[str, Any]:
        """The run's progress, as plain values."""
        if self._loaded is not None:
            return {"progress": self._loaded}
        if not self.keeps_progress or self._progress is None:
            return {}
        if self._context is not None:
            self._context.attempt.save(self._context)
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
        """Detach from a Trainer without a run; `LastHooks` ends a run."""
        if self._context is None:
            self.detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """As `teardown`."""
        if self._context is None:
            self.detach()


def _is_ours(value: object) -> bool:
    """Whether the class of an object is this package's."""
    return type(value).__module__.startswith("lightning_perf.")


def _progress_in(state: object) -> Any:
    """The progress in the state of a callback; None if there is none."""
    return state.get("progress") if isinstance(state, dict) else None


def _explained(callback: PerfCallback, method: str, error: Exception) -> tuple[str, str]:
    """The method that failed, and what to do about it."""
    # Authors of a callback write `on_window`, which `receive` calls.
    failed = "on_window" if method == "receive" else method
    if isinstance(error, OSError | ConfigError) or not _is_ours(callback):
        return failed, ""
    schedule = getattr(callback, "schedule", None)
    parts = () if schedule is None else walk(schedule)
    if own := ", ".join(type(part).__name__ for part in parts if not _is_ours(part)):
        wanted = "window() returns a hashable value or None, quiet_until() a number"
        return failed, f" Check {own}: {wanted}."
    return failed, " Please report this."


def _readable(value: object) -> object:
    """A function by its name, whose address differs from run to run; a URL without passwords."""
    if isinstance(value, str):
        return without_credentials(value)
    return getattr(value, "__qualname__", value) if callable(value) else value
