"""The base class of schedules, combinations with ``&``, ``|``, ``~``, and schedules as strings."""

# ruff: noqa: B027 - optional methods are empty, not abstract.
from __future__ import annotations

import inspect
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_perf.checks import (
    UNITS,
    is_list,
    whole,
)
from lightning_perf.core.progress import Limits, Moment, Ranks
from lightning_perf.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence


#: A batch index that training never reaches.
FOREVER = sys.maxsize


@dataclass(frozen=True)
class Context:
    """What `Schedule.setup` receives from the run. Callbacks receive a `Run` instead."""

    ranks: Ranks = field(default_factory=Ranks)
    #: ``batches_per_epoch`` is not known yet, or is that of an earlier fit; see `Moment.limits`.
    limits: Limits = field(default_factory=Limits)
    #: Returns the cached tags of the MLflow run, without blocking; None without a run.
    read_tags: Callable[[], Mapping[str, str]] | None = dict
    #: Codes and severities of verdicts of the diagnosis, appended as they are reached.
    reached: Sequence[str] = ()
    #: The codes and severities that may be reached: none without a diagnosis; None if unknown.
    reachable: Collection[str] | None = None
    #: Returns monotonic time in seconds.
    clock: Callable[[], float] = time.monotonic


class Schedule(ABC):
    """Decides which batches belong to a window.

    A subclass implements `window` and stores each constructor argument in an attribute of the same
    name. Representation, equality and pickling use these arguments; other state is not pickled.
    The other methods and properties are optional.

    Schedules combine with ``&``, ``|`` and ``~``, also with strings.

    Example:
        >>> from lightning_perf.schedule import Every, Stages
        >>> Every("100ba") & ~Stages("train")  # doctest: +NORMALIZE_WHITESPACE
        All(schedules=[Every(interval='100ba', lasting='1ba', start='0ba', stage=None),
                       Not(schedule=Stages(stages=['train']))])
    """

    #: The text that means this schedule without arguments.
    word: ClassVar[str | None] = None
    #: How many batches before a window a profiler starts to warm up, if it warms up at all.
    lead: int = 1
    #: Whether all ranks always get the same window for the same batch. Valid after `setup`.
    #: Metric callbacks of several ranks report when the schedule says so if this is True, and only
    #: every ``log_every_n_steps`` if it is False. True by mistake makes ranks exchange different
    #: reports.
    shared: bool = False
    #: Whether events open its windows, or those of a part: see `Trigger`.
    fires: bool = False

    @classmethod
    def of_text(cls, text: str) -> Schedule | None:
        """Return the schedule that a text means, if it is one of this class: see `as_schedule`.

        Raises:
            ConfigError: If a part of it is not valid.
        """
        return cls() if text.lower() == cls.word else None

    @abstractmethod
    def window(self, moment: Moment) -> Hashable | None:
        """Return the window of the next batch, without side effects.

        Consecutive batches with the same window form one recording.

        Args:
            moment: The current moment, or a later one from `Moment.ahead`.

        Returns:
            The window, or None if the batch belongs to no window. Any other value is a window,
            False and 0 too.
        """

    def __call__(self, moment: Moment) -> bool:
        """Return whether the next batch belongs to a window."""
        return self.window(moment) is not None

    @property
    def watches(self) -> bool:
        """Whether `observe` must be called after every batch."""
        return type(self).observe is not Schedule.observe

    def quiet_until(self, moment: Moment) -> int:
        """Return the index of the first batch that may belong to the next window.

        The default is the next batch; `FOREVER` means none in this stage. Callers do not call
        `window` again before that batch, unless the schedule `watches`.

        Args:
            moment: A moment without a window.
        """
        return moment.timestamp.batch + 1

    def setup(self, context: Context) -> None:
        """Prepare for a run and discard the state of an earlier one.

        Raises:
            ConfigError: If the schedule cannot work in this run.
        """

    def observe(self, moment: Moment) -> None:
        """Update internal state, before `window` is called.

        Called after every batch, where a stage begins or continues, and where an epoch begins after
        one that ended early.
        """

    def close(self) -> None:
        """Release what `setup` acquired. Idempotent."""

    def __and__(self, other: Schedule | str) -> Schedule:
        return All(schedules=[self, other])

    def __or__(self, other: Schedule | str) -> Schedule:
        return AnyOf(schedules=[self, other])

    def __rand__(self, other: str) -> Schedule:
        return All(schedules=[other, self])

    def __ror__(self, other: str) -> Schedule:
        return AnyOf(schedules=[other, self])

    def __invert__(self) -> Schedule:
        return Not(schedule=self)

    def __bool__(self) -> bool:
        # Without this, `a and b` would silently be `b`.
        raise TypeError("a schedule has no truth value. Use & | ~ instead of and, or, not.")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._arguments() == other._arguments()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({arguments})"

    def __reduce__(self) -> tuple[Any, ...]:
        # YAML needs a named function: loggers write hyperparameters as YAML.
        return _construct, (type(self), self._arguments())

    def _arguments(self) -> dict[str, Any]:
        parameters = inspect.signature(type(self)).parameters
        try:
            return {name: getattr(self, name) for name in parameters}
        except AttributeError as error:
            problem = "keep each constructor argument in an attribute of the same name"
            raise AttributeError(f"{error}: {problem}") from error


