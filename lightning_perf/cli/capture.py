"""``lightning-perf capture``: have a running training record what it does now."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_STATUS = Path("/proc/{pid}/status")


def parser() -> ArgumentParser:
    """The arguments of the command."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Have a running training record its next batches. It needs a profiler with "
        "the schedule OnSignal(), such as PyTorch(schedule=OnSignal(lasting='5ba')); how long it "
        "records is set there."
    )
    parser.add_argument("pid", type=int, help="The process of the training.")
    parser.add_argument(
        "--signal", type=str, default="SIGUSR2", help="What the schedule listens to."
    )
    parser.add_argument(
        "--children",
        action="store_true",
        help="Ask the processes that it started as well: the other ranks, for some strategies.",
    )
    return parser


def run(pid: int, signal: str, children: bool) -> int:
    """Send the signal to whoever handles it: the bare signal would end a process that does not.

    Returns:
        The exit code: 1 if nobody was asked.
    """
    number = _number(signal)
    if number is None:
        return _fail(f"there is no signal {signal}. Try --signal SIGUSR2.")
    asked = 0
    for each in [pid, *(_descendants(pid) if children else [])]:
        handled = handles(each, number)
        if handled:
            os.kill(each, number)
            asked += 1
            print(f"asked process {each} to record")  # noqa: T201
        elif each == pid and not children:
            return _fail(_why_not(pid, signal, handled))
    return 0 if asked else _fail(_why_not(pid, signal, False))


def handles(pid: int, number: int) -> bool | None:
    """Whether a process has a handler for a signal; None where that cannot be told.

    Args:
        pid: The process.
        number: The signal's.
    """
    try:
        status = Path(str(_STATUS).format(pid=pid)).read_text()
    except OSError:
        return None
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _number(name: str) -> int | None:
    found = getattr(signal, name, None)
    return int(found) if isinstance(found, signal.Signals) else None


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _why_not(pid: int, name: str, handled: bool | None) -> str:
    if handled is None:
        return f"cannot see process {pid} on this machine: is it running here, and yours?"
    return (
        f"process {pid} does not listen to {name}, which would end it. Give its Trainer a profiler "
        f"such as PyTorch(schedule=OnSignal({name!r}, lasting='5ba'))."
    )


def _fail(message: str) -> int:
    print(f"lightning-perf capture: {message}", file=sys.stderr)  # noqa: T201
    return 1
