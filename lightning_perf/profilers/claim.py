"""One recorder a process at a time: together they corrupt each other's files, or crash."""

from __future__ import annotations

import threading

from lightning_perf.errors import RecorderBusy

_lock = threading.Lock()
_holder: object | None = None


def claim(recorder: object) -> None:
    """Take the process for one recorder.

    Args:
        recorder: Who wants it; its type names it to the next one.

    Raises:
        RecorderBusy: Another one records.
    """
    global _holder
    with _lock:
        if _holder is not None:
            wanted, holder = type(recorder).__name__, type(_holder).__name__
            raise RecorderBusy(wanted, f"another {holder}" if holder == wanted else holder)
        _holder = recorder


def holder() -> object | None:
    """Who has the process."""
    return _holder


def release(recorder: object) -> None:
    """Give it back; harmless if another one has it."""
    global _holder
    with _lock:
        if _holder is recorder:
            _holder = None
