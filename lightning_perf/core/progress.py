"""Progress of a run: timestamps, limits, ranks and moments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import total_ordering
from math import inf
from typing import TYPE_CHECKING, Any

from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@total_ordering
@dataclass(frozen=True, slots=True)
class Timestamp:
    """What one stage has completed so far, on one rank.

    Comparison with a time or time string uses the count in its unit.

    Example:
        >>> now = Timestamp().to_next_batch(samples=10, tokens=20, duration=0.5, steps=1)
        >>> now.get("sp"), now < "3ba"
        (Time(10, TimeUnit.SAMPLE), True)
        >>> now.to_next_epoch().sample_in_epoch
        0
    """

    #: Completed epochs.
    epoch: int = 0
    #: Completed batches, which is also the index of the next batch.
    batch: int = 0
    #: Samples and tokens; tokens are 0 if they cannot be counted.
    sample: int = 0
    token: int = 0
    #: Optimizer steps; fewer than batches with gradient accumulation.
    step: int = 0
    #: The same since the epoch began.
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    #: Wall-clock seconds in this stage, in this epoch, and in the last batch.
    total_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time | str):
            time = Time.from_input(other)
            return self.get(time.unit) == time
        if not isinstance(other, Timestamp):
            return NotImplemented
        return self.state_dict() == other.state_dict()

    def __lt__(self, other: Time | str) -> bool:
        if not isinstance(other, Time | str):
            return NotImplemented
        time = Time.from_input(other)
        return self.get(time.unit) < time

    def to_next_batch(
        self, samples: int = 0, tokens: int = 0, duration: float = 0.0, steps: int = 0
    ) -> Timestamp:
        """Return the timestamp after one more batch.

        Args:
            samples: Samples in the batch.
            tokens: Tokens in the batch; 0 if not tracked.
            duration: Seconds that it took.
            steps: Optimizer steps that it completed.
        """
        # Positional, because this runs for every batch: dataclasses.replace is four times slower.
        return Timestamp(
            self.epoch,
            self.batch + 1,
            self.sample + samples,
            self.token + tokens,
            self.step + steps,
            self.batch_in_epoch + 1,
            self.sample_in_epoch + samples,
            self.token_in_epoch + tokens,
            self.total_wct + duration,
            self.epoch_wct + duration,
            duration,
        )

    def to_next_epoch(self, duration: float = 0.0) -> Timestamp:
        """Return the timestamp after the end of an epoch, with the counts within it reset.

        Args:
            duration: Seconds since the last batch.
        """
        return Timestamp(
            self.epoch + 1, self.batch, self.sample, self.token, self.step,
            total_wct=self.total_wct + duration,
        )  # fmt: skip

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the total in one unit; seconds are rounded down.

        Raises:
            ConfigError: For ``dur``, which depends on the limits of the training.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise ConfigError("unit", "dur", "is not a count of a timestamp", '"ba"')
        if unit is TimeUnit.SECOND:
            return Time(int(self.total_wct), unit)
        return Time(getattr(self, unit.name.lower()), unit)

    def state_dict(self) -> dict[str, int | float]:
        """Return plain numbers by name, for a checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Timestamp:
        """Restore from `state_dict`; missing counts are 0, unknown ones are ignored."""
        zero: dict[str, Any] = cls().state_dict()
        return cls(**{name: type(start)(state.get(name, start)) for name, start in zero.items()})


