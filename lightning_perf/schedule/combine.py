"""Schedules made of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.schedule.base import Context, Schedule
from lightning_perf.schedule.parse import as_schedule

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from lightning_perf.core.progress import Limits, Moment


class Composed(Schedule):
    """A schedule that hands on to its parts what it is told.

    Args:
        parts: Its parts, which a subclass judges by.
    """

    def __init__(self, parts: Iterable[Schedule]) -> None:
        self._parts = tuple(parts)

    @property
    def lead(self) -> int:
        """The longest of its parts'."""
        return max(part.lead for part in self._parts)

    @property
    def shared(self) -> bool:
        """Whether each of its parts is."""
        return all(part.shared for part in self._parts)

    @property
    def watches(self) -> bool:
        """Whether any of its parts does."""
        return any(part.watches for part in self._parts)

    def setup(self, context: Context) -> None:
        """Set up each part."""
        for part in self._parts:
            part.setup(context)

    def observe(self, moment: Moment) -> None:
        """Show the moment to each part."""
        for part in self._parts:
            part.observe(moment)

    def close(self) -> None:
        """Close each part."""
        for part in self._parts:
            part.close()

    def validate(self, limits: Limits) -> None:
        """Validate each part."""
        for part in self._parts:
            part.validate(limits)


class _Several(Composed):
    """One that is made of a list."""

    def __init__(self, schedules: list[Schedule | str]) -> None:
        self.schedules = _coerced(schedules)
        super().__init__(self.schedules)


class All(_Several):
    """Where all of some schedules hold; ``a & b`` makes one.

    Args:
        schedules: Schedules, or their strings.

    Raises:
        ConfigError: If there is none, or one of them is no schedule.
    """

    def window(self, moment: Moment) -> Hashable | None:
        """Give the windows of its parts."""
        windows = []
        for part in self._parts:
            window = part.window(moment)
            if window is None:
                return None
            windows.append(window)
        return tuple(windows)

    def quiet_until(self, moment: Moment) -> int:
        """As long as one of its parts that have no window now has none."""
        quiet = [part.quiet_until(moment) for part in self._parts if not part(moment)]
        return max(quiet)


class AnyOf(_Several):
    """Where any of some schedules holds; ``a | b`` makes one.

    Args:
        schedules: Schedules, or their strings.

    Raises:
        ConfigError: If there is none, or one of them is no schedule.
    """

    def window(self, moment: Moment) -> Hashable | None:
        """Give the windows of its parts, None where a part has none."""
        windows = tuple([part.window(moment) for part in self._parts])
        return None if windows.count(None) == len(windows) else windows

    def quiet_until(self, moment: Moment) -> int:
        """Until the first of its parts has a window."""
        return min(part.quiet_until(moment) for part in self._parts)


class Not(Composed):
    """Where a schedule does not hold; ``~a`` makes one.

    Args:
        schedule: The schedule, or its string.

    Raises:
        ConfigError: If it is no schedule.
    """

    def __init__(self, schedule: Schedule | str) -> None:
        self.schedule = as_schedule(schedule)
        super().__init__([self.schedule])

    def window(self, moment: Moment) -> Hashable | None:
        """Give the one window."""
        return 0 if self.schedule.window(moment) is None else None


def _coerced(schedules: list[Schedule | str]) -> list[Schedule]:
    if not isinstance(schedules, list | tuple) or not schedules:
        example = '["every 100ba", "first 5ba"]'
        raise ConfigError("schedules", schedules, "is not a list of schedules", example)
    return [as_schedule(schedule, field="schedules") for schedule in schedules]
