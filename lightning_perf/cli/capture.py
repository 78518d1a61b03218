"""``lightning-perf capture``: make a running training record its next batches."""

from __future__ import annotations

import json as json_format
import os
import signal as signals
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_perf.cli import fail


def parser() -> ArgumentParser:
    """The arguments of the command."""
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
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(pid: int, signal: str, children: bool, json: bool = False) -> int:
    """Signal the processes that handle the signal, which ends others; code 1 if there is none."""
    number = getattr(signals, signal, None)
    if not isinstance(number, signals.Signals):
        return fail("capture", f"{signal} is not a signal. Try --signal SIGUSR2.", 1)
    try:
        own_process(pid)
    except LookupError as error:
        return fail("capture", error, 1)
    signalled: list[int] = []
    for each in [pid, *(descendants(pid) if children else [])]:
        handled = handles(each, number)
        if handled:
            try:
                os.kill(each, number)
            except OSError:  # a child that ended meanwhile
                continue
            signalled.append(each)
        elif each == pid and not children:
            return fail("capture", _why_not(pid, signal, handled), 1)
    if not signalled:
        return fail("capture", _why_not(pid, signal, False), 1)
    lines = [f"signalled process {each} to record" for each in signalled]
    print(json_format.dumps({"signalled": signalled}) if json else "\n".join(lines))
    return 0


def handles(pid: int, number: int) -> bool | None:
    """Whether a process handles the signal of this number; None if that cannot be read."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def own_process(pid: int) -> int:
    """The id of a process of this user; raises `LookupError` for others."""
    import psutil

    try:
        process = psutil.Process(pid)
        own = not hasattr(os, "getuid") or process.uids().real == os.getuid()
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


def _why_not(pid: int, name: str, handled: bool | None) -> str:
    if handled is None:
        return f"cannot inspect process {pid}: it must run on this machine and belong to you."
    return (
        f"process {pid} does not handle {name}, which would end it. Give its Trainer a profiler "
        f"such as PyTorch(schedule=OnSignal({name!r}, lasting='5ba'))."
    )
