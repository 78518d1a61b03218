"""Schedules that follow from the moment alone: by progress, rank and stage, or by a run's tag."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import defaultdict
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning_perf import checks
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError, warn
from lightning_perf.schedule.base import FOREVER, Composed, Context, Schedule, as_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from lightning_perf.core.progress import Moment


#: Tolerance for fractions: the quotient 3 / 10 is slightly less than 3 * 0.1.
ROUNDING = 1e-9


def _done(fraction: float | None) -> float:
    """The position of a fraction; a stage without one is before all milestones in ``dur``."""
    return -1.0 if fraction is None else fraction + ROUNDING


_COUNTS = {unit: unit.name.lower() for unit in TimeUnit} | {TimeUnit.SECOND: "total_wct"}
#: Progress at a moment and one batch earlier, by unit.
POSITION: dict[TimeUnit, Callable[[Moment], float]] = {
    **{unit: attrgetter(f"timestamp.{name}") for unit, name in _COUNTS.items()},
    TimeUnit.DURATION: lambda moment: _done(moment.fraction),
}
PREVIOUS: dict[TimeUnit, Callable[[Moment], float]] = {
    **{unit: attrgetter(f"previous.{name}") for unit, name in _COUNTS.items()},
    TimeUnit.DURATION: lambda moment: _done(moment.previous_fraction),
}


class Latch:
    """Keeps a window open for a given length, counted over all stages that it observes.

    The position in a stage is that of the stage, plus what other stages added meanwhile.
    """

    def __init__(self, lasting: Time, position: Callable[[Moment], float] | None = None) -> None:
        self._position = position or POSITION[lasting.unit]
        self._length = lasting.value
        self.clear()

    def clear(self) -> None:
        """Close the window, and forget all stages."""
        self._window: Hashable | None = None
        self._first_batch = 0
        # Progress when the window began, in the unit of its length; None before that.
        self._origin: float | None = None
        # Batches and progress of each stage.
        self._latest: dict[str, tuple[int, float]] = {}

    @property
    def pending(self) -> bool:
        """Whether a window was opened, but no batch of it has ended."""
        batches = sum(count for count, _ in self._latest.values())
        return self._window is not None and batches <= self._first_batch

    def open(self, window: Hashable, moment: Moment, delay: int = 0) -> None:
        """Open a window, ``delay`` batches after the moment."""
        self._window, self._origin = window, None
        self._first_batch = self._now(moment)[0] + delay
        self.observe(moment)

    def observe(self, moment: Moment) -> None:
        """Store the progress at which a window begins. Called after every batch."""
        self._latest[moment.stage] = moment.timestamp.batch, self._position(moment)
        if self._origin is None:
            batches, position = self._now(moment)
            if batches >= self._first_batch:
                self._origin = position

    def window(self, moment: Moment) -> Hashable | None:
        """Return the window that is open at a moment, or None."""
        if self._window is None:
            return None
        batches, position = self._now(moment)
        if batches < self._first_batch:
            return None
        # There is no origin yet if the moment is in the future.
        if self._origin is None or position - self._origin < self._length:
            return self._window
        return None

    def _now(self, moment: Moment) -> tuple[int, float]:
        """Batches and progress of all stages at a moment."""
        batches, position = moment.timestamp.batch, self._position(moment)
        for stage, (others, place) in self._latest.items():
            if stage != moment.stage:
                batches, position = batches + others, position + place
        return batches, position


_TIME = r"(\S+(?:\s+(?!for\b)(?:[a-z]+|%))?)"  # 100ba, or 100 batches
_TEXT = re.compile(rf"first\s+{_TIME}|(?:(every|at)\s+)?{_TIME}(?:\s+for\s+{_TIME})?", re.I)
# Equal on all ranks, and predicted by `Moment.ahead`.
_SHARED_UNITS = {TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.STEP, TimeUnit.DURATION}


class Always(Schedule):
    """True for every batch, in a single window.

    Example:
        >>> from lightning_perf import PyTorch
        >>> profiler = PyTorch(schedule=Always())  # or "always"
    """

    word, shared = "always", True

    def window(self, moment: Moment) -> Hashable | None:  # noqa: ARG002
        """Return the single window."""
        return 0


class Never(Schedule):
    """True for no batch.

    Example:
        >>> from lightning_perf import PyTorch
        >>> profiler = PyTorch(schedule=Never())  # or "never"
    """

    word, shared = "never", True

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """Return `FOREVER`."""
        return FOREVER

    def window(self, moment: Moment) -> Hashable | None:  # noqa: ARG002
        """Return None."""
        return None


class _Milestones(Schedule):
    """Base of schedules whose windows open when progress passes a milestone.

    A window of one batch, or with a length in the unit of the milestones, depends on the moment
    alone and can be predicted. The end of any other window is tracked by `observe`, in a
    `Latch` per stage.
    """

    def __init__(self, unit: TimeUnit, lasting: Time, stage: str | None = None) -> None:
        self._units = {unit, lasting.unit}
        self._position, self._previous = POSITION[unit], PREVIOUS[unit]
        self._stage = stage
        predictable = lasting.unit is unit and unit in _SHARED_UNITS
        self._length = lasting.value if predictable else 0
        unlatched = predictable or str(lasting) == "1ba"
        self._latches = None if unlatched else defaultdict[str, Latch](lambda: Latch(lasting))

    @classmethod
    def of_text(cls, text: str) -> Schedule | None:
        """Return the `Every` or `At` of a text."""
        if (match := _TEXT.fullmatch(text)) is None:
            return None
        first, word, time, lasting = match.groups()
        if first is not None:
            length = checks.times("lasting", first, "5ba")
            return At(time=f"0{length.unit}", lasting=length)
        return (At if (word or "").lower() == "at" else Every)(time, lasting=lasting or "1ba")

    @abstractmethod
    def _number(self, position: float) -> int:
        """Return the number of milestones up to a position."""

    @abstractmethod
    def _place(self, number: int) -> float:
        """Return the position of a milestone; infinite if there is none."""

    def setup(self, context: Context) -> None:
        """Refuse ``dur`` if the length of the training is unknown, and discard earlier windows."""
        limits, relative = context.limits, TimeUnit.DURATION in self._units
        if relative and not limits.known:
            problem = "needs max_steps, max_epochs or max_time on the Trainer"
            raise ConfigError("schedule", self, problem, '"100ba"')
        # The fraction of max_time depends on the clock of each rank.
        timed = relative and limits.max_seconds is not None
        self.shared = self._units <= _SHARED_UNITS and not timed
        if self._latches is not None:
            self._latches.clear()

    def observe(self, moment: Moment) -> None:
        """Open the latch at a milestone, if the end of the window cannot be predicted."""
        if self._latches is None:
            return
        number = self._number(self._position(moment))
        if self._passed(number, moment):
            self._latches[moment.stage].open(number, moment)
        else:
            self._latches[moment.stage].observe(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the number of the milestone that opened the window."""
        position = self._position(moment)
        number = self._number(position)
        if number < 1 or (self._stage is not None and self._stage != moment.stage):
            return None
        if position - self._place(number) < self._length or self._passed(number, moment):
            return number
        latch = None if self._latches is None else self._latches.get(moment.stage)
        return latch.window(moment) if latch else None

    @property
    def watches(self) -> bool:
        """Whether the end of its windows cannot be predicted."""
        return self._latches is not None

    def quiet_until(self, moment: Moment) -> int:
        """Return the batch of the next milestone if it can be predicted."""
        if self._stage is not None and self._stage != moment.stage:
            return FOREVER
        if self._position is not POSITION[TimeUnit.BATCH]:
            return super().quiet_until(moment)
        return int(min(self._place(self._number(moment.timestamp.batch) + 1), FOREVER))

    def _passed(self, number: int, moment: Moment) -> bool:
        # There is no earlier moment before the first batch: a milestone at zero is passed now.
        before = self._number(self._previous(moment)) if moment.timestamp.batch else 0
        return number > before


