"""Schedules by intervals of progress: Every, At, Always, Never."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning_perf import checks
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError
from lightning_perf.schedule.base import FOREVER, Context, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from lightning_perf.core.progress import Limits, Moment


#: Fractions are quotients, so 3 of 10 steps are a little less than three times 0.1.
ROUNDING = 1e-9


def _fraction(moment: Moment) -> float:
    return (moment.fraction or 0.0) + ROUNDING


def _previous_fraction(moment: Moment) -> float:
    return (moment.previous_fraction or 0.0) + ROUNDING


_COUNTS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.STEP: "step",
    TimeUnit.SECOND: "total_wct",
}
#: How far a moment is, by unit; and how far the moment before it was.
POSITION: dict[TimeUnit, Callable[[Moment], float]] = {
    TimeUnit.DURATION: _fraction,
    **{unit: attrgetter(f"timestamp.{name}") for unit, name in _COUNTS.items()},
}
PREVIOUS: dict[TimeUnit, Callable[[Moment], float]] = {
    TimeUnit.DURATION: _previous_fraction,
    **{unit: attrgetter(f"previous.{name}") for unit, name in _COUNTS.items()},
}


@dataclass(slots=True)
class _Opening:
    window: Hashable
    first_batch: int
    #: Where the window began, in the unit of its length; None until it has.
    origin: float | None = None


class Latch:
    """A window for each stage that something opens and that then lasts for a length.

    Args:
        lasting: The length.
    """

    def __init__(self, lasting: Time) -> None:
        self._position = POSITION[lasting.unit]
        self._length = lasting.value
        self._openings: dict[str, _Opening] = {}

    def open(self, window: Hashable, moment: Moment, delay: int = 0) -> None:
        """Open a window in the stage of a moment, some batches after it."""
        self._openings[moment.stage] = _Opening(window, moment.timestamp.batch + delay)
        self.observe(moment)

    def observe(self, moment: Moment) -> None:
        """Note where a window begins: once a batch."""
        opening = self._openings.get(moment.stage)
        if opening and opening.origin is None and moment.timestamp.batch >= opening.first_batch:
            opening.origin = self._position(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Tell the window that is open at a moment, or None."""
        opening = self._openings.get(moment.stage)
        if opening is None or moment.timestamp.batch < opening.first_batch:
            return None
        # Without an origin, the moment is one that is foreseen.
        if opening.origin is None or self._position(moment) - opening.origin < self._length:
            return opening.window
        return None

    def reset(self) -> None:
        """Forget every window."""
        self._openings.clear()


_ONE_BATCH = Time(1, TimeUnit.BATCH)
# Counted alike on all ranks, and foreseen by `Moment.ahead`.
_SHARED_UNITS = {TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.STEP, TimeUnit.DURATION}


class Always(Schedule):
    """Every batch, all in one window."""

    @property
    def shared(self) -> bool:
        """True."""
        return True

    def window(self, moment: Moment) -> Hashable | None:  # noqa: ARG002
        """Give the one window."""
        return 0


class Never(Schedule):
    """No batch."""

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """For ever."""
        return FOREVER

    @property
    def shared(self) -> bool:
        """True."""
        return True

    def window(self, moment: Moment) -> Hashable | None:  # noqa: ARG002
        """Give None."""
        return None


