"""What every schedule is, and what it is told about the run."""

# ruff: noqa: B027 - what most schedules need not do is empty, and not abstract.
from __future__ import annotations

import inspect
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_perf.core.progress import Limits, Moment, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping


#: The index of a batch that never comes.
FOREVER = sys.maxsize


def _no_tags() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Context:
    """What schedules need from outside, handed to `Schedule.setup`.

    Args:
        ranks: Where this process stands.
        limits: What ends the training.
        read_tags: Gives the tags of the run as last known, without blocking.
        clock: Gives seconds that only grow.
    """

    ranks: Ranks = field(default_factory=Ranks)
    limits: Limits = field(default_factory=Limits)
    read_tags: Callable[[], Mapping[str, str]] = _no_tags
    clock: Callable[[], float] = time.monotonic


class Schedule(ABC):
    """When to do something: a predicate over moments.

    A subclass writes `window` and keeps its constructor's arguments under their own names; from
    those it gets its representation, its equality and its pickle, in which nothing else survives.
    Schedules combine with ``&``, ``|`` and ``~``, also with strings.

    Example:
        >>> from lightning_perf.schedule import Every, Stages
        >>> Every("100ba") & ~Stages("train")  # doctest: +NORMALIZE_WHITESPACE
        All(schedules=[Every(interval='100ba', lasting='1ba', start='0ba', stage=None),
                       Not(schedule=Stages(stages=['train']))])
    """

    @abstractmethod
    def window(self, moment: Moment) -> Hashable | None:
        """Tell which window the batch that begins at a moment belongs to.

        Asking changes nothing. Batches in a row with the same window are recorded as one.

        Args:
            moment: The present one, or one `Moment.ahead` of it.

        Returns:
            The window, or None for no window.
        """

    def __call__(self, moment: Moment) -> bool:
        """Tell whether the batch that begins at a moment belongs to any window."""
        return self.window(moment) is not None

    @property
    def lead(self) -> int:
        """How many batches ahead a recorder that warms up should look."""
        return 1

    @property
    def shared(self) -> bool:
        """Whether all ranks of a run come to the same decision, whatever happens on each."""
        return False

    @property
    def watches(self) -> bool:
        """Whether it has to observe every batch."""
        return type(self).observe is not Schedule.observe

    def quiet_until(self, moment: Moment) -> int:
        """Tell how long a caller outside of any window need not ask again.

        Args:
            moment: The present one, at which there is no window.

        Returns:
            The batch of the stage, as an index, before which no window opens; at least the next.
        """
        return moment.timestamp.batch + 1

    def setup(self, context: Context) -> None:
        """Begin to watch the run; what was seen of an earlier one is forgotten.

        Raises:
            ConfigError: If the schedule cannot work in this run.
        """

    def observe(self, moment: Moment) -> None:
        """Take note of a moment: once a batch, before `window` is asked about it."""

    def close(self) -> None:
        """Let go of what `setup` acquired; once or more often."""

    def validate(self, limits: Limits) -> None:
        """Check the schedule against what ends the training.

        Raises:
            ConfigError: If it needs a limit and there is none.
        """

    def __and__(self, other: Schedule | str) -> Schedule:
        # Here and not above: the algebra coerces strings, and what they make are schedules.
        from lightning_perf.schedule.combine import All

        return All(schedules=[self, other])

    def __or__(self, other: Schedule | str) -> Schedule:
        from lightning_perf.schedule.combine import AnyOf

        return AnyOf(schedules=[self, other])

    def __rand__(self, other: str) -> Schedule:
        from lightning_perf.schedule.combine import All

        return All(schedules=[other, self])

    def __ror__(self, other: str) -> Schedule:
        from lightning_perf.schedule.combine import AnyOf

        return AnyOf(schedules=[other, self])

    def __bool__(self) -> bool:
        # `a and b` would be `b`, without a word.
        raise TypeError(
            "a schedule is neither true nor false before it is asked about a moment. "
            "Combine schedules with & | ~ instead of and, or, not."
        )

    def __invert__(self) -> Schedule:
        from lightning_perf.schedule.combine import Not

        return Not(schedule=self)

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
        # A function with a name, which YAML asks for: loggers write hyperparameters as YAML.
        return _made, (type(self), self._arguments())

    def _arguments(self) -> dict[str, Any]:
        parameters = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in parameters}


def _made(kind: type[Schedule], arguments: Mapping[str, Any]) -> Schedule:
    return kind(**arguments)