STAGES = ("train", "validate", "test", "predict")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process, and the sizes of the run and the node."""

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends training; None if not set or unknown. Other stages have no limits."""

    max_steps: int | None = None
    max_epochs: int | None = None
    max_seconds: float | None = None
    #: Batches of this rank per epoch; None if the data has no length.
    batches_per_epoch: int | None = None
    #: Samples of this rank per epoch, if the number of batches is unknown.
    samples_per_epoch: int | None = None
    #: Batches per optimizer step (gradient accumulation).
    batches_per_step: int = 1

    @property
    def known(self) -> bool:
        """Whether a limit is set, so that the fraction of training is defined."""
        return not (self.max_steps is None and self.max_epochs is None and self.max_seconds is None)

    def fraction(self, timestamp: Timestamp, validation_seconds: float = 0.0) -> float | None:
        """Return the largest of the fractions of the limits that are set; None without a limit.

        ``validation_seconds`` are those of validation inside of fit, which count for ``max_time``.
        """
        done = -1.0
        if self.max_steps:
            done = timestamp.step / self.max_steps
        if self.max_epochs:
            done = max(done, (timestamp.epoch + self._within_epoch(timestamp)) / self.max_epochs)
        if self.max_seconds:
            done = max(done, (timestamp.total_wct + validation_seconds) / self.max_seconds)
        return min(done, 1.0) if done >= 0.0 else None

    def seconds_left(
        self, start: Timestamp, now: Timestamp, pace: float,
        validated: tuple[int, float] = (0, 0.0), between: float = 0.0,
    ) -> float:  # fmt: skip
        """Return the estimated seconds until the first limit; infinity without one.

        Args:
            start: Where this run began, maybe from a checkpoint, or accumulated gradients of
                another number of batches: the batches since then show how many make a step.
            now: The present progress.
            pace: Seconds per batch.
            validated: The batches before the last validation inside of fit, and the seconds of all
                of them so far: as much time per batch is to come.
            between: Seconds between two epochs, which are no part of ``pace``.
        """
        batches, validation = validated
        left = self._batches_left(start, now)
        if left < inf:
            each = validation / batches if batches else 0.0
            epoch = self._batches_per_epoch(start, now)
            ends = (left + (now.batch_in_epoch or epoch)) / epoch if between else 0.0
            left = left * pace + max(now.batch + left - batches, 0.0) * each + ends * between
        if self.max_seconds:  # Lightning's Timer counts validation too
            left = min(left, max(self.max_seconds - now.total_wct - validation, 0.0))
        return left

    def _batches_left(self, start: Timestamp, now: Timestamp) -> float:
        left, batches, steps = inf, now.batch - start.batch, now.step - start.step
        if self.max_steps and (steps > 0 or not batches):
            # Measured steps per batch: covers gradient accumulation and several optimizers.
            each = batches / steps if batches else self.batches_per_step
            left = (self.max_steps - now.step) * each
        if self.max_epochs:
            each = self._batches_per_epoch(start, now)
            left = min(left, (self.max_epochs - now.epoch) * each - now.batch_in_epoch)
        return max(left, 0.0)

    def _batches_per_epoch(self, start: Timestamp, now: Timestamp) -> float:
        samples = now.sample - start.sample
        if self.batches_per_epoch:
            return self.batches_per_epoch
        if self.samples_per_epoch and samples:
            return self.samples_per_epoch * (now.batch - start.batch) / samples
        return (now.batch - now.batch_in_epoch) / now.epoch if now.epoch else inf

    def _within_epoch(self, timestamp: Timestamp) -> float:
        if self.batches_per_epoch:
            return min(timestamp.batch_in_epoch / self.batches_per_epoch, 1.0)
        if self.samples_per_epoch:
            return min(timestamp.sample_in_epoch / self.samples_per_epoch, 1.0)
        return 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The point in time between two batches: everything a schedule may depend on.

    Counts are those of this rank.

    Example:
        >>> now = Moment("train", Timestamp(batch=9), Timestamp(batch=8))
        >>> now.ahead(2).timestamp.batch
        11
    """

    #: ``train``, ``validate``, ``test`` or ``predict``.
    stage: str
    #: Progress so far; ``timestamp.batch`` is the index of the next batch.
    timestamp: Timestamp
    #: Progress one batch earlier; equal to ``timestamp`` before the first batch.
    previous: Timestamp
    #: The limits of training; in other stages all are None.
    limits: Limits = Limits()
    #: The ranks of this process, and the sizes of the run and the node.
    ranks: Ranks = Ranks()
    #: As in the names of files.
    run_name: str = ""
    #: Duration of the last batch in seconds, including the wait for its data.
    batch_seconds: float = 0.0
    #: Seconds of validation inside of fit so far, and one batch earlier.
    validation_seconds: float = 0.0
    previous_validation_seconds: float = 0.0

    @property
    def fraction(self) -> float | None:
        """The completed fraction of the stage, or None without a limit."""
        return self.limits.fraction(self.timestamp, self.validation_seconds)

    @property
    def previous_fraction(self) -> float | None:
        """The fraction one batch earlier."""
        return self.limits.fraction(self.previous, self.previous_validation_seconds)

    def ahead(self, batches: int) -> Moment:
        """Return the expected moment a number of batches later.

        Batches, epochs and steps are predicted; samples, tokens and seconds are kept unchanged.
        """
        timestamp, previous = self.timestamp, self.previous
        validated = self.validation_seconds if batches else self.previous_validation_seconds
        for _ in range(batches):
            previous, timestamp = timestamp, self._next(timestamp)
        # Positional for speed, because profilers look ahead after every batch.
        return Moment(
            self.stage, timestamp, previous, self.limits, self.ranks, self.run_name,
            self.batch_seconds, self.validation_seconds, validated,
        )  # fmt: skip

    def _next(self, timestamp: Timestamp) -> Timestamp:
        limits, batch = self.limits, timestamp.batch_in_epoch + 1
        ends_epoch = batch == limits.batches_per_epoch
        # Accumulation ends with the epoch: its last batch always makes a step.
        later = timestamp.to_next_batch(steps=ends_epoch or batch % limits.batches_per_step == 0)
        return later.to_next_epoch() if ends_epoch else later
