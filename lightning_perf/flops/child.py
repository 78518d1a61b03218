"""Runs a function in a forked copy of this process, whose memory it can change without effect."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    T = TypeVar("T")

#: Seconds for the function, before the child is killed.
_PATIENCE = 60.0


def can_fork(device: torch.device) -> bool:
    """Whether this process can be forked: not with CUDA, or connections to other ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = not (torch.cuda.is_initialized() or distributed)  # type: ignore[no-untyped-call]
    return sys.platform == "linux" and device.type == "cpu" and alone


def in_child(function: Callable[[], T]) -> T:
    """The result of a function that runs in a forked child.

    The child has no files and connections of this process: what it writes or prints is lost.

    Raises:
        RuntimeError: The function raised, with its error as text, or took too long.

    Example:
        >>> changed = []
        >>> in_child(lambda: changed.append(1) or len(changed)), changed
        (1, [])
    """
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: from Python 3.12
            pid = os.fork()
        if not pid:
            _run(function, writer)
        writer.close()
        try:
            if not reader.poll(_PATIENCE):
                raise RuntimeError(f"it took longer than {_PATIENCE:.0f} s")
            done, value = reader.recv()
        except EOFError:
            raise RuntimeError("its process ended") from None
        finally:
            with suppress(OSError):  # a handler of the user has waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if not done:
        raise RuntimeError(value)
    result: T = value
    return result


def _run(function: Callable[[], Any], writer: Connection) -> None:
    """Run the function in the child, which ends here."""
    try:
        with suppress(ValueError):  # not on the main thread
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in [*Path("/proc/self/fd").iterdir()]:
            if int(file.name) != writer.fileno():
                os.dup2(nothing, int(file.name))
        torch.set_num_threads(1)  # the pool of threads is not in the child
        try:
            answer: tuple[bool, Any] = True, function()
        except Exception as error:
            answer = False, str(error).strip().partition("\n")[0] or type(error).__name__
        writer.send(answer)
    finally:
        os._exit(0)
