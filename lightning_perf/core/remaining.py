"""Estimates the remaining time of a training."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.core.progress import Limits, Timestamp

#: A batch that takes this many times as long as the mean of the earlier ones is a stall.
_STALL = 5.0
#: Tolerance: the mean interval between validations may be inexact.
_ALMOST = 1e-6


class RemainingTime:
    """Estimates the remaining time of a training from the speed of this run.

    The estimate has three parts:

    - batches, at the mean duration of recent batches, so that it follows a slowdown;
    - stalls (start of an epoch, checkpoints), at their mean over the whole run, because recent
      batches contain either none or too many;
    - validations, at the frequency and mean duration so far. The first one, which includes its
      warm-up, counts only until there is a second.

    After a resume, earlier batches count as done but do not affect the speed.

    Args:
        limits: What ends the training.
        start: Progress at the start of this run: zero, or the progress of the checkpoint.
        validations: Number of validations before this run.
        horizon: Number of recent batches to average.

    Example:
        >>> from lightning_perf.core.progress import Limits, Timestamp
        >>> remaining = RemainingTime(Limits(max_epochs=2, batches_per_epoch=5), Timestamp())
        >>> remaining.add(0.5)
        >>> remaining.seconds(Timestamp(batch=2, batch_in_epoch=2))
        4.0
    """

    def __init__(
        self, limits: Limits, start: Timestamp, validations: int = 0, horizon: int = 100
    ) -> None:
        self._limits, self._start, self._horizon = limits, start, horizon
        self._batches, self._batch_seconds, self._stall_seconds = 0, 0.0, 0.0
        self._before = validations if start.batch else 0
        self._validations, self._validated_at = 0, 0
        #: Batches and validation seconds at the start of the measured validations.
        self._since = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Add the duration of a batch, without validation.

        Leave out the first batch, and batches that this package slowed down.
        """
        self._batches += 1
        if self._batches > 1 and seconds > _STALL * self._batch_seconds:
            self._stall_seconds += seconds - self._batch_seconds
        else:
            self._batch_seconds += (seconds - self._batch_seconds) / min(
                self._batches, self._horizon
            )

    def validation_begins(self, batch: int, validation_seconds: float) -> None:
        """Add a validation.

        Args:
            batch: Training batches before it.
            validation_seconds: Total seconds of validation before it.
        """
        if self._validations == 0:
            # A resumed run may not have seen a whole interval yet.
            self._since = batch - batch / (self._before + 1), validation_seconds
        elif self._validations == 1:
            self._since = self._validated_at, validation_seconds
        self._validations, self._validated_at = self._validations + 1, batch

    def seconds(self, now: Timestamp, validation_seconds: float = 0.0) -> float | None:
        """Return the remaining seconds.

        Args:
            now: The current progress.
            validation_seconds: Total seconds of validation so far.

        Returns:
            None if nothing limits the training or no batch was added yet.
        """
        if not self._batches:
            return None
        left = inf
        if self._limits.max_seconds:  # Lightning's Timer counts validation too
            left = max(self._limits.max_seconds - now.total_wct - validation_seconds, 0.0)
        batches = self._batches_left(now)
        if batches < inf:
            validations, each = self._validations_left(now.batch + batches, validation_seconds)
            per_batch = self._batch_seconds + self._stall_seconds / self._batches
            left = min(left, batches * per_batch + validations * each)
        return left if left < inf else None

    def _batches_left(self, now: Timestamp) -> float:
        limits, left = self._limits, inf
        batches, steps = now.batch - self._start.batch, now.step - self._start.step
        if limits.max_steps and steps > 0:
            # Measured steps per batch: covers gradient accumulation and several optimizers.
            left = (limits.max_steps - now.step) * batches / steps
        if limits.max_epochs:
            each = self._batches_per_epoch(now)
            left = min(left, (limits.max_epochs - now.epoch) * each - now.batch_in_epoch)
        return max(left, 0.0)

    def _batches_per_epoch(self, now: Timestamp) -> float:
        limits, samples = self._limits, now.sample - self._start.sample
        if limits.batches_per_epoch:
            return limits.batches_per_epoch
        if limits.samples_per_epoch and samples:
            return limits.samples_per_epoch * (now.batch - self._start.batch) / samples
        return (now.batch - now.batch_in_epoch) / now.epoch if now.epoch else inf

    def _validations_left(self, last_batch: float, spent: float) -> tuple[float, float]:
        """Return the number of remaining validations and the seconds of each."""
        measured = max(self._validations - 1, 1)
        every = (self._validated_at - self._since[0]) / measured
        if not every:
            return 0, 0.0
        left = (last_batch - self._validated_at + _ALMOST) // every
        return left, (spent - self._since[1]) / measured
