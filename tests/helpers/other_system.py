"""A process that lacks what Linux has: Windows, as far as it can be simulated on Linux.

Python, torch and Lightning are imported first, since they are not those of Windows. ``os.name``
stays: pathlib chooses its paths by it. Only lightning_perf meets a system without ``/proc``.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from enum import IntEnum
from importlib import import_module
from typing import Any

#: Modules that Windows does not have, or for which there are no wheels.
MODULES = ("fcntl", "grp", "memray", "pwd", "resource", "termios")
_FUNCTIONS = (
    "fork", "forkpty", "geteuid", "getloadavg", "getuid", "killpg", "memfd_create", "mkfifo",
    "nice", "register_at_fork", "sched_getaffinity", "setsid",
)  # fmt: skip
_FLAGS = ("O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
#: Those of Windows; the number of SIGBREAK is that of a signal that can be handled here.
_SIGNALS = {"SIGINT": 2, "SIGILL": 4, "SIGABRT": 6, "SIGFPE": 8, "SIGSEGV": 11, "SIGTERM": 15}
_SIGBREAK = signal.SIGTTIN.value
_LINUX = ("/proc", "/sys")


def become_windows() -> None:
    """Hide what Windows does not have, from the next import of lightning_perf on."""
    for name in ("torch", "lightning.pytorch.cli", "psutil", "rich.live", "multiprocessing.util"):
        import_module(name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in [*_FUNCTIONS, *_FLAGS]:
        if hasattr(os, name):
            delattr(os, name)
    for name in [each.name for each in signal.Signals]:
        if name not in _SIGNALS and name != "SIGBREAK":
            delattr(signal, name)
    found = IntEnum("Signals", {**_SIGNALS, "SIGBREAK": _SIGBREAK})  # type: ignore[misc]
    signal.Signals = found  # type: ignore[assignment, misc]
    signal.valid_signals = lambda: set(found)  # type: ignore[assignment]
    sys.platform = "win32"
    connector = import_module("lightning.pytorch.trainer.connectors.signal_connector")
    connector._IS_WINDOWS = True  # type: ignore[attr-defined]
    os.open = _without_folders(os.open)
    pathlib.Path.exists = _exists(pathlib.Path.exists)  # type: ignore[assignment]
    sys.addaudithook(_hide_linux)


def _hide_linux(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise for a file of Linux that lightning_perf opens: psutil has other ways on Windows."""
    if event in ("open", "os.listdir", "os.scandir") and _is_linux_s(arguments[0]):
        raise FileNotFoundError(2, "there is no such file on Windows", arguments[0])


def _is_linux_s(path: object) -> bool:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(_LINUX):
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(("pathlib.py", "contextlib.py")):
        frame = frame.f_back
    return frame is not None and "/lightning_perf/" in frame.f_code.co_filename


def _exists(original: Any) -> Any:
    return lambda path: not _is_linux_s(path) and original(path)


def _without_folders(original: Any) -> Any:
    def open_file(path: Any, *args: Any, **kwargs: Any) -> int:
        if pathlib.Path(path).is_dir():
            raise PermissionError(13, "Windows opens no folders", path)
        return original(path, *args, **kwargs)

    return open_file
