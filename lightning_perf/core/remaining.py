"""An estimate of the remaining time of a training."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.core.progress import Limits, Timestamp

#: Tolerance: the mean interval between validations may be inexact.
_ALMOST = 1e-6


class RemainingTime:
    """Estimates the remaining time of a training from the speed of this run.

    Batches count at their recent pace. Validations count at the frequency and mean duration so far.
    The first one, which includes its warm-up, counts only until there is a second.

    After a resume, the batches and validations before ``start`` do not affect the speed, but for
    the validations until there is one in this run.
    """

    def __init__(self, limits: Limits, start: Timestamp, validations: int = 0) -> None:
        #: Those of the current epoch.
        self.limits = limits
        self._start = start
        self._before = validations if start.batch else 0
        self._validations, self._validated_at = 0, 0
        #: Batches and validation seconds at the start of the measured validations.
        self._since = 0.0, 0.0

    def validation_begins(self, batch: int, validation_seconds: float) -> None:
        """Add a validation, with the training batches and seconds of validation before it."""
        if self._validations == 0:
            # A resumed run may not have seen a whole interval yet.
            self._since = batch - batch / (self._before + 1), validation_seconds
        elif self._validations == 1:
            self._since = self._validated_at, validation_seconds
        self._validations, self._validated_at = self._validations + 1, batch

    def seconds(self, now: Timestamp, pace: float, validation_seconds: float = 0.0) -> float:
        """Return the remaining seconds; infinity without a limit.

        ``pace`` is the seconds per batch, and ``validation_seconds`` those of all validations so
        far.
        """
        left = inf
        if self.limits.max_seconds:  # Lightning's Timer counts validation too
            left = max(self.limits.max_seconds - now.total_wct - validation_seconds, 0.0)
        batches = self._batches_left(now)
        if batches < inf:
            validations, each = self._validations_left(now.batch + batches, validation_seconds)
            left = min(left, batches * pace + validations * each)
        return left

    def _batches_left(self, now: Timestamp) -> float:
        limits, left = self.limits, inf
        batches, steps = now.batch - self._start.batch, now.step - self._start.step
        if limits.max_steps and limits.later_batches_per_step is not None:
            left = limits.batches_until(limits.max_steps, now)
        elif limits.max_steps and steps > 0:
            # Measured steps per batch: covers gradient accumulation and several optimizers.
            left = (limits.max_steps - now.step) * batches / steps
        if limits.max_epochs:
            each = self._batches_per_epoch(now)
            left = min(left, (limits.max_epochs - now.epoch) * each - now.batch_in_epoch)
        return max(left, 0.0)

    def _batches_per_epoch(self, now: Timestamp) -> float:
        limits, samples = self.limits, now.sample - self._start.sample
        if limits.batches_per_epoch:
            return limits.batches_per_epoch
        if limits.samples_per_epoch and samples:
            return limits.samples_per_epoch * (now.batch - self._start.batch) / samples
        return (now.batch - now.batch_in_epoch) / now.epoch if now.epoch else inf

    def _validations_left(self, last_batch: float, spent: float) -> tuple[float, float]:
        """Return the number of remaining validations and the seconds per validation."""
        if self._before and not self._validations:
            so_far = (last_batch + _ALMOST) // (self._start.batch / self._before)
            return so_far - self._before, spent / self._before
        measured = max(self._validations - 1, 1)
        every = (self._validated_at - self._since[0]) / measured
        if not every:
            return 0, 0.0
        left = (last_batch - self._validated_at + _ALMOST) // every
        return left, (spent - self._since[1]) / measured
