"""Schedules that look outside of training: at the clock, at the tags of the run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.schedule import checks
from lightning_perf.schedule.algebra import Composed
from lightning_perf.schedule.base import Context, Schedule
from lightning_perf.schedule.latch import Latch
from lightning_perf.schedule.parse import as_schedule
from lightning_perf.time import Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning_perf.moment import Moment


class Elapsed(Schedule):
    """At first, and whenever an amount of wall-clock time has passed since it last was true.

    Args:
        duration: The time, in seconds or as in ``1h30m``.

    Raises:
        ConfigError: If it is malformed, not positive or in another unit.
    """

    def __init__(self, duration: Time | str = "10m") -> None:
        parsed = checks.times("duration", duration, "10m", units={TimeUnit.SECOND})
        self.duration = str(parsed)
        self._seconds = parsed.value
        self._clock = time.monotonic
        self._due: float | None = None
        self._windows = 0
        self._latch = Latch(Time(1, TimeUnit.BATCH))

    def setup(self, context: Context) -> None:
        """Take the clock, and begin anew."""
        self._clock, self._due = context.clock, None
        self._latch.reset()

    def observe(self, moment: Moment) -> None:
        """Look at the clock."""
        now = self._clock()
        if self._due is None or now >= self._due:
            self._due = now + self._seconds
            self._windows += 1
            self._latch.open(self._windows, moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Give how many times it has been true."""
        return self._latch.window(moment)


class HasTag(Composed):
    """Where another schedule holds, as long as the run bears a tag.

    Args:
        tag: The tag as ``key``, whatever its value, or as ``key=value``.
        schedule: The other schedule, or its string; `Always` if None.

    Raises:
        ConfigError: If the tag has no key, or the schedule is none.
    """

    def __init__(self, tag: str, schedule: Schedule | str | None = None) -> None:
        key, equals, value = tag.partition("=") if isinstance(tag, str) else ("", "", "")
        if not key:
            raise ConfigError("tag", tag, "has no key", '"profile=1"')
        self.tag = tag
        self.schedule = as_schedule(schedule)
        self._key, self._value = key, value if equals else None
        self._read_tags = Context().read_tags
        self._held = False
        super().__init__([self.schedule])

    @property
    def shared(self) -> bool:
        """False: each rank learns of a tag in its own time."""
        return False

    def setup(self, context: Context) -> None:
        """Take the reader of tags."""
        super().setup(context)
        self._read_tags, self._held = context.read_tags, False

    def observe(self, moment: Moment) -> None:
        """Look at the tags."""
        super().observe(moment)
        value = self._read_tags().get(self._key)
        self._held = value is not None and self._value in (None, value)

    def window(self, moment: Moment) -> Hashable | None:
        """Give the window of the other schedule."""
        return self.schedule.window(moment) if self._held else None

    def quiet_until(self, moment: Moment) -> int:
        """As long as the other schedule has no window, whatever the tags come to be."""
        if self.schedule(moment):
            return super().quiet_until(moment)
        return self.schedule.quiet_until(moment)
