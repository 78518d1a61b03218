"""Schedules that an event triggers: time, a slow batch, a verdict or a signal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from abc import abstractmethod
from collections import defaultdict, deque
from contextlib import suppress
from math import inf
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any

from lightning_perf import checks
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError, closest, warn
from lightning_perf.schedule.base import Context, Schedule
from lightning_perf.schedule.intervals import Latch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from types import FrameType

    from lightning_perf.core.progress import Moment


_HISTORY = 100
_MIN_HISTORY = 20


class Trigger(Schedule):
    """Base of schedules that open a window after an event.

    The window opens one batch later, so that a profiler has one batch for its warm-up, and counts
    the batches of all stages. The trigger cannot fire again while its window is open. In ``a & b``
    it fires only where the other schedule selects the batch, unless events open that one's windows.

    Args:
        lasting: The length of a window, in any unit except ``dur``. Epochs are those of training.
    """

    fires = True
    #: Batches from the event to the window.
    _delay = 1

    def __init__(self, lasting: Time | str) -> None:
        length = checks.times("lasting", lasting, "5ba", units=checks.COUNTED_UNITS)
        self.lasting = str(length)
        epochs = _training_epochs if length.unit is TimeUnit.EPOCH else None
        self._latch = Latch(length, epochs)
        self._windows = 0

    @abstractmethod
    def fired(self, moment: Moment) -> bool:
        """Return whether to open a window.

        Called while none is open: after every batch, where a stage begins or continues, and after
        an epoch that ended early.
        """

    def setup(self, context: Context) -> None:  # noqa: ARG002
        """Discard the state of an earlier run."""
        self._latch.clear()

    def observe(self, moment: Moment) -> None:
        """Open a window if the trigger fires."""
        if self.window(moment) is None and self.fired(moment):
            self._windows += 1
            self._latch.open(self._windows, moment, self._delay)
        self._latch.observe(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the number of the window."""
        return self._latch.window(moment)


def _training_epochs(moment: Moment) -> float:
    # Validation inside of fit counts as an epoch of its own.
    return moment.timestamp.epoch if moment.stage == "train" else 0.0


