"""Which process is which: ids are given again, and each container has its own ones."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_perf.files import read_bytes


def started(pid: int) -> float:
    """When a process was started: on Linux in seconds since the boot, else since the epoch.

    Nobody sets that clock, so that the number does not change. Raises `OSError` on Linux, or what
    psutil raises, if there is no such process.
    """
    if sys.platform == "linux":
        status = read_bytes(Path(f"/proc/{pid}/stat"), 4096).decode(errors="replace")
        return int(status.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    import psutil  # takes milliseconds

    return float(psutil.Process(pid).create_time())


def this_process() -> dict[str, Any]:
    """What identifies this process, as `summary.json` has it."""
    found: dict[str, Any] = {"host": platform.node(), "pid": os.getpid()}
    with suppress(OSError):  # /proc is hidden
        found["started"] = started(found["pid"])
    return found
