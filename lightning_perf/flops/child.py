"""Runs a function in a forked copy of this process, whose memory it can change without effect."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning_perf.errors import handled_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

    T = TypeVar("T")

#: Seconds that the child may sleep, and seconds between two looks at it.
_MOST_ASLEEP, _LOOK = 2.0, 0.1
#: The request to Linux's ``prctl`` for a signal when the parent ends.
_PR_SET_PDEATHSIG = 1


def can_fork(device: torch.device) -> bool:
    """Whether this process can be forked: not with CUDA, or connections to other ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = not (torch.cuda.is_initialized() or distributed)  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and device.type == "cpu" and alone


def in_child(function: Callable[[], T], seconds: float = 5.0) -> T:
    """The result of a function that runs in a forked child, for some seconds of CPU time at most.

    The child has no files, connections and signal handlers of this process: what it writes or
    prints is lost. It has no other threads, either: if it waits for one, it is ended soon.

    Raises:
        RuntimeError: The function raised, with its error as text, or took too long.

    Example:
        >>> changed = []
        >>> in_child(lambda: changed.append(1) or len(changed)), changed
        (1, [])
    """
    reader, writer = Pipe(duplex=False)
    handled, mask, pid = handled_signals(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), 0
    with reader, writer:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads: from Python 3.12
                try:
                    # The handlers that the child inherits must not run there.
                    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
                    pid = os.fork()
                    if not pid:
                        _run(function, writer, handled)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            writer.close()
            _wait(reader, pid, seconds)
            done, value = reader.recv()
        except EOFError:
            raise RuntimeError("its process ended") from None
        finally:
            with suppress(OSError):  # a handler of the user has waited for it
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
    if not done:
        raise RuntimeError(value)
    result: T = value
    return result


def _wait(reader: Connection, pid: int, seconds: float) -> None:
    """Wait until a child has answered or ended; RuntimeError if it sleeps or computes too long."""
    asleep, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    while not reader.poll(_LOOK):
        threads: list[list[str]] = []
        with suppress(OSError):  # one ended
            stats = Path(f"/proc/{pid}/task").glob("*/stat")
            threads = [each.read_text().rpartition(")")[2].split() for each in stats]
        if not any(state in ("R", "D") for state, *_ in threads):  # runs, or waits for a disk
            asleep += _LOOK
        used = sum(int(number) for numbers in threads for number in numbers[11:13]) / ticks
        if asleep > _MOST_ASLEEP:
            raise RuntimeError("it waits, and a forked process has no other threads")
        if used > seconds:
            raise RuntimeError(f"it took more than {seconds:.0f} s of CPU time")


def _run(function: Callable[[], Any], writer: Connection, handled: Iterable[int]) -> None:
    """Run the function in the child, which ends here."""
    try:
        signal.set_wakeup_fd(-1)
        for number in handled:
            # Not ignored: programs that it starts would inherit this.
            signal.signal(number, lambda *_: None)
        # It ends with its parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in [*Path("/proc/self/fd").iterdir()]:
            if int(file.name) != writer.fileno():
                os.dup2(nothing, int(file.name))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        torch.set_num_threads(1)  # the pool of threads is not in the child
        try:
            answer: tuple[bool, Any] = True, function()
        except Exception as error:
            answer = False, str(error).strip().partition("\n")[0] or type(error).__name__
        writer.send(answer)
    finally:
        os._exit(0)
