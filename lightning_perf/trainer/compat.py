"""Everything private of Lightning that we read, each with what to do where it is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainingLoop:
    """The counters of Lightning's training loop: looked up once, read at every batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = getattr(trainer.fit_loop, "epoch_loop", None)
        self._accumulates = getattr(self._loop, "_should_accumulate", None)

    @property
    def step(self) -> int:
        """The step at which Lightning writes its own metrics of the present batch.

        It counts batches that stepped, since ``global_step`` advances once an optimizer.
        """
        try:
            step: int = self._loop._batches_that_stepped
        except AttributeError:
            return self._trainer.global_step
        return step

    @property
    def accumulating(self) -> bool:
        """Whether the present batch leaves the optimizers alone (gradient accumulation)."""
        if self._accumulates is not None:
            return bool(self._accumulates())
        done = self._trainer.fit_loop.batch_idx + 1
        every = self._trainer.accumulate_grad_batches
        return done % every != 0 and not self._trainer.is_last_batch


def batches_seen(trainer: Trainer) -> tuple[int, int]:
    """Training batches that Lightning has worked on: in all, and in the present epoch."""
    progress = getattr(trainer.fit_loop.epoch_loop, "batch_progress", None)
    if progress is None:
        return 0, 0
    # "processed" and not "completed", which a checkpoint taken at a batch's end is behind in.
    total, in_epoch = progress.total.processed, progress.current.processed
    return total, in_epoch if in_epoch < trainer.num_training_batches else 0


def max_seconds(trainer: Trainer) -> float | None:
    """Seconds that ``max_time`` allows the training, or None without it."""
    for callback in getattr(trainer, "callbacks", ()):
        duration = getattr(callback, "_duration", None)
        if type(callback).__name__ == "Timer" and duration is not None:
            return float(duration)
    return None


def log_every_n_steps(trainer: Trainer) -> int:
    """How often Lightning logs; 0 for never."""
    return int(getattr(trainer, "log_every_n_steps", 0) or 0)


def profiler_name(trainer: Trainer) -> str:
    """The class of Lightning's own profiler, such as ``PassThroughProfiler``."""
    return type(getattr(trainer, "profiler", None)).__name__


def precision(trainer: Trainer) -> str:
    """Lightning's word for the precision, such as ``bf16-mixed``."""
    value: Any = getattr(trainer, "precision", None) or "32-true"
    return str(value)
