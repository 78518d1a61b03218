"""Schedules by rank, stage, wall-clock time, and tags of the MLflow run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightning_perf import checks
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError
from lightning_perf.schedule.base import FOREVER, Context, Schedule
from lightning_perf.schedule.combine import Composed
from lightning_perf.schedule.intervals import Latch
from lightning_perf.schedule.parse import as_schedule

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning_perf.core.progress import Moment


class _Place(Schedule):
    """A schedule that is the same all through a stage."""

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """To the end of the stage."""
        return FOREVER


class GlobalRank(_Place):
    """On some ranks of the run.

    Args:
        ranks: One or more, from 0.

    Raises:
        ConfigError: If there is none, or one is not a rank of the run, which `setup` tells.
    """

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Check the ranks against the run."""
        _check_world(self.ranks, context.ranks.world_size, "processes in the run")

    def window(self, moment: Moment) -> Hashable | None:
        """Give the one window."""
        return 0 if moment.ranks.global_rank in self.ranks else None


class LocalRank(_Place):
    """On some ranks of each node.

    Args:
        ranks: One or more, from 0.

    Raises:
        ConfigError: If there is none, or one is not a rank of the node, which `setup` tells.
    """

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Check the ranks against the node."""
        _check_world(self.ranks, context.ranks.local_world_size, "processes on this node")

    def window(self, moment: Moment) -> Hashable | None:
        """Give the one window."""
        return 0 if moment.ranks.local_rank in self.ranks else None


class Stages(_Place):
    """In some stages.

    Args:
        stages: One or more of ``train``, ``validate``, ``test`` and ``predict``.

    Raises:
        ConfigError: If there is none, or one is unknown.
    """

    def __init__(self, stages: list[str] | str) -> None:
        self.stages = checks.stage_list("stages", stages)

    @property
    def shared(self) -> bool:
        """True: all ranks are in the same stage."""
        return True

    def window(self, moment: Moment) -> Hashable | None:
        """Give the stage."""
        return moment.stage if moment.stage in self.stages else None


def _check_world(ranks: list[int], size: int, what: str) -> None:
    beyond = [rank for rank in ranks if rank >= size]
    if beyond:
        raise ConfigError("ranks", ranks, f"goes beyond the {size} {what}", "0")


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
