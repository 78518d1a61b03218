"""Memray at work; apart, since a spawned child imports nothing that it does not need."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_recording: Any = None


def start(tracker: Any) -> None:
    """Record.

    Args:
        tracker: A ``memray.Tracker``.

    Raises:
        RuntimeError: Another tracker records.
    """
    global _recording
    # On a thread whose stack is empty: memray notes how deep the stack is where it is entered, and
    # its readers cut as many frames off every stack of the main thread.
    with _no_collection(), ThreadPoolExecutor(1) as pool:
        pool.submit(tracker.__enter__).result()
    _recording = tracker


@contextmanager
def _no_collection() -> Iterator[None]:
    # Entering, memray walks the stacks of all threads, and makes objects as it goes. A collection
    # in between may run finalizers, which let those threads go on: memray then reads frames that
    # are gone, and the process crashes.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def stop(tracker: Any) -> None:
    """Stop, which completes the file."""
    global _recording
    _recording = None
    tracker.__exit__(None, None, None)


def record_child(
    options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as ``children`` asks for it.

    Args:
        options: Arguments of ``memray.Tracker``.
        path: The capture.
        number: The child's.
    """
    from memray import Tracker

    if _recording is not None:
        # Forked in a window: memray has cut it off from the parent's file, and waits to be told.
        stop(_recording)
    tracker = Tracker(path, **options)
    start(tracker)
    yield
    stop(tracker)
