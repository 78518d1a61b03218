"""A schedule that a signal sets off: capture on demand."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import ConfigError, warn
from lightning_perf.schedule.triggers import Trigger

if TYPE_CHECKING:
    from types import FrameType

    from lightning_perf.moment import Moment
    from lightning_perf.schedule.base import Context
    from lightning_perf.time import Time

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
