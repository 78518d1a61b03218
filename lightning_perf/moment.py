"""A moment of training, as schedules see it: between two batches, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.timestamp import Timestamp

STAGES = ("train", "validate", "test", "predict")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a process stands among the processes of a run."""

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a stage, as far as it is known; None where it is not."""

    max_steps: int | None = None
    max_epochs: int | None = None
    max_seconds: float | None = None
    batches_per_epoch: int | None = None
    #: Samples that this rank sees in an epoch, for where its batches are not known.
    samples_per_epoch: int | None = None
    #: Batches that one optimizer step takes (gradient accumulation).
    batches_per_step: int = 1

    @property
    def known(self) -> bool:
        """Whether the fraction of training done can be told at all."""
        return not (self.max_steps is None and self.max_epochs is None and self.max_seconds is None)

    def fraction(self, timestamp: Timestamp) -> float | None:
        """The fraction done at a time: the largest of the fractions of the limits that are set.

        Args:
            timestamp: Where the stage stands.

        Returns:
            A number from 0 to 1, or None without a limit.

        Example:
            >>> from lightning_perf.timestamp import Timestamp
            >>> Limits(max_epochs=2, batches_per_epoch=4).fraction(Timestamp(batch_in_epoch=3))
            0.375
        """
        done = -1.0
        if self.max_steps:
            done = timestamp.step / self.max_steps
        if self.max_epochs:
            done = max(done, (timestamp.epoch + self._within_epoch(timestamp)) / self.max_epochs)
        if self.max_seconds:
            done = max(done, timestamp.total_wct / self.max_seconds)
        return min(done, 1.0) if done >= 0.0 else None

    def _within_epoch(self, timestamp: Timestamp) -> float:
        if self.batches_per_epoch:
            return min(timestamp.batch_in_epoch / self.batches_per_epoch, 1.0)
        if self.samples_per_epoch:
            return min(timestamp.sample_in_epoch / self.samples_per_epoch, 1.0)
        return 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The point in time before a batch begins and after the one before it has ended.

    Everything a schedule may judge by, and nothing that it may change. Counts are this rank's own.

    Example:
        >>> from lightning_perf.timestamp import Timestamp
        >>> now = Moment("train", Timestamp(batch=9), Timestamp(batch=8))
        >>> now.ahead(2).timestamp.batch
        11
    """

    stage: str
    #: Completed so far: ``timestamp.batch`` is the index of the batch that comes next.
    timestamp: Timestamp
    #: The same one batch earlier; equal to ``timestamp`` before the first batch.
    previous: Timestamp
    limits: Limits = Limits()
    ranks: Ranks = Ranks()
    run_name: str = ""
    #: Seconds that the last batch took, waiting for its data included.
    batch_seconds: float = 0.0

    @property
    def fraction(self) -> float | None:
        """The fraction of the stage done, or None where nothing limits it."""
        return self.limits.fraction(self.timestamp)

    @property
    def previous_fraction(self) -> float | None:
        """The fraction one batch earlier."""
        return self.limits.fraction(self.previous)

    def ahead(self, batches: int) -> Moment:
        """The moment some batches later, as far as it can be foreseen.

        Batches, epochs and steps are foreseen; samples, tokens and seconds stay as they are.

        Args:
            batches: How many; 0 gives the same moment.
        """
        timestamp, previous = self.timestamp, self.previous
        for _ in range(batches):
            previous, timestamp = timestamp, self._next(timestamp)
        # By position, because profilers look ahead in every batch.
        return Moment(
            self.stage,
            timestamp,
            previous,
            self.limits,
            self.ranks,
            self.run_name,
            self.batch_seconds,
        )

    def _next(self, timestamp: Timestamp) -> Timestamp:
        limits, batch = self.limits, timestamp.batch_in_epoch + 1
        ends_epoch = batch == limits.batches_per_epoch
        # Lightning accumulates within an epoch: the last batch of one always makes a step.
        later = timestamp.to_next_batch(steps=ends_epoch or batch % limits.batches_per_step == 0)
        return later.to_next_epoch() if ends_epoch else later
