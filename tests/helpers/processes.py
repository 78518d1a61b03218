"""Whether processes that a test has started have ended."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil


def has_ended(folder: Path) -> bool:
    """Whether the process that wrote a file PID.pid ends; it may wait for its parent then."""
    (file,) = folder.glob("*.pid")
    end = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(file.stem))
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True
