"""Records child processes, such as data loader workers, in the windows of their parent.

The target of each new process is wrapped, for all start methods. When a window opens or closes, the
parent sends a signal to these processes; its handler starts or stops the recorder.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from weakref import WeakSet

#: Records into a file, by path and number of the child: the first ``next`` starts the recorder,
#: the second stops it.
ChildRecord = Callable[[Path, int], Generator[None, None, None]]

#: Seconds to wait for a child's file, and between two looks for it.
_PATIENCE, _INTERVAL = 5.0, 0.02
#: A process that does not handle it ignores it.
_SIGNAL = getattr(signal, "SIGURG", None)

SUPPORTED = _SIGNAL is not None


class Children:
    """Records the processes that are started from now on, numbered from 1.

    ``record`` records in a child, and must pickle if children are spawned.
    """

    def __init__(self, record: ChildRecord) -> None:
        self._record = record
        # A link to the folder of the open window.
        self._marker = Path(tempfile.mkdtemp(prefix="lightning_perf-")) / "open"
        self._folders: list[Path] = []
        self._processes: WeakSet[BaseProcess] = WeakSet()
        self._count = 0
        _patch(self)

    def open(self, path: Path) -> None:
        """Open a window: children begin to record.

        Their files are in a folder beside ``path``, the parent's recording.

        Raises:
            OSError: The folder cannot be created.
        """
        folder = path.with_name(f"{path.name}.children").absolute()
        folder.mkdir()
        self._folders.append(folder)
        self._marker.symlink_to(folder)
        self._announce()

    def shut(self) -> Files:
        """Close the window, and with it the recordings of the children."""
        self._marker.unlink(missing_ok=True)
        self._announce()
        folder = self._folders[-1]
        numbers = tuple(sorted(int(path.stem) for path in folder.glob("*.on")))
        return Files(folder, numbers, self._announce)

    def _announce(self) -> None:
        for process in list(self._processes):
            with suppress(OSError, ValueError):  # it has ended; the user has closed it
                if process.is_alive():
                    os.kill(process.pid, _SIGNAL)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Do not record processes that are started from now on."""
        _unpatch(self)

    def remove(self) -> None:
        """Remove the files that were not collected."""
        for folder in (self._marker.parent, *self._folders):
            shutil.rmtree(folder, ignore_errors=True)

    def recorder(self, process: BaseProcess) -> _Recorder:
        """What records a process that is about to start."""
        self._processes.add(process)
        self._count += 1
        return _Recorder(self._record, self._marker, self._count)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of the children of one window."""

    _folder: Path
    #: Children that recorded.
    numbers: tuple[int, ...]
    _announce: Callable[[], None] = lambda: None

    def wait(self) -> dict[int, Path]:
        """The files by number; those of killed children are missing, after some seconds."""
        until = time.monotonic() + _PATIENCE
        files = {number: self._folder / str(number) for number in self.numbers}
        while not all(path.exists() for path in files.values()) and time.monotonic() < until:
            time.sleep(_INTERVAL)
            self._announce()  # a signal just before a call that blocks does not interrupt it
        return {number: path for number, path in files.items() if path.exists()}


class _Target:
    """The target of a process, which records, too."""

    def __init__(self, target: Callable[..., Any], recorders: Sequence[_Recorder]) -> None:
        self._target, self._recorders = target, recorders
        self._turning = self._again = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert _SIGNAL is not None  # checked by the profilers, by SUPPORTED
        _active.clear()  # a forked child does not record its own children
        before = signal.signal(_SIGNAL, self._turn)
        self._turn()  # a window may be open
        try:
            return self._target(*args, **kwargs)
        finally:
            signal.signal(_SIGNAL, before)
            for each in self._recorders:
                each.stop()

    def _turn(self, *_: object) -> None:
        self._again = True
        while self._again and not self._turning:  # a signal may interrupt this
            self._turning, self._again = True, False
            for each in self._recorders:
                each.stop_if_closed()
            for each in self._recorders:
                each.start_if_open()
            self._turning = False


class _Recorder:
    """Records this process while a window of its parent is open; ignores errors of the tool."""

    def __init__(self, record: ChildRecord, marker: Path, number: int) -> None:
        self._record, self._marker, self._number = record, marker, number
        self._folder: Path | None = None
        self._running: Generator[None, None, None] | None = None

    def stop_if_closed(self) -> None:
        if self._folder is not None and self._folder != self._open_folder():
            self.stop()

    def start_if_open(self) -> None:
        folder = self._open_folder()
        if folder is None or folder == self._folder:
            return
        self._folder = folder
        with suppress(Exception):
            self._running = self._record(folder / f"{self._number}.part", self._number)
            next(self._running)
            (folder / f"{self._number}.on").touch()

    def stop(self) -> None:
        """Stop, and leave the file."""
        running, self._running, folder, self._folder = self._running, None, self._folder, None
        if running is not None and folder is not None:
            with suppress(Exception):
                next(running, None)
                (folder / f"{self._number}.part").replace(folder / str(self._number))

    def _open_folder(self) -> Path | None:
        try:
            return self._marker.readlink()
        except OSError:
            return None


_active: list[Children] = []
_plain_start: Callable[[BaseProcess], None] | None = None


def _start(process: BaseProcess) -> None:
    assert _plain_start is not None  # set before this is called
    target = getattr(process, "_target", None)
    if target is None or not _active or process._parent_pid != os.getpid():  # type: ignore[attr-defined]
        return _plain_start(process)
    recorders = [children.recorder(process) for children in _active]
    process._target = _Target(target, recorders)  # type: ignore[attr-defined]
    try:
        _plain_start(process)
    except BaseException:
        process._target = target  # type: ignore[attr-defined]
        raise


def _patch(children: Children) -> None:
    global _plain_start
    _active.append(children)
    if _plain_start is None:
        _plain_start = BaseProcess.start
        BaseProcess.start = _start  # type: ignore[method-assign, assignment]


def _unpatch(children: Children) -> None:
    global _plain_start
    if children in _active:
        _active.remove(children)
    # If another library has patched it since, ours stays below and does nothing.
    if not _active and BaseProcess.start is _start:
        BaseProcess.start, _plain_start = _plain_start, None  # type: ignore
