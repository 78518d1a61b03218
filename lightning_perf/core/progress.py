"""How far a run is: timestamps, limits, ranks, and moments."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Timestamp:
    """What one stage has completed so far, on one rank.

    A count is also taken as a `Time` or a time string of its unit, and wall-clock seconds as a
    ``timedelta``; another unit is a `ConfigError`. Compared with a time or a time string, it is its
    count in that unit.

    Example:
        >>> now = Timestamp().to_next_batch(samples=10, tokens=20, duration=0.5, steps=1)
        >>> now.get("sp"), now < "3ba"
        (Time(10, TimeUnit.SAMPLE), True)
        >>> now.to_next_epoch().sample_in_epoch
        0
    """

    epoch: int = 0
    #: Batches since the beginning, so also the index of the batch that comes next.
    batch: int = 0
    sample: int = 0
    token: int = 0
    #: Optimizer steps; fewer than batches where gradients accumulate.
    step: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    #: Wall-clock seconds in this stage, in this epoch, and in the last batch.
    total_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0

    def __post_init__(self) -> None:
        # Sums, because this runs once a batch, and then there is nothing but plain numbers.
        try:
            counts = self.epoch + self.batch + self.sample + self.token + self.step
            counts += self.batch_in_epoch + self.sample_in_epoch + self.token_in_epoch
            if type(counts) is int and isinstance(
                self.total_wct + self.epoch_wct + self.batch_wct, int | float
            ):
                return
        except (TypeError, RuntimeError, ValueError):
            pass
        for field in fields(self):
            value = _plain(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Time | str):
            time = Time.from_input(other)
            return self.get(time.unit) == time
        if not isinstance(other, Timestamp):
            return NotImplemented
        return self.state_dict() == other.state_dict()

    def __lt__(self, other: Time | str) -> bool:
        return self._compare(operator.lt, other)

    def __le__(self, other: Time | str) -> bool:
        return self._compare(operator.le, other)

    def __gt__(self, other: Time | str) -> bool:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Time | str) -> bool:
        return self._compare(operator.ge, other)

    def _compare(self, holds: Callable[[Time, Time], bool], other: object) -> bool:
        if not isinstance(other, Time | str):
            return NotImplemented  # type: ignore[no-any-return]
        time = Time.from_input(other)
        return holds(self.get(time.unit), time)

    def to_next_batch(
        self,
        samples: int = 0,
        tokens: int = 0,
        duration: float | timedelta = 0.0,
        steps: int = 0,
    ) -> Timestamp:
        """Count one more batch.

        Args:
            samples: Samples in it.
            tokens: Tokens in it; 0 where they are not tracked.
            duration: Seconds that it took.
            steps: Optimizer steps that it completed.
        """
        if isinstance(duration, timedelta):
            duration = duration.total_seconds()
        # By position, because this runs once a batch: dataclasses.replace takes four times as long.
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

    def to_next_epoch(self, duration: float | timedelta = 0.0) -> Timestamp:
        """Count one more epoch and begin the counts within it again.

        Args:
            duration: Seconds since the last batch.
        """
        if isinstance(duration, timedelta):
            duration = duration.total_seconds()
        return Timestamp(
            epoch=self.epoch + 1,
            batch=self.batch,
            sample=self.sample,
            token=self.token,
            step=self.step,
            total_wct=self.total_wct + duration,
        )

    def get(self, unit: TimeUnit | str) -> Time:
        """Tell the total in one unit; seconds are cut to whole ones.

        Raises:
            ConfigError: For ``dur``, which needs to know how long the training will be.
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise ConfigError("unit", "dur", "is no count that a timestamp keeps", '"ba"')
        if unit is TimeUnit.SECOND:
            return Time(int(self.total_wct), unit)
        return Time(getattr(self, unit.name.lower()), unit)

    def state_dict(self) -> dict[str, int | float]:
        """Give plain numbers by name, which a checkpoint can hold."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Timestamp:
        """Read what `state_dict` gave; a missing count is zero, an unknown one is left out."""
        zero = cls()
        counts = {field.name: getattr(zero, field.name) for field in fields(cls)}
        return cls(**{name: type(start)(state.get(name, start)) for name, start in counts.items()})


def _plain(name: str, value: Any) -> int | float:
    """A field's value as the plain number that a checkpoint can hold."""
    wct = name.endswith("_wct")
    unit = TimeUnit.SECOND if wct else TimeUnit(name.partition("_")[0])
    if isinstance(value, timedelta) and wct:
        return value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool) and wct:
        return float(value)
    example = "1.5" if wct else f'"5{unit}"'
    try:
        time = Time.from_input(value, unit)
    except (TypeError, RuntimeError, ValueError):
        raise ConfigError(name, value, f"is not a number in {unit}", example) from None
    if time.unit is not unit:
        raise ConfigError(name, str(time), f"is not in {unit}", example)
    return float(time.value) if wct else time.value


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
            >>> from lightning_perf.core.progress import Timestamp
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
        >>> from lightning_perf.core.progress import Timestamp
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
