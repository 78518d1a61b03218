"""Schedules that a slow batch or a signal triggers."""

from __future__ import annotations

import signal
import threading
from abc import abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict, deque
from math import inf
from typing import TYPE_CHECKING, Any

from lightning_perf import checks
from lightning_perf.errors import ConfigError, warn
from lightning_perf.schedule.base import Context, Schedule
from lightning_perf.schedule.intervals import Latch

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import FrameType

    from lightning_perf.core.progress import Moment
    from lightning_perf.core.time import Time


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


# They end or stop a process, or Lightning ends training by them: not ours to take.
_REFUSED = {"SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE"}


class OnSignal(Trigger):
    """On demand: when the process is sent a signal, as by ``kill -USR2 PID``.

    A handler that was there is still called, and is put back when the schedule is closed. A signal
    that comes while a window is open opens another one after it. SLURM's auto-requeue needs
    ``SIGUSR1`` for itself.

    Args:
        signal: The name of the signal.
        lasting: The length of a window, in any unit but ``dur``.

    Raises:
        ConfigError: If the signal is unknown or cannot be taken, or the length is malformed.
    """

    def __init__(self, signal: str = "SIGUSR2", lasting: Time | str = "5ba") -> None:
        super().__init__(lasting)
        self.signal = signal
        self._number = _signal_number(signal)
        self._handler: _Handler | None = None

    def setup(self, context: Context) -> None:
        """Take the signal, which only the main thread can."""
        super().setup(context)
        self.close()
        if threading.current_thread() is threading.main_thread():
            self._handler = _Handler(self._number)
        else:
            warn(f"OnSignal({self.signal!r}) does nothing: training is not on the main thread.")

    def close(self) -> None:
        """Let the signal go."""
        if self._handler:
            self._handler.release()
            self._handler = None

    def fired(self, moment: Moment) -> bool:  # noqa: ARG002
        """Look whether the signal came."""
        return self._handler is not None and self._handler.take()


class _Handler:
    """A handler that notes the signal and passes it on; once released, it only passes it on.

    It outlives its release where others have stored it: Lightning puts back at the end of a run
    what it found at the beginning.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.released = False
        self._number = number
        self._received = False
        self._before = _in_use(signal.getsignal(number))
        signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        before = _in_use(self._before)
        if callable(before):
            before(number, frame)
        elif self.released and before == signal.SIG_DFL:
            signal.signal(number, before)
            signal.raise_signal(number)

    def take(self) -> bool:
        """Tell whether the signal came since this was last asked."""
        received, self._received = self._received, False
        return received

    def release(self) -> None:
        """Stop noting, and put back what was there unless another handler came since."""
        self.released = True
        ours = signal.getsignal(self._number) is self
        # Python cannot put back a handler that was not set from Python.
        if (
            ours
            and self._before is not None
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(self._number, _in_use(self._before))


def _in_use(handler: Any) -> Any:
    """Find the first handler of a chain that is not one of ours and released."""
    while isinstance(handler, _Handler) and handler.released:
        handler = handler._before
    return handler


def _signal_number(name: str) -> signal.Signals:
    known = signal.Signals.__members__
    if isinstance(name, str) and name in _REFUSED:
        raise ConfigError("signal", name, "is not free to be used", '"SIGUSR2"')
    if not isinstance(name, str) or name not in known:
        near = next((each for each in known if _same_signal(each, name)), "SIGUSR2")
        example = f'"{near if near not in _REFUSED else "SIGUSR2"}"'
        raise ConfigError("signal", name, "is not the name of a signal of this system", example)
    return known[name]


def _same_signal(known: str, written: object) -> bool:
    """Whether a signal was written in lower case, without its SIG, or as its number."""
    meant = str(written).upper()
    return meant in (known, known.removeprefix("SIG"), str(int(signal.Signals[known])))