class _Milestones(Schedule):
    """Windows that open where training passes a milestone, and last from there.

    A window of one batch, or as long as a number of the units that its milestones are set in,
    follows from the moment alone, so it can be foreseen; any other is latched by `observe`.
    """

    def __init__(self, unit: TimeUnit, lasting: Time, stage: str | None = None) -> None:
        self._units = {unit, lasting.unit}
        self._position, self._previous = POSITION[unit], PREVIOUS[unit]
        self._only_in = stage
        self._by_clock = False
        alike = lasting.unit is unit and unit in _SHARED_UNITS
        self._length = lasting.value if alike else 0
        self._latch = None if alike or str(lasting) == "1ba" else Latch(lasting)

    @abstractmethod
    def _number(self, position: float) -> int:
        """Count the milestones up to a position."""

    @abstractmethod
    def _next(self, number: int) -> int:
        """Give the batch of the milestone after some, where they are set in batches."""

    @abstractmethod
    def _place(self, number: int) -> float:
        """Give the position of a milestone."""

    @property
    def shared(self) -> bool:
        """Whether its units are counted alike on all ranks: not samples, tokens and seconds."""
        return self._units <= _SHARED_UNITS and not self._by_clock

    def setup(self, context: Context) -> None:
        """Forget an earlier run."""
        # The fraction of a limit in seconds is told by the clock of each rank.
        timed = context.limits.max_seconds is not None
        self._by_clock = timed and TimeUnit.DURATION in self._units
        if self._latch:
            self._latch.reset()

    def validate(self, limits: Limits) -> None:
        """Refuse ``dur`` where nothing tells how long the training will be."""
        if TimeUnit.DURATION in self._units and not limits.known:
            problem = "needs max_steps, max_epochs or max_time on the Trainer"
            raise ConfigError("schedule", self, problem, '"100ba"')

    def observe(self, moment: Moment) -> None:
        """Latch the window that a milestone opens, if its end does not follow from the moment."""
        if self._latch is None:
            return
        number = self._number(self._position(moment))
        if self._passed(number, moment):
            self._latch.open(number, moment)
        else:
            self._latch.observe(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Give the number of the milestone that opened the window."""
        position = self._position(moment)
        number = self._number(position)
        if number < 1 or (self._only_in is not None and self._only_in != moment.stage):
            return None
        if position - self._place(number) < self._length or self._passed(number, moment):
            return number
        return self._latch.window(moment) if self._latch else None

    @property
    def watches(self) -> bool:
        """Whether the end of its windows has to be observed."""
        return self._latch is not None

    def quiet_until(self, moment: Moment) -> int:
        """Foresee the next milestone, if milestones are set in batches."""
        if self._only_in is not None and self._only_in != moment.stage:
            return FOREVER
        if self._position is not POSITION[TimeUnit.BATCH]:
            return super().quiet_until(moment)
        return self._next(self._number(moment.timestamp.batch))

    def _passed(self, number: int, moment: Moment) -> bool:
        # At the very first moment nothing came before, so what is due at zero is due now.
        before = self._number(self._previous(moment)) if moment.timestamp.batch else 0
        return number > before


class Every(_Milestones):
    """At intervals: whenever the last batch has crossed a multiple of the interval.

    No interval is missed, however many samples or seconds a batch takes, and two of them crossed by
    one batch open one window. Nothing opens at the start itself.

    Args:
        interval: The distance between windows, in any unit.
        lasting: The length of a window, from the moment it opens, in any unit.
        start: Where counting begins, in the unit of the interval unless zero.
        stage: The only stage to open in; every stage, each by its own count, if None.

    Raises:
        ConfigError: If a time is malformed, out of range or never reached, or the stage is unknown.

    Example:
        >>> from lightning_perf.core.progress import Moment
        >>> from lightning_perf.core.progress import Timestamp
        >>> schedule = Every("100ba", lasting="3ba")
        >>> [batch for batch in range(250)
        ...  if schedule(Moment("train", Timestamp(batch=batch), Timestamp(batch=batch - 1)))]
        [100, 101, 102, 200, 201, 202]
    """

    def __init__(
        self,
        interval: Time | str,
        lasting: Time | str = "1ba",
        start: Time | str = "0ba",
        stage: str | None = None,
    ) -> None:
        every = checks.times("interval", interval, "100ba")
        length = checks.times("lasting", lasting, "3ba")
        begin = checks.times("start", start, f"10{every.unit}", positive=False)
        if begin.value and begin.unit is not every.unit:
            raise ConfigError("start", str(begin), f"is not in {every.unit}", f'"10{every.unit}"')
        if every.unit is TimeUnit.DURATION:
            _check_reached("interval", every, every.value, "0.1dur")
            _check_reached("start", begin, begin.value + every.value, "0dur")
        if stage is not None:
            checks.stage_list("stage", stage)
        self.interval, self.lasting, self.start = str(every), str(length), str(begin)
        self.stage = stage
        self._interval, self._start = every.value, begin.value
        super().__init__(every.unit, length, stage)

    def _number(self, position: float) -> int:
        return max(int((position - self._start) // self._interval), 0)

    def _place(self, number: int) -> float:
        return self._start + number * self._interval

    def _next(self, number: int) -> int:
        return int(self._start + (number + 1) * self._interval)


class At(_Milestones):
    """Once: at the first moment at or past a time, in each stage by its own count.

    Args:
        time: The time, in any unit; zero is the beginning.
        lasting: The length of the window, in any unit.

    Raises:
        ConfigError: If a time is malformed, out of range or never reached.
    """

    def __init__(self, time: Time | str, lasting: Time | str = "1ba") -> None:
        at = checks.times("time", time, "0.5dur", positive=False)
        length = checks.times("lasting", lasting, "3ba")
        if at.unit is TimeUnit.DURATION:
            _check_reached("time", at, at.value, "0.5dur")
        self.time, self.lasting = str(at), str(length)
        self._time = at.value
        super().__init__(at.unit, length)

    def _number(self, position: float) -> int:
        return int(position >= self._time)

    def _place(self, number: int) -> float:  # noqa: ARG002
        return self._time

    def _next(self, number: int) -> int:
        return FOREVER if number else int(self._time)


def _check_reached(field: str, value: Time, first: float, example: str) -> None:
    """Refuse fractions of which the first lies beyond the end of the training."""
    if first > 1.0 + ROUNDING:
        problem = "is never reached: training ends at 1dur"
        raise ConfigError(field, str(value), problem, f'"{example}"')