def _construct(cls: type[Schedule], arguments: Mapping[str, Any]) -> Schedule:
    return cls(**arguments)


class Composed(Schedule):
    """Base of schedules that contain others: forwards `setup`, `observe` and `close` to them."""

    def __init__(self, schedules: list[Schedule | str]) -> None:
        if not is_list(schedules) or not schedules:
            problem, example = "is not a list of schedules", '["every 100ba", "first 5ba"]'
            raise ConfigError("schedules", schedules, problem, example)
        self.schedules = [as_schedule(schedule, "schedules") for schedule in schedules]
        self.lead = max(part.lead for part in self.schedules)
        self.fires = any(part.fires for part in self.schedules)

    @property
    def watches(self) -> bool:
        """Whether any part watches."""
        return any(part.watches for part in self.schedules)

    def setup(self, context: Context) -> None:
        """Set up each part."""
        for part in self.schedules:
            part.setup(context)
        self.shared = all(part.shared for part in self.schedules)

    def observe(self, moment: Moment) -> None:
        """Forward the moment to each part."""
        for part in self.schedules:
            part.observe(moment)

    def close(self) -> None:
        """Close each part."""
        for part in self.schedules:
            part.close()


def walk(schedule: Schedule) -> Iterator[Schedule]:
    """A schedule, and at any depth those that it is composed of."""
    yield schedule
    if isinstance(schedule, Composed):
        for part in schedule.schedules:
            yield from walk(part)


class All(Composed):
    """True where all of the given schedules are; ``a & b`` creates one.

    Args:
        schedules: Schedules, or their strings.

    Raises:
        ConfigError: If the list is empty or an item is not a valid schedule.

    Example:
        >>> from lightning_perf.schedule import Every, GlobalRank
        >>> (Every("100ba") & GlobalRank([0])) == All(["every 100ba", GlobalRank([0])])
        True
    """

    def window(self, moment: Moment) -> Hashable | None:
        """Return the tuple of the parts' windows, or None if a part has none."""
        windows = []
        for part in self.schedules:
            window = part.window(moment)
            if window is None:
                return None
            windows.append(window)
        return tuple(windows)

    def observe(self, moment: Moment) -> None:
        """Forward the moment to each part; events wait until the other parts select the batch."""
        for part in self.schedules:
            if not part.fires:
                part.observe(moment)
        if self.fires and all(part.fires or part(moment) for part in self.schedules):
            for part in self.schedules:
                if part.fires:
                    part.observe(moment)

    def quiet_until(self, moment: Moment) -> int:
        """Return the latest of the batches that the parts without a window wait for."""
        return max(part.quiet_until(moment) for part in self.schedules if not part(moment))


