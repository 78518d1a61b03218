"""``lightning-perf capture``: make a running training record its next batches."""

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
        description="Make a running training record its next batches. The training needs a "
        "profiler with the schedule OnSignal, such as PyTorch(schedule=OnSignal(lasting='5ba')), "
        "which also sets how long it records."
    )
    parser.add_argument("pid", type=int, help="The process id of the training.")
    parser.add_argument("--signal", type=str, default="SIGUSR2", help="The signal of the schedule.")
    parser.add_argument(
        "--children",
        action="store_true",
        help="Also signal its child processes, which are the other ranks with some strategies.",
    )
    return parser


def run(pid: int, signal: str, children: bool) -> int:
    """Signal the processes that handle the signal; it would end those that do not.

    Returns:
        The exit code: 1 if no process was signalled.
    """
    number = _number(signal)
    if number is None:
        return _fail(f"{signal} is not a signal. Try --signal SIGUSR2.")
    if _belongs_to_another(pid):
        return _fail(f"process {pid} belongs to another user.")
    signalled = 0
    for each in [pid, *(_descendants(pid) if children else [])]:
        handled = handles(each, number)
        if handled:
            os.kill(each, number)
            signalled += 1
            print(f"signalled process {each} to record")  # noqa: T201
        elif each == pid and not children:
            return _fail(_why_not(pid, signal, handled))
    return 0 if signalled else _fail(_why_not(pid, signal, False))


def _belongs_to_another(pid: int) -> bool:
    """Whether a process is another user's, whom root could signal, too."""
    try:
        return Path(str(_STATUS).format(pid=pid)).stat().st_uid != os.getuid()
    except OSError:  # gone, or not on Linux
        return False


def handles(pid: int, number: int) -> bool | None:
    """Whether a process handles the signal of this number; None if that cannot be read."""
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
        return f"cannot inspect process {pid}: it must run on this machine and belong to you."
    return (
        f"process {pid} does not handle {name}, which would end it. Give its Trainer a profiler "
        f"such as PyTorch(schedule=OnSignal({name!r}, lasting='5ba'))."
    )


def _fail(message: str) -> int:
    print(f"lightning-perf capture: {message}", file=sys.stderr)  # noqa: T201
    return 1