class Elapsed(Trigger):
    """True for the first batch, and again whenever the given wall-clock time has passed.

    Args:
        duration: The time since the last window, as ``600sec`` or ``1h30m``.

    Raises:
        ConfigError: If the duration is malformed, not positive or in another unit.

    Example:
        >>> Elapsed("1h30m")
        Elapsed(duration='5400sec')
    """

    _delay = 0

    def __init__(self, duration: Time | str = "10m") -> None:
        super().__init__("1ba")
        parsed = checks.times("duration", duration, "10m", units={TimeUnit.SECOND})
        self.duration = str(parsed)
        self._seconds = parsed.value
        self._clock, self._due = time.monotonic, -inf

    def setup(self, context: Context) -> None:
        """Restart with the clock of the run."""
        super().setup(context)
        self._clock, self._due = context.clock, -inf

    def fired(self, moment: Moment) -> bool:  # noqa: ARG002
        """Return whether the time has passed."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._seconds
        return True


class OnSlowBatch(Trigger):
    """True after a batch that took much longer than the median.

    The median covers the last 100 batches of the stage and needs at least 20. It excludes batches
    inside a window, because profiling slows them down.

    Args:
        factor: A batch is slow if it takes more than this multiple of the median.
        lasting: The length of a window, in any unit except ``dur``.
        cooldown: The time after a window in which no other opens, in any unit except ``dur``.

    Raises:
        ConfigError: If an argument is malformed or out of range.

    Example:
        >>> OnSlowBatch(factor=3.0)
        OnSlowBatch(factor=3.0, lasting='3ba', cooldown='200ba')
    """

    def __init__(
        self, factor: float = 2.0, lasting: Time | str = "3ba", cooldown: Time | str = "200ba"
    ) -> None:
        super().__init__(lasting)
        if not checks.is_number(factor) or not 1 < factor < inf:
            problem = "is not a valid factor, expected a number greater than 1"
            raise ConfigError("factor", factor, problem, "2.0")
        units = checks.COUNTED_UNITS
        pause = checks.times("cooldown", cooldown, "200ba", units=units, positive=False)
        self.factor, self.cooldown = float(factor), str(pause)
        self._cooldown = Latch(pause)
        self._recent = defaultdict[str, deque[float]](lambda: deque(maxlen=_HISTORY))
        self._seen: dict[str, int] = {}
        self._fired = False

    def setup(self, context: Context) -> None:
        """Discard the state of an earlier run."""
        super().setup(context)
        for state in (self._cooldown, self._recent, self._seen):
            state.clear()
        self._fired = False

    def observe(self, moment: Moment) -> None:
        """Open a window after a slow batch."""
        self._cooldown.observe(moment)
        super().observe(moment)
        self._seen[moment.stage] = moment.timestamp.batch

    def fired(self, moment: Moment) -> bool:
        """Compare the last batch with the median of the batches before it."""
        # The first call after a window: the last batch was still inside it.
        if self._fired:
            self._fired = False
            self._cooldown.open(True, moment)
            return False
        if self._seen.get(moment.stage) == moment.timestamp.batch:  # no batch since then
            return False
        recent, seconds = self._recent[moment.stage], moment.batch_seconds
        slow = len(recent) >= _MIN_HISTORY and seconds > self.factor * median_high(recent)
        recent.append(seconds)
        self._fired = slow and not self._cooldown.window(moment)
        return self._fired


class OnVerdict(Trigger):
    """True after the diagnosis reaches one of some verdicts, such as ``"periodic-stall"``.

    It needs `Diagnosis` on the same Trainer. Verdicts are reached on rank 0, so it is never true on
    other ranks. Each code or severity opens one window per run: of training, or of the stage that
    runs alone, since verdicts are about it.

    Args:
        codes: Codes of verdicts, of one's own rules too, or severities, such as ``"critical"``.
        lasting: The length of a window, in any unit except ``dur``.

    Raises:
        ConfigError: If there is no code, or the length is malformed; at set-up, if `Diagnosis` has
            no rule with a code.

    Example:
        >>> schedule = OnVerdict(["periodic-stall", "slowdown"], lasting="5ba")
    """

    def __init__(self, codes: list[str] | str, lasting: Time | str = "5ba") -> None:
        super().__init__(lasting)
        self.codes: list[Any] = list(codes) if checks.is_list(codes) else [codes]
        if not self.codes or not all(isinstance(code, str) and code for code in self.codes):
            problem = "is not valid, expected one code of a verdict or more"
            raise ConfigError("codes", codes, problem, '["input-bound", "periodic-stall"]')
        self._reached: Sequence[str] = ()
        self._seen, self._stage = 0, ""

    def setup(self, context: Context) -> None:
        """Follow the verdicts of a run; refuse codes that cannot be reached in it."""
        super().setup(context)
        self._check_reachable(context)
        self._reached, self._seen = context.reached, len(context.reached)
        self._stage = ""

    def observe(self, moment: Moment) -> None:
        """Open a window after a verdict, in the stage that began first."""
        self._stage = self._stage or moment.stage
        if moment.stage == self._stage:
            super().observe(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the number of the window, in the same stage."""
        return super().window(moment) if moment.stage == self._stage else None

    def fired(self, moment: Moment) -> bool:  # noqa: ARG002
        """Return whether one of the codes was reached since the last call."""
        if len(self._reached) == self._seen:
            return False
        fresh, self._seen = self._reached[self._seen :], len(self._reached)
        return any(code in self.codes for code in fresh)

    def _check_reachable(self, context: Context) -> None:
        if context.reachable is None:
            return
        known = sorted(context.reachable)
        unknown = [code for code in self.codes if code not in known]
        if not known:
            if context.ranks.global_rank == 0:
                warn(f"{self!r} is never true: add Diagnosis() to the callbacks of the Trainer.")
        elif unknown:
            near = [closest(code, known, known[0]) for code in self.codes]
            problem = f"has {unknown[0]!r}, but verdicts of this run are {', '.join(known)}"
            raise ConfigError("codes", self.codes, problem, json.dumps(near))


#: The files and signals of processes, on Linux.
PROC = Path("/proc")
#: The signal of `OnSignal` by default. Windows has no signal for users, but Ctrl+Break.
USUAL = "SIGUSR2" if "SIGUSR2" in signal.Signals.__members__ else "SIGBREAK"
# These end or stop the process, or Lightning uses them to end training.
_REFUSED = {"SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE"}