class Every(_Milestones):
    """True at intervals: after each batch that crosses a multiple of the interval.

    No interval is missed, however many samples or seconds a batch takes. A batch that crosses
    several multiples opens one window. No window opens at ``start`` itself.

    Args:
        interval: The distance between the starts of two windows, in any unit.
        lasting: The length of a window, in any unit.
        start: Where counting starts, in the unit of the interval.
        stage: The only stage with windows; None for all stages, each with its own count.

    Raises:
        ConfigError: If a time is malformed, out of range or never reached, or the stage is unknown.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
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
        if length.unit is every.unit and length.value > every.value:
            problem = f"is longer than the interval, {every}"
            raise ConfigError("lasting", str(length), problem, f'"{every}"')
        begin = checks.times("start", start, f"10{every.unit}", positive=False)
        if begin.value and begin.unit is not every.unit:
            problem = f"has another unit than interval, expected {every.unit}"
            raise ConfigError("start", str(begin), problem, f'"10{every.unit}"')
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


class At(_Milestones):
    """True once: from the first batch at or after a time, in each stage by its own count.

    Args:
        time: The time, in any unit; zero is the start of the stage. Stages other than train have
            no fraction.
        lasting: The length of the window, in any unit.

    Raises:
        ConfigError: If a time is malformed, out of range or never reached.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = At("10ba", lasting="3ba")
        >>> [batch for batch in range(99)
        ...  if schedule(Moment("train", Timestamp(batch=batch), Timestamp(batch=batch - 1)))]
        [10, 11, 12]
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

    def _place(self, number: int) -> float:
        return self._time if number <= 1 else inf


