"""Schedules that an event sets off: a slow batch, and the base for others."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict, deque
from math import inf
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.schedule import checks
from lightning_perf.schedule.base import Context, Schedule
from lightning_perf.schedule.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning_perf.moment import Moment
    from lightning_perf.time import Time

_HISTORY = 100
_MIN_HISTORY = 20


class Trigger(Schedule):
    """A schedule that something sets off, and whose window then lasts.

    The window opens one batch later, so that a recorder that warms up foresees it by the `lead` of
    one. While it is open, nothing sets the trigger off.

    Args:
        lasting: The length of a window, in any unit but ``dur``.
    """

    def __init__(self, lasting: Time | str) -> None:
        length = checks.times("lasting", lasting, "5ba", units=checks.COUNTED_UNITS)
        self.lasting = str(length)
        self._latch = Latch(length)
        self._windows = 0

    @abstractmethod
    def fired(self, moment: Moment) -> bool:
        """Tell whether to open a window; asked once a batch while there is none."""

    def setup(self, context: Context) -> None:  # noqa: ARG002
        """Forget an earlier run."""
        self._latch.reset()

    def observe(self, moment: Moment) -> None:
        """Open a window if it was set off."""
        if self.window(moment) is None and self.fired(moment):
            self._windows += 1
            self._latch.open(self._windows, moment, delay=1)
        self._latch.observe(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Give the number of the window."""
        return self._latch.window(moment)


class OnSlowBatch(Trigger):
    """After a batch that took much longer than usual: the anomaly triggers its own capture.

    Usual is the median of the last 100 batches of the stage, once there are 20. Batches inside a
    window are left out, because a recorder slows them.

    Args:
        factor: How many times the median is slow.
        lasting: The length of a window, in any unit but ``dur``.
        cooldown: How long after a window nothing sets it off, in any unit but ``dur``.

    Raises:
        ConfigError: If an argument is malformed or out of range.
    """

    def __init__(
        self, factor: float = 2.0, lasting: Time | str = "3ba", cooldown: Time | str = "200ba"
    ) -> None:
        super().__init__(lasting)
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 1 < factor < inf:
            raise ConfigError("factor", factor, "is not a number above 1", "2.0")
        quiet = checks.times(
            "cooldown", cooldown, "200ba", units=checks.COUNTED_UNITS, positive=False
        )
        self.factor, self.cooldown = float(factor), str(quiet)
        self._quiet = Latch(quiet)
        self._forget()

    def setup(self, context: Context) -> None:
        """Forget an earlier run."""
        super().setup(context)
        self._quiet.reset()
        self._forget()

    def _forget(self) -> None:
        self._usual: defaultdict[str, _RunningMedian] = defaultdict(_RunningMedian)
        self._captured: set[str] = set()

    def fired(self, moment: Moment) -> bool:
        """Compare the last batch with the median of those before it."""
        # The first time since a window, whose last batch is no more usual than the others in it.
        if moment.stage in self._captured:
            self._captured.remove(moment.stage)
            self._quiet.open(True, moment)
            return False
        usual, seconds = self._usual[moment.stage], moment.batch_seconds
        slow = len(usual) >= _MIN_HISTORY and seconds > self.factor * usual.median
        usual.add(seconds)
        if not slow or self._quiet.window(moment):
            return False
        self._captured.add(moment.stage)
        return True


class _RunningMedian:
    """The median of the last values, kept sorted because it is asked for once a batch."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    def add(self, value: float) -> None:
        self._recent.append(value)
        insort(self._sorted, value)
        if len(self._recent) > _HISTORY:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
