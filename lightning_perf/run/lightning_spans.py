"""Lightning's profiler spans: how they are intercepted, and to which category each belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

from lightning_perf.patches import is_of_class
from lightning_perf.timing.clock import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning.pytorch import Trainer

    _Span = AbstractContextManager[Any]
    Find = Callable[[str], _Span]

#: By the last part of a span's name; the parts before it are classes of the user.
_CATEGORIES = {
    hook: category
    for category, hooks in {
        "dataloader_next": ("train_dataloader_next", "val_next", "test_next", "predict_next"),
        "to_device": (
            "on_before_batch_transfer", "batch_to_device", "transfer_batch_to_device",
            "on_after_batch_transfer",
        ),
        "forward": ("training_step", "validation_step", "test_step", "predict_step"),
        "backward": ("backward",),
        "optimizer_step": ("optimizer_step",),
        "step_lr_schedulers": ("lr_scheduler_step",),
        "checkpoint": ("save_checkpoint",),
        "other": ("run_training_batch", "run_training_epoch", "on_predict_batch_end"),
    }.items()
    for hook in hooks
}  # fmt: skip
#: Hooks that do work even if the user does not override them.
_ALWAYS_ACTIVE = {"optimizer_step", "lr_scheduler_step", "on_predict_batch_end"}
#: Lightning's base classes, whose hooks are empty.
_EMPTY = {"Callback", "LightningModule", "LightningDataModule", "ModelHooks", "DataHooks"}
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
#: Runs only while a checkpoint is written.
_SAVE_HOOK = "on_save_checkpoint"
_MODULES = ("[LightningModule]", "[LightningDataModule]")


def classify(action: str, trainer: Trainer) -> tuple[str, str] | None:
    """The category and the name under which a span of Lightning is recorded.

    None for spans that are not: empty hooks, which the trainer's callbacks and modules do not
    override, and the user's own spans.
    """
    owner, _, hook = action.rpartition(".")
    if owner.startswith("[Callback]"):
        return _callback(owner.removeprefix("[Callback]"), hook, trainer)
    if owner.startswith(_MODULES):
        return _module_hook(owner.partition("]")[2], hook, trainer)
    if owner and not owner.startswith("["):
        return None
    category = _CATEGORIES.get(hook)
    return None if category is None else (category, hook)


def _callback(key: str, hook: str, trainer: Trainer) -> tuple[str, str] | None:
    callbacks = getattr(trainer, "callbacks", ())
    owners = [callback for callback in callbacks if callback.state_key == key]
    if owners and not any(_overrides(owner, hook) for owner in owners):
        return None
    name = type(owners[0]).__name__ if owners else key.partition("{")[0]
    saves = any(base.__name__ == "Checkpoint" for o in owners for base in type(o).__mro__)
    return "checkpoint" if saves or hook == _SAVE_HOOK else "callbacks", f"{name}.{hook}"


def _module_hook(name: str, hook: str, trainer: Trainer) -> tuple[str, str] | None:
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    ours = any(_overrides(owner, hook) for owner in owners if type(owner).__name__ == name)
    if hook in _CATEGORIES:
        return (_CATEGORIES[hook], hook) if ours or hook in _ALWAYS_ACTIVE else None
    category = "checkpoint" if hook == _SAVE_HOOK else "other"
    return (category, f"{name}.{hook}") if ours and hook.startswith("on_") else None


def _overrides(owner: object, hook: str) -> bool:
    """Whether a hook is not the empty one of Lightning's base class."""
    base = next((each for each in type(owner).__mro__ if hook in vars(each)), None)
    if base is None or not is_of_class(owner, hook, getattr(owner, hook, None)):
        return True
    return base.__name__ not in _EMPTY or not base.__module__.startswith(_LIGHTNING)


class SpanProfiler(PassThroughProfiler):
    """Records every span of a trainer without a profiler; ``find`` returns ours by its name."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self.profile = find  # type: ignore[method-assign, assignment]

    @override
    def start(self, action_name: str) -> None:
        self.profile(action_name).__enter__()

    @override
    def stop(self, action_name: str) -> None:
        self.profile(action_name).__exit__(None, None, None)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the trainer gets the default profiler.
        return PassThroughProfiler, ()


class NullProfiler(SpanProfiler):
    """Does nothing, like Lightning's default, but without a generator per span."""

    def __init__(self) -> None:
        super().__init__(lambda _: NOTHING)


class TeeProfiler:
    """Records every span and forwards it to the user's profiler.

    All other attributes, ``__class__`` included, are those of the user's profiler.
    """

    def __init__(self, theirs: Any, find: Find) -> None:
        # Bypasses __setattr__, which writes to the user's profiler.
        vars(self).update(_theirs=theirs, _find=find)

    def profile(self, action_name: str) -> _Span:
        """Return the context of a span."""
        return _TeeSpan(self._find(action_name), self._theirs.profile(action_name))

    def start(self, action_name: str) -> None:
        """Start a span."""
        self._find(action_name).__enter__()
        self._theirs.start(action_name)

    def stop(self, action_name: str) -> None:
        """Stop a span."""
        try:
            self._theirs.stop(action_name)
        finally:
            self._find(action_name).__exit__(None, None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._theirs,)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_theirs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._theirs, name, value)


class _TeeSpan:
    """Our span around that of the user's profiler, so that theirs excludes our overhead."""

    __slots__ = ("_ours", "_theirs")

    def __init__(self, ours: _Span, theirs: _Span) -> None:
        self._ours, self._theirs = ours, theirs

    def __enter__(self) -> Any:
        self._ours.__enter__()
        try:
            return self._theirs.__enter__()
        except BaseException:
            self._ours.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._theirs.__exit__(*error)
        finally:
            self._ours.__exit__(None, None, None)


def _same(value: Any) -> Any:
    return value