class AnyOf(Composed):
    """True where at least one of the given schedules is; ``a | b`` creates one.

    Args:
        schedules: Schedules, or their strings.

    Raises:
        ConfigError: If the list is empty or an item is not a valid schedule.

    Example:
        >>> from lightning_perf.schedule import At
        >>> (At("10ba") | "every 100ba") == AnyOf(["at 10ba", "every 100ba"])
        True
    """

    def window(self, moment: Moment) -> Hashable | None:
        """Return the tuple of the parts' windows, or None if no part has one."""
        windows = tuple([part.window(moment) for part in self.schedules])
        return None if windows.count(None) == len(windows) else windows

    def quiet_until(self, moment: Moment) -> int:
        """Return the earliest batch that a part waits for."""
        return min(part.quiet_until(moment) for part in self.schedules)


class Not(Composed):
    """True where another schedule is not; ``~a`` creates one.

    Args:
        schedule: The other schedule, or its string.

    Raises:
        ConfigError: If it is not a valid schedule.

    Example:
        >>> from lightning_perf.schedule import At
        >>> ~At("0ba", lasting="10ba") == Not("first 10ba")
        True
    """

    def __init__(self, schedule: Schedule | str) -> None:
        self.schedule = as_schedule(schedule)
        super().__init__([self.schedule])

    def window(self, moment: Moment) -> Hashable | None:
        """Return the single window."""
        return 0 if self.schedule.window(moment) is None else None


_FORMS = "TIME, every TIME for TIME, at TIME for TIME, first TIME, always, never"
_EXAMPLE = '"every 100ba for 3ba"'
_OBJECTS = "other schedules, and those combined with & | ~, are objects: in YAML with class_path"


def as_schedule(
    value: Schedule | str | None, field: str = "schedule", default: Schedule | None = None
) -> Schedule:
    """Convert an argument to a schedule.

    Args:
        value: A schedule; a string such as ``"100ba"``, ``"every 100 batches for 3 batches"``,
            ``"every epoch"``, ``"first 5ba"``, ``"first 0.1dur"``, ``"at 0.5dur"``, ``"at 50%"``,
            ``"always"`` or ``"never"``; or None for the default.
        field: Name of the argument, for the message.
        default: The schedule for None; `Always` if not given.

    Raises:
        ConfigError: If the value is not a valid schedule.

    Example:
        >>> as_schedule("every 100ba for 3ba")
        Every(interval='100ba', lasting='3ba', start='0ba', stage=None)
        >>> as_schedule("first 5ba")
        At(time='0ba', lasting='5ba')
    """
    if isinstance(value, Schedule):
        whole(f"{type(value).__name__}.lead", value.lead, 0, "1")
        return value
    if value is None:
        return _parse("always") if default is None else default
    if not isinstance(value, str):
        problem = f"is not a valid schedule, expected a string or a Schedule (units: {UNITS})"
        raise ConfigError(field, value, problem, _EXAMPLE)
    try:
        return _parse(value.strip())
    except ConfigError as error:
        reason = error.problem
        if error.field != "text":  # a part of it
            reason = f"{shown(error.value)} {reason}"
        problem = f"is not a valid schedule: {reason}; {_OBJECTS}"
        raise ConfigError(field, value, problem, _EXAMPLE) from None


def _parse(text: str) -> Schedule:
    """The schedule that a text means to one of the classes, each after its bases."""
    classes = [Schedule]
    for kind in classes:  # grows
        if (schedule := kind.of_text(text)) is not None:
            return schedule
        classes += kind.__subclasses__()
    raise ConfigError("text", text, f"expected one of {_FORMS} (units: {UNITS})", _EXAMPLE)