def _check_reached(field: str, value: Time, first: float, example: str) -> None:
    """Refuse a fraction whose first milestone is the end of the training: no batch follows."""
    if first >= 1.0 - ROUNDING:
        problem = "is never reached: training ends at 1dur"
        raise ConfigError(field, str(value), problem, f'"{example}"')


class Fixed(At):
    """True once, for a number of optimizer steps after a warm-up.

    Args:
        warmup_steps: Optimizer steps before the window.
        active_steps: Length of the window in optimizer steps.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule, start = Fixed(warmup_steps=2, active_steps=3), Timestamp()
        >>> [batch for batch in range(9) if schedule(Moment("train", start, start).ahead(batch))]
        [2, 3, 4]
    """

    def __init__(self, warmup_steps: int, active_steps: int) -> None:
        self.warmup_steps = checks.whole("warmup_steps", warmup_steps, 0, "10")
        self.active_steps = checks.whole("active_steps", active_steps, 1, "5")
        super().__init__(f"{self.warmup_steps}step", f"{self.active_steps}step")


class Cyclic(Schedule):
    """True in the active part of cycles of wait, warm-up and active batches.

    The arguments have the same meaning as in ``torch.profiler.schedule``.

    Args:
        skip_first: Batches before the first cycle.
        wait: Idle batches at the start of each cycle.
        warmup: Batches after these in which a profiler may warm up.
        active: Batches after these: the window.
        repeat: Number of cycles; 0 for no limit.
        per_epoch: Whether to count from the start of each epoch instead of the stage.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = Cyclic(wait=1, warmup=1, active=2, repeat=2)
        >>> [schedule.window(Moment("train", Timestamp(batch=batch), Timestamp()))
        ...  for batch in range(9)]
        [None, None, 0, 0, None, None, 1, 1, None]
    """

    shared = True

    def __init__(
        self,
        skip_first: int = 0,
        wait: int = 0,
        warmup: int = 1,
        active: int = 4,
        repeat: int = 1,
        per_epoch: bool = False,
    ) -> None:
        self.skip_first = checks.whole("skip_first", skip_first, 0, "0")
        self.wait = checks.whole("wait", wait, 0, "0")
        self.warmup = checks.whole("warmup", warmup, 0, "1")
        self.active = checks.whole("active", active, 1, "4")
        self.repeat = checks.whole("repeat", repeat, 0, "1")
        self.per_epoch = checks.flag("per_epoch", per_epoch)
        self.lead = self.warmup

    def window(self, moment: Moment) -> Hashable | None:
        """Return the number of the cycle, with the epoch if ``per_epoch``."""
        timestamp = moment.timestamp
        batch = timestamp.batch_in_epoch if self.per_epoch else timestamp.batch
        inactive = self.wait + self.warmup
        cycle, place = divmod(batch - self.skip_first, inactive + self.active)
        if cycle < 0 or place < inactive or (self.repeat and cycle >= self.repeat):
            return None
        return (timestamp.epoch, cycle) if self.per_epoch else cycle

    def quiet_until(self, moment: Moment) -> int:
        """Return the first batch of the next active part."""
        timestamp, length = moment.timestamp, moment.limits.batches_per_epoch
        if not self.per_epoch:
            return self._active_from(timestamp.batch)
        if length is None:
            return super().quiet_until(moment)
        begins = self._active_from(timestamp.batch_in_epoch)
        if begins >= length:
            begins = length + self._active_from(0)
        return max(timestamp.batch - timestamp.batch_in_epoch + begins, timestamp.batch + 1)

    def _active_from(self, batch: int) -> int:
        """Return where the active part of the cycle of an inactive batch begins."""
        inactive = self.wait + self.warmup
        length = inactive + self.active
        cycle = max(0, (batch - self.skip_first) // length)
        begins = self.skip_first + cycle * length + inactive
        return FOREVER if self.repeat and cycle >= self.repeat else begins


class _Constant(Schedule):
    """Base of schedules that give every batch of a stage the same answer."""

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """Return `FOREVER`."""
        return FOREVER


class _Ranks(_Constant):
    """Base of schedules by rank."""

    #: The rank and the number of ranks, as attributes of `Ranks`, and what is numbered.
    _rank, _size, _what = "global_rank", "world_size", "processes in the run"

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Warn of ranks that the run does not have: it may have more when it is started again."""
        size = getattr(context.ranks, self._size)
        if max(self.ranks) >= size and context.ranks.global_rank == 0:
            warn(
                f"{self!r} includes ranks that do not exist: the number of {self._what} is {size}."
            )

    def window(self, moment: Moment) -> Hashable | None:
        """Return the single window."""
        return 0 if getattr(moment.ranks, self._rank) in self.ranks else None


class GlobalRank(_Ranks):
    """True on the given ranks of the run.

    Args:
        ranks: One or more global ranks, from 0.

    Raises:
        ConfigError: If no rank is given.

    Example:
        >>> from lightning_perf.schedule import Every
        >>> schedule = Every("100ba") & GlobalRank([0, 8])
    """


class LocalRank(_Ranks):
    """True on the given ranks of each node.

    Args:
        ranks: One or more local ranks, from 0.

    Raises:
        ConfigError: If no rank is given.

    Example:
        >>> from lightning_perf.schedule import Every
        >>> schedule = Every("100ba") & LocalRank(0)  # one process per node
    """

    _rank, _size, _what = "local_rank", "local_world_size", "processes on this node"


class Stages(_Constant):
    """True in the given stages.

    Args:
        stages: One or more of ``train``, ``validate``, ``test`` and ``predict``.

    Raises:
        ConfigError: If no stage is given or one is unknown.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = Stages(["validate", "test"])
        >>> schedule(Moment("train", Timestamp(), Timestamp()))
        False
    """

    shared = True

    def __init__(self, stages: list[str] | str) -> None:
        self.stages = checks.stage_list("stages", stages)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the stage."""
        return moment.stage if moment.stage in self.stages else None


class HasTag(Composed):
    """True where another schedule is, while the MLflow run has the given tag.

    Args:
        tag: The tag as ``key``, which matches any value, or as ``key=value``.
        schedule: The other schedule, or its string; `Always` if None.

    Raises:
        ConfigError: If the tag has no key or the schedule is not valid.

    Example:
        >>> schedule = HasTag("profile=1", schedule="every 20ba for 2ba")
    """

    def __init__(self, tag: str, schedule: Schedule | str | None = None) -> None:
        key, equals, value = tag.partition("=") if isinstance(tag, str) else ("", "", "")
        if not key:
            raise ConfigError("tag", tag, "is not a tag, expected key or key=value", '"profile=1"')
        self.tag = tag
        self.schedule = as_schedule(schedule)
        self._key, self._value = key, value if equals else None
        self._read_tags: Callable[[], Mapping[str, str]] = dict
        self._tagged = False
        super().__init__([self.schedule])

    def setup(self, context: Context) -> None:
        """Store the tag reader of the run; warn if there is none."""
        super().setup(context)
        if context.read_tags is None and context.ranks.global_rank == 0:
            warn(f"{self!r} is never true: add an MLFlowLogger to the Trainer, for its tags.")
        self.shared = False  # each rank sees a new tag at a different time
        self._read_tags, self._tagged = context.read_tags or dict, False

    def observe(self, moment: Moment) -> None:
        """Read the cached tags."""
        super().observe(moment)
        value = self._read_tags().get(self._key)
        self._tagged = value is not None and self._value in (None, value)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the window of the other schedule, or None without the tag."""
        return self.schedule.window(moment) if self._tagged else None

    def quiet_until(self, moment: Moment) -> int:
        """Return what the other schedule does; its next batch if only the tag is missing."""
        if self.schedule(moment):
            return super().quiet_until(moment)
        return self.schedule.quiet_until(moment)