class OnSignal(Trigger):
    """True after the process receives a signal, as from ``kill -USR2 PID``.

    On Windows, the signal is Ctrl+Break in the training's console, ``SIGBREAK``.

    The earlier handler of the signal is still called, and is restored by `close`. A signal during
    a window opens another window after it. SLURM's auto-requeue uses ``SIGUSR1``.

    Args:
        signal: The name of the signal.
        lasting: The length of a window, in any unit except ``dur``.

    Raises:
        ConfigError: If the signal is unknown or reserved, or the length is malformed.

    Example:
        >>> from lightning_perf import PyTorch
        >>> profiler = PyTorch(schedule=OnSignal("SIGUSR2", lasting="5ba"))
    """

    def __init__(self, signal: str = USUAL, lasting: Time | str = "5ba") -> None:
        super().__init__(lasting)
        self.signal = signal
        self._number = signal_number(signal)
        self._handler: _Handler | None = None

    def setup(self, context: Context) -> None:
        """Install the handler, which Python allows on the main thread only."""
        super().setup(context)
        self.close()
        if threading.current_thread() is threading.main_thread():
            self._handler = _Handler(self._number)
        else:
            warn(f"OnSignal({self.signal!r}) is off: training does not run on the main thread.")

    @property
    def pending(self) -> bool:
        """Whether a signal was received whose window has not begun; False without a run."""
        return self._handler is not None and (self._handler.received or self._latch.pending)

    def close(self) -> None:
        """Restore the earlier handler."""
        if self._handler:
            self._handler.release()
            self._handler = None

    def fired(self, moment: Moment) -> bool:  # noqa: ARG002
        """Return whether the signal was received."""
        return self._handler is not None and self._handler.take()


def _marker(number: int, pid: int) -> str:
    return f"lightning_perf:{signal.Signals(number).name}:{pid}"


def records_on(pid: int, number: int) -> bool:
    """Whether a process of this machine has a handler of `OnSignal` for the signal (Linux).

    That it handles the signal says little: shells handle most signals, to end in good order. A
    process with our handler therefore holds a file in memory open whose name says so. The name has
    the process's id, since a child holds the files of its parent, but not its handlers after all.

    Raises:
        OSError: There is no such process, or it is another user's.
    """
    place = PROC / str(pid)
    status = dict(
        line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line
    )
    if not int(status["SigCgt"], 16) >> (number - 1) & 1:
        return False
    # In a container, the process has another id for itself, which is the last one here.
    wanted = f"/memfd:{_marker(number, int(status.get('NSpid', str(pid)).split()[-1]))} (deleted)"
    for link in (place / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(link.readlink()) == wanted:
                return True
    return False


class _Handler:
    """A signal handler that stores the signal and calls the earlier handler.

    Others may install it again after its release: Lightning restores at the end of a run the
    handlers that it found at the start. It then only calls the earlier handler.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.released = False
        self._number = number
        self.received = False
        self._previous = _in_use(signal.getsignal(number))
        signal.signal(number, self)
        self._marker: int | None = None
        with suppress(AttributeError, OSError):  # not on Linux, or no file can be opened
            self._marker = os.memfd_create(_marker(number, os.getpid()))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        previous = _in_use(self._previous)
        if callable(previous):
            previous(number, frame)
        elif self.released and previous == signal.SIG_DFL:
            signal.signal(number, previous)
            signal.raise_signal(number)

    def take(self) -> bool:
        """Return whether the signal was received since the last call."""
        received, self.received = self.received, False
        return received

    def release(self) -> None:
        """Restore the earlier handler, unless another one was installed since."""
        self.released = True
        if self._marker is not None:
            with suppress(OSError):  # a forked child has closed all files
                os.close(self._marker)
            self._marker = None
        ours = signal.getsignal(self._number) is self
        on_main = threading.current_thread() is threading.main_thread()
        # Python cannot restore a handler that was not installed from Python.
        if ours and on_main and self._previous is not None:
            signal.signal(self._number, _in_use(self._previous))


def _in_use(handler: Any) -> Any:
    """Return the first handler of a chain that is not a released one of ours."""
    while isinstance(handler, _Handler) and handler.released:
        handler = handler._previous
    return handler


def signal_number(name: object) -> signal.Signals:
    """The signal of this name; raises `ConfigError` for those that `OnSignal` refuses."""
    every = signal.Signals.__members__  # with other names of the same, such as SIGIOT of SIGABRT
    known = {alias: number for alias, number in every.items() if number.name not in _REFUSED}
    if isinstance(name, str) and name in known:
        return known[name]
    problem = "is not the name of a signal, or one that ends training"
    raise ConfigError("signal", name, problem, f'"{USUAL}"')
