"""Records child processes, such as data loader workers, in the windows of their parent.

The target of each new process is wrapped, for all start methods. In the child a thread checks
whether a window is open, and makes the main thread start and stop the recorder.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.background import wait_until
from lightning_perf.errors import ConfigError
from lightning_perf.profilers.base import Profiler

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Records into a file, by path and number of the child: the first ``next`` starts the recorder on
#: the main thread, the second stops it on any thread, the third cleans up on the main thread.
ChildRecord = Callable[[Path, int], Generator[None, None, None]]

#: Seconds between two checks for a window, and of the wait for a child's file.
_INTERVAL, _PATIENCE = 0.02, 5.0
#: Handled by the main thread when another thread of the process simulates it; never sent.
_SIGNAL = getattr(signal, "SIGURG", None)


class Children:
    """Records the processes that are started from now on, numbered from 1.

    ``record`` records in a child, and must pickle if children are spawned.
    """

    def __init__(self, record: ChildRecord) -> None:
        global _plain_start
        self._record = record
        # Names the folder of the open window. On a local disk, since children read it often.
        self._marker = Path(tempfile.mkdtemp(prefix="lightning_perf-")) / "open"
        self._folders: list[Path] = []
        self._count = 0
        _active.append(self)
        if _plain_start is None:
            _plain_start = BaseProcess.start
            BaseProcess.start = _start  # type: ignore[method-assign, assignment]

    def open(self, path: Path) -> Path:
        """Open a window: children begin to record within hundredths of a second.

        Returns the folder of their files, beside ``path``, the parent's recording.
        """
        folder = path.with_name(f"{path.name}.children").absolute()
        folder.mkdir()
        self._folders.append(folder)
        self._marker.with_suffix(".next").write_bytes(os.fsencode(folder))
        self._marker.with_suffix(".next").replace(self._marker)
        return folder

    def shut(self) -> Files:
        """Close the window, and with it the recordings of the children."""
        self._marker.unlink(missing_ok=True)
        folder = self._folders[-1]
        return Files(folder, tuple(sorted(int(path.stem) for path in folder.glob("*.on"))))

    def leave(self) -> None:
        """Do not record processes that are started from now on."""
        global _plain_start
        if self in _active:
            _active.remove(self)
        # If another library has patched it since, ours stays below and does nothing.
        if not _active and BaseProcess.start is _start:
            BaseProcess.start, _plain_start = _plain_start, None  # type: ignore

    def remove(self) -> None:
        """Remove files that were not collected."""
        for folder in (self._marker.parent, *self._folders):
            shutil.rmtree(folder, ignore_errors=True)

    def wrap(self, target: Callable[..., Any]) -> Callable[..., Any]:
        """The target of a process that is about to start, wrapped."""
        self._count += 1
        return partial(_run, target, self._record, self._marker, self._count)


@dataclass(frozen=True, slots=True)
class Files:
    """The files of the children of one window."""

    _folder: Path
    #: Children that recorded.
    numbers: tuple[int, ...]

    def wait(self) -> dict[int, Path]:
        """The files by number; those of killed children are missing, after some seconds."""
        files = {number: self._folder / str(number) for number in self.numbers}
        wait_until(lambda: all(path.exists() for path in files.values()), _PATIENCE)
        return {number: path for number, path in files.items() if path.exists()}


class RecordsChildren(Profiler):
    """A profiler that can record child processes, too."""

    #: The recorder of child processes, during a run that records them.
    _children: Children | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_children": None}

    @staticmethod
    def check_supported(field: str, wanted: bool) -> None:
        """Refuse an option that records child processes where the system cannot."""
        if wanted and _SIGNAL is None:
            raise ConfigError(field, wanted, "needs a system with POSIX signals", "False")

    def shut_children(self) -> Files:
        """Close the window of the child processes, if they are recorded."""
        return self._children.shut() if self._children is not None else Files(Path(), ())

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        if self._children is not None:
            self._children.leave()
            # After the writers of the children's files, some of which the last window added.
            context.on_close(self._children.remove)
            self._children = None


def _run(
    target: Callable[..., Any], record: ChildRecord, marker: Path, number: int, /, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Run the target of a process, and record it. Errors of the recorder are ignored."""
    watch = None
    with suppress(Exception):
        _active.clear()  # a forked child does not record its own children
        watch = _Watch(record, marker, number)
    try:
        return target(*args, **kwargs)
    finally:
        with suppress(Exception):
            if watch is not None:
                watch.end()


#: The recorder in use, of several profilers of the parent: only one can be active.
_recorder: _Watch | None = None


class _Watch:
    """Records this process while a window of its parent is open."""

    def __init__(self, record: ChildRecord, marker: Path, number: int) -> None:
        self._record, self._marker, self._number = record, marker, number
        self._lock = threading.RLock()
        self._window = ""  # folder of the last window that was seen
        self._running: Generator[None, None, None] | None = None
        self._stopped: Generator[None, None, None] | None = None
        self._over = threading.Event()
        assert _SIGNAL is not None  # checked by the profilers
        self._signal = _SIGNAL
        self._handler = signal.signal(self._signal, self._turn)
        self._turn()
        threading.Thread(target=self._check, name="lightning_perf", daemon=True).start()

    def end(self) -> None:
        """Stop: the process is about to end."""
        self._over.set()
        self._stop()
        signal.signal(self._signal, self._handler)

    def _check(self) -> None:
        while not self._over.wait(_INTERVAL):
            with self._lock:  # the main thread may be about to begin this window
                changed = self._read_window() != self._window
                if changed:
                    self._stop()  # on this thread, since the main thread may wait for work
            if changed:
                _thread.interrupt_main(self._signal)

    def _read_window(self) -> str:
        try:
            return os.fsdecode(self._marker.read_bytes())
        except OSError:
            return ""

    def _turn(self, *_: object) -> None:
        """Clean up after the last window and begin the present one, on the main thread."""
        global _recorder
        with suppress(Exception), self._lock:
            window = "" if self._over.is_set() else self._read_window()
            if window != self._window:
                self._stop()
            if self._stopped is not None:
                stopped, self._stopped, _recorder = self._stopped, None, None
                next(stopped, None)
            if window != self._window and _recorder is None:  # otherwise at the next check
                self._window = window
                if window:
                    self._running = self._record(self._file(".part"), self._number)
                    if next(self._running, self) is not self:  # it has yielded, so it is recording
                        _recorder = self
                        self._file(".on").touch()
        other = getattr(self._handler, "__self__", None)
        if isinstance(other, _Watch):
            other._turn()

    def _stop(self) -> None:
        """Stop, and leave the file; any thread may call it."""
        with suppress(Exception), self._lock:
            if self._running is not None:
                self._stopped, self._running = self._running, None
                next(self._stopped, None)
                self._file(".part").replace(self._file())

    def _file(self, suffix: str = "") -> Path:
        return Path(self._window) / f"{self._number}{suffix}"


_active: list[Children] = []
_plain_start: Callable[[BaseProcess], None] | None = None


def _start(process: BaseProcess) -> None:
    assert _plain_start is not None  # set before this is called
    target = getattr(process, "_target", None)
    if target is None or process._parent_pid != os.getpid():  # type: ignore[attr-defined]
        return _plain_start(process)
    for children in _active:
        process._target = children.wrap(process._target)  # type: ignore[attr-defined]
    try:
        _plain_start(process)
    except BaseException:
        process._target = target  # type: ignore[attr-defined]
        raise
