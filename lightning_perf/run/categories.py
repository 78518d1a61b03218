"""Maps the names of Lightning's profiler spans to time categories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.patches import is_of_class

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: By the last part of a span's name; the parts before it are classes of the user.
_CATEGORIES = {
    "train_dataloader_next": "dataloader_next",
    "val_next": "dataloader_next",
    "test_next": "dataloader_next",
    "predict_next": "dataloader_next",
    "on_before_batch_transfer": "to_device",
    "batch_to_device": "to_device",
    "transfer_batch_to_device": "to_device",
    "on_after_batch_transfer": "to_device",
    "training_step": "forward",
    "validation_step": "forward",
    "test_step": "forward",
    "predict_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer_step",
    "lr_scheduler_step": "step_lr_schedulers",
    "save_checkpoint": "checkpoint",
    "run_training_batch": "other",
    "run_training_epoch": "other",
    "on_predict_batch_end": "other",
}
#: Hooks that do work even if the user does not override them.
_ALWAYS_ACTIVE = {"optimizer_step", "lr_scheduler_step", "on_predict_batch_end"}
#: Lightning's base classes, whose hooks are empty.
_EMPTY = {"Callback", "LightningModule", "LightningDataModule", "ModelHooks", "DataHooks"}
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
#: Runs only while a checkpoint is written.
_SAVE_HOOK = "on_save_checkpoint"
_MODULES = ("[LightningModule]", "[LightningDataModule]")


def classify(action: str, trainer: Trainer) -> tuple[str, str] | None:
    """Return the category and the name under which a span is recorded.

    Args:
        action: Lightning's name of the span.
        trainer: Its callbacks and modules show which hooks are overridden.

    Returns:
        None for spans that are not recorded: empty hooks, and the user's own spans.
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
