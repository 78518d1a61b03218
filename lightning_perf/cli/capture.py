"""Make a running training record its next batches.

The training needs a profiler with the schedule OnSignal, such as
PyTorch(schedule=OnSignal(lasting='5ba')), which also sets how long it records.
"""

from __future__ import annotations

import os
import signal as signals
from contextlib import suppress
from pathlib import Path

from lightning_perf.cli import JSON, Failure, argument, flag, print_json

ARGUMENTS = {
    "pid": argument("The process id of the training.", type=int),
    "--signal": argument("The signal of the schedule.", default="SIGUSR2"),
    "--children": flag(
        "Also signal its child processes, which are the other ranks with some strategies."
    ),
    **JSON,
}


def run(pid: int, signal: str, children: bool, json: bool) -> int:
    """Signal the processes that handle the signal, which ends others; code 1 if there is none."""
    number = getattr(signals, signal, None)
    if not isinstance(number, signals.Signals):
        raise Failure(f"{signal} is not a signal. Try --signal SIGUSR2", 1)
    try:
        own_process(pid)
    except LookupError as error:
        raise Failure(error, 1) from None
    signalled = []
    for each in [pid, *(descendants(pid) if children else [])]:
        with suppress(OSError):  # it has ended meanwhile
            if _handles(each, number):
                os.kill(each, number)
                signalled.append(each)
    if not signalled:
        raise Failure(
            f"process {pid} does not handle {signal}, which would end it. Give its Trainer a "
            f"profiler such as PyTorch(schedule=OnSignal({signal!r}, lasting='5ba'))", 1,
        )  # fmt: skip
    if json:
        print_json({"signalled": signalled})
    else:
        print(*(f"signalled process {each} to record" for each in signalled), sep="\n")
    return 0


def _handles(pid: int, number: int) -> bool:
    """Whether a process handles the signal of this number."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def own_process(pid: int) -> int:
    """The id of a process of this user; raises `LookupError` for others."""
    import psutil

    if not Path("/proc/self/fd").exists():
        raise LookupError("processes can be inspected on Linux only")
    try:
        own = psutil.Process(pid).uids().real == os.getuid()
    except psutil.AccessDenied:
        own = False
    except (psutil.Error, OverflowError):
        raise LookupError(f"there is no process {pid} on this machine") from None
    if not own:
        raise LookupError(f"process {pid} belongs to another user")
    return pid


def descendants(pid: int) -> list[int]:
    """The ids of the processes that a process has started, and those that they have."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
