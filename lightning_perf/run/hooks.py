"""Lightning's hooks of our callbacks: made for all stages at once, and joined with a subclass's."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

#: Lightning's words for stages in the names of hooks.
_WORDS = {"train": "train", "validate": "validation", "test": "test", "predict": "predict"}
#: Lightning's per-batch hooks that no lifecycle method needs.
UNUSED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: Hooks that release what a run holds, and all hooks that advance it.
ENDS = {"teardown", "on_exception"}
HOOKS = (
    ENDS
    | {"on_train_epoch_start", "on_train_epoch_end"}
    | {
        f"on_{word}_{hook}"
        for word in _WORDS.values()
        for hook in ("start", "end", "batch_start", "batch_end")
    }
)


def install_stage_hooks(callback: type) -> None:
    """Add Lightning's hooks of all stages to a class; they call the lifecycle methods."""
    for stage, word in _WORDS.items():
        for hook in (*_stage_hooks(stage, word), _batch_end(stage)):
            hook.__name__ = f"on_{word}_{hook.__name__}"
            setattr(callback, hook.__name__, hook)


def _stage_hooks(stage: str, word: str) -> tuple[Callable[..., None], ...]:
    def start(self: Any, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin(stage, word)

    def end(self: Any, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(stage)

    def batch_start(
        self: Any, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any
    ) -> None:
        context = self._driven
        if context is None or context.stage != stage:
            return
        for part in self._before_batch_parts:
            part.call(part.before_batch, context, batch)

    return start, end, batch_start


def _batch_end(stage: str) -> Callable[..., None]:
    """The hook that runs once per batch in each callback: it makes few calls."""

    def batch_end(
        self: Any,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        *_: Any,
    ) -> None:
        context = self._driven
        if context is None or context.stages.stage != stage:
            return
        if context.members[0] is self:
            context.advance(context.tracker.end_batch, batch)
        for part in self._after_batch_parts:
            if not part._disabled:
                try:
                    part.after_batch(context, batch)
                except Exception as error:
                    part.disable("after_batch", error)
        if context.tracker.report_possible and context.members[-1] is self:
            context.advance(context.report)

    return batch_end


def with_ours(ours: Callable[..., None], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subclass's hook so that it runs our part once, with or without super()."""

    @wraps(theirs)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ours.__name__ in ENDS:  # ours may be repeated
            try:
                return theirs(self, *args, **kwargs)
            finally:
                ours(self, *args, **kwargs)
        ours(self, *args, **kwargs)
        driven, self._driven = self._driven, None  # super() does nothing
        try:
            return theirs(self, *args, **kwargs)
        finally:
            self._driven = None if driven is None else self._context

    return hook
