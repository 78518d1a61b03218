"""Which process is which: ids are given again, and each container has its own ones."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def lives(pid: int | None, since: float, start: float | None = None) -> bool:
    """Whether a process is alive, and was started before a point in time.

    ``start`` is what `started` returned for it, if that is known: its id may be that of a later
    process, or of another one outside of its container.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > since:
            return False
        return start is None or started(process.pid) == start
    except (psutil.Error, OSError, TypeError, ValueError, OverflowError):  # no such id
        return False


def is_alive(process: Mapping[str, Any], since: float) -> bool | None:
    """Whether a process, as `this_process` returns it, is alive; None on another machine.

    ``since`` is when it was last seen, in seconds since the epoch.
    """
    if process.get("host") != platform.node():
        return None
    return lives(process.get("pid"), since, process.get("started"))


def this_process() -> dict[str, Any]:
    """What identifies this process, as `summary.json` has it."""
    found: dict[str, Any] = {"host": platform.node(), "pid": os.getpid()}
    with suppress(OSError):  # /proc is hidden
        found["started"] = started(found["pid"])
    return found
