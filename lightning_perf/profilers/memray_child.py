"""Memray in a child process; apart, since a spawned one imports nothing that it does not need."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any


def record_child(
    options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record, as ``children`` asks for it.

    Args:
        options: Arguments of ``memray.Tracker``.
        path: The capture.
        number: The child's.
    """
    from memray import Tracker

    tracker = Tracker(path, **options)
    tracker.__enter__()
    yield
    tracker.__exit__(None, None, None)
