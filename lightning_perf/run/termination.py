"""Signals that act later: SIGINT, SIGTERM and others after what was recorded is named."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import handled_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SIGNALS: tuple[int, ...] = signal.SIGINT, signal.SIGTERM
#: Windows has none.
_ALARM = getattr(signal, "SIGALRM", None)
# Signals that are held back.
_came: list[int] = []


def hurried() -> bool:
    """Whether a signal waits for the end of the run, which then waits for nothing itself.

    SIGALRM is a time limit, unless its timer is periodic.
    """
    if _ALARM in _came and not signal.getitimer(signal.ITIMER_REAL)[1]:
        return True
    return any(number in _SIGNALS for number in _came)


@contextmanager
def signals_held(numbers: Iterable[int] | None = None) -> Iterator[None]:
    """Hold back signals in the block, and deliver them after it.

    By default these are SIGINT, SIGTERM, and all that have a handler of the user, which may raise.
    Otherwise Ctrl-C would raise between any two lines, and SIGTERM, which Lightning handles only
    while it trains, would end the process. Only the main thread receives signals.
    """
    handlers: dict[int, Any] = {}
    try:
        if numbers is None:
            # Ours do not raise, and may be set or removed in the block.
            others = (n for n, handler in handled_signals().items() if not _is_ours(handler))
            numbers = {*_SIGNALS, *others}
        for number in numbers if _in_main_thread() else ():
            if (handler := signal.getsignal(number)) is not None:  # made by Python
                handlers[number] = handler
                signal.signal(number, lambda number, _: _came.append(number))
        yield
    finally:
        _restore(handlers)


def _restore(handlers: dict[int, Any]) -> None:
    """Set handlers, each of which may raise if its signal came: the others are set all the same."""
    if not handlers:
        return
    number, handler = handlers.popitem()  # SIGINT is the first one: it raises last
    try:
        signal.signal(number, handler)
        if number in _came:
            _came[:] = [other for other in _came if other != number]
            signal.raise_signal(number)
    finally:
        _restore(handlers)


class Termination:
    """Calls a function before SIGTERM ends the process, if nothing else handles the signal."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    def replace(self, handlers: dict[int, Any]) -> None:
        """Take the place of the default action among handlers that are to be set."""
        if handlers.get(signal.SIGTERM) is signal.SIG_DFL:
            handlers[signal.SIGTERM] = self

    def handle(self) -> None:
        """Start."""
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: object) -> None:  # noqa: ARG002
        """Handle the signal."""
        try:
            self._end()
        finally:
            self.restore()
            signal.raise_signal(number)

    def restore(self) -> None:
        """Stop; may be called more than once."""
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_ours(handler: Any) -> bool:
    module = getattr(handler, "__module__", None)  # of its class, of an object
    return str(module).startswith("lightning_perf.")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
