"""What the names of Lightning's spans mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.patches import is_of_class

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: By the last part of the name: the classes before it are the user's.
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
#: Hooks that matter although the user has not written them.
_AT_WORK = {"optimizer_step", "lr_scheduler_step", "on_predict_batch_end"}
#: Where Lightning's own hooks are, which do nothing.
_EMPTY = {"Callback", "LightningModule", "LightningDataModule", "ModelHooks", "DataHooks"}
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")
#: Hooks that only run while a checkpoint is written.
_SAVES = "on_save_checkpoint"
_MODULES = ("[LightningModule]", "[LightningDataModule]")


def classify(action: str, trainer: Trainer) -> tuple[str, str] | None:
    """The category and the name under which a span is kept.

    Args:
        action: Lightning's name of the span.
        trainer: Whose callbacks and modules are looked up.

    Returns:
        None for a span that is not told apart: one that does nothing, or of the user's own.
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
    return "checkpoint" if saves or hook == _SAVES else "callbacks", f"{name}.{hook}"


def _module_hook(name: str, hook: str, trainer: Trainer) -> tuple[str, str] | None:
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    ours = any(_overrides(owner, hook) for owner in owners if type(owner).__name__ == name)
    if hook in _CATEGORIES:
        return (_CATEGORIES[hook], hook) if ours or hook in _AT_WORK else None
    category = "checkpoint" if hook == _SAVES else "other"
    return (category, f"{name}.{hook}") if ours and hook.startswith("on_") else None


def _overrides(owner: object, hook: str) -> bool:
    """Whether a hook is not the empty one of Lightning's base class."""
    home = next((kind for kind in type(owner).__mro__ if hook in vars(kind)), None)
    if home is None or not is_of_class(owner, hook, getattr(owner, hook, None)):
        return True
    return home.__name__ not in _EMPTY or not home.__module__.startswith(_LIGHTNING)
