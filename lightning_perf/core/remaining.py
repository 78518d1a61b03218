"""How long a training will still take: arithmetic that knows no trainer."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.core.progress import Limits, Timestamp

#: A batch that takes this many times as long as its predecessors is a stall.
_STALL = 5.0
#: Intervals between validations may be means of uneven ones.
_ALMOST = 1e-6


class RemainingTime:
    """Estimates how long a training goes on, from its pace in this run.

    Three parts are projected, each at the pace that foretells it best:

    - batches, at the mean pace of the most recent ones, so that a slowdown is followed;
    - stalls (an epoch that starts, a checkpoint), at their mean over all of this run, since the
      recent batches hold either none of them or too many;
    - validation, as often as it was seen, each as long as those before; the first one, which warms
      up, counts only until there is a second.

    What a resumed run did before the resume counts as done, not as pace.

    Args:
        limits: What ends the training.
        start: Where this run starts: zero, or what it resumes from.
        validations: How many there were before this run.
        horizon: Batches that the pace looks back.

    Example:
        >>> from lightning_perf.core.progress import Limits
        >>> from lightning_perf.core.progress import Timestamp
        >>> remaining = RemainingTime(Limits(max_epochs=2, batches_per_epoch=5), Timestamp())
        >>> remaining.add(0.5)
        >>> remaining.seconds(Timestamp(batch=2, batch_in_epoch=2))
        4.0
    """

    def __init__(
        self, limits: Limits, start: Timestamp, validations: int = 0, horizon: int = 100
    ) -> None:
        self._limits, self._start, self._horizon = limits, start, horizon
        self._batches, self._pace, self._stalled = 0, 0.0, 0.0
        self._before = validations if start.batch else 0
        self._validations, self._validated_at = 0, 0
        #: Batches and seconds of validation from which validations are measured.
        self._since = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Take in a batch that tells the pace: neither the first nor one that we slowed down.

        Args:
            seconds: How long it took, without validation.
        """
        self._batches += 1
        if self._batches > 1 and seconds > _STALL * self._pace:
            self._stalled += seconds - self._pace
        else:
            self._pace += (seconds - self._pace) / min(self._batches, self._horizon)

    def validation_begins(self, batch: int, validation_seconds: float) -> None:
        """Take in a validation.

        Args:
            batch: Training batches before it.
            validation_seconds: Seconds of all validation before it.
        """
        if self._validations == 0:
            # A run that resumed shortly before it has seen no whole interval yet.
            self._since = batch - batch / (self._before + 1), validation_seconds
        elif self._validations == 1:
            self._since = self._validated_at, validation_seconds
        self._validations, self._validated_at = self._validations + 1, batch

    def seconds(self, now: Timestamp, validation_seconds: float = 0.0) -> float | None:
        """The seconds left at the end of a batch.

        Args:
            now: Where training stands.
            validation_seconds: Seconds of all validation so far.

        Returns:
            None where nothing limits the training, or its pace is not known yet.
        """
        if not self._batches:
            return None
        left = inf
        if self._limits.max_seconds:  # Lightning's Timer counts validation too
            left = max(self._limits.max_seconds - now.total_wct - validation_seconds, 0.0)
        batches = self._batches_left(now)
        if batches < inf:
            validations, each = self._validations_left(now.batch + batches, validation_seconds)
            pace = self._pace + self._stalled / self._batches
            left = min(left, batches * pace + validations * each)
        return left if left < inf else None

    def _batches_left(self, now: Timestamp) -> float:
        limits, left = self._limits, inf
        batches, steps = now.batch - self._start.batch, now.step - self._start.step
        if limits.max_steps and steps > 0:
            # Steps a batch are measured: gradients accumulate, optimizers may be several.
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
        """How many are still to come, and the seconds that each takes."""
        measured = max(self._validations - 1, 1)
        every = (self._validated_at - self._since[0]) / measured
        if not every:
            return 0, 0.0
        left = (last_batch - self._validated_at + _ALMOST) // every
        return left, (spent - self._since[1]) / measured
