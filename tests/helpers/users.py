"""Processes of other users."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65534


@contextmanager
def process_of_another_user() -> Iterator[int]:
    """The id of a process that does not belong to this user: the first one, or one of nobody."""
    if os.getuid():
        yield 1
        return
    process = subprocess.Popen(["sleep", "60"], user=NOBODY)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
