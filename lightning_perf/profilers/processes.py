"""Child processes that record when their parent does: data loader workers above all.

What runs in a child is wrapped where the child is started, whatever its start method. There a
thread looks whether a window is open, and has the child's main thread record meanwhile.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: Starts to record into a file; is resumed to stop, on any thread, and again on the main thread.
ChildRecord = Callable[[Path, int], Generator[None, None, None]]

#: Seconds between a child's looks at the window, and that its file is waited for.
_LOOK, _PATIENCE = 0.02, 5.0
#: Never sent: it is how a thread asks the main one of its process to call something.
_SIGNAL = getattr(signal, "SIGURG", None)

SUPPORTED = _SIGNAL is not None


class Children:
    """The processes that are started from now on, numbered from 1.

    Args:
        record: Records in a child; it has to pickle, where children are spawned.
    """

    def __init__(self, record: ChildRecord) -> None:
        self._record = record
        # It holds one short text. A disk of this machine, since children look at it all the time.
        self._marker = Path(tempfile.mkdtemp(prefix="lightning_perf-")) / "open"
        self._folders: list[Path] = []
        self._count = 0
        _follow(self)

    def open(self, path: Path) -> None:
        """A window opens: children begin to record within hundredths of a second.

        Args:
            path: Where the parent records. Beside it is a folder of theirs, removed in the end.

        Raises:
            OSError: It cannot be made.
        """
        folder = path.with_name(f"{path.name}.children").absolute()
        folder.mkdir()
        self._folders.append(folder)
        self._marker.with_suffix(".next").write_text(str(folder), encoding="utf-8")
        self._marker.with_suffix(".next").replace(self._marker)

    def shut(self) -> Files:
        """The window ends, and so do the children's recordings."""
        self._marker.unlink(missing_ok=True)
        folder = self._folders[-1]
        return Files(folder, tuple(sorted(int(path.stem) for path in folder.glob("*.on"))))

    def leave(self) -> None:
        """Let processes start as they did."""
        _unfollow(self)

    def remove(self) -> None:
        """Forget the files that were not collected."""
        for folder in (self._marker.parent, *self._folders):
            shutil.rmtree(folder, ignore_errors=True)

    def wrap(self, target: Callable[..., Any]) -> Callable[..., Any]:
        """What a process that is about to start shall run in place of its target."""
        self._count += 1
        return _Followed(target, self._record, self._marker, self._count)


@dataclass(frozen=True, slots=True)
class Files:
    """What the children leave of one window."""

    _folder: Path
    #: The children that recorded.
    numbers: tuple[int, ...]

    def wait(self) -> dict[int, Path]:
        """The files by number, without those of children that were killed, after some seconds."""
        until = time.monotonic() + _PATIENCE
        files = {number: self._folder / str(number) for number in self.numbers}
        while not all(path.exists() for path in files.values()) and time.monotonic() < until:
            time.sleep(_LOOK)
        return {number: path for number, path in files.items() if path.exists()}


class _Followed:
    """A process's target that records, too. Whatever fails of ours, the target runs."""

    def __init__(
        self, target: Callable[..., Any], record: ChildRecord, marker: Path, number: int
    ) -> None:
        self.target, self.record, self.marker, self.number = target, record, marker, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch = None
        with suppress(Exception):
            _following.clear()  # a forked child's own children are not followed
            watch = _Watch(self.record, self.marker, self.number)
        try:
            return self.target(*args, **kwargs)
        finally:
            with suppress(Exception):
                if watch is not None:
                    watch.end()


#: Whose recording this process makes: two at a time would spoil each other's.
_recorder: _Watch | None = None


class _Watch:
    """Records in this process while its parent's window is open."""

    def __init__(self, record: ChildRecord, marker: Path, number: int) -> None:
        self._record, self._marker, self._number = record, marker, number
        self._lock = threading.RLock()
        #: The folder of the window that was last seen, or nothing.
        self._window = ""
        self._running: Generator[None, None, None] | None = None
        self._stopped: Generator[None, None, None] | None = None
        self._over = threading.Event()
        assert _SIGNAL is not None  # or nothing would be followed
        self._signal = _SIGNAL
        self._handler = signal.signal(self._signal, self._turn)
        self._turn()
        threading.Thread(target=self._look, name="lightning_perf", daemon=True).start()

    def end(self) -> None:
        """The process is about to end."""
        self._over.set()
        self._stop()
        signal.signal(self._signal, self._handler)

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            if self._asked() != self._window:
                self._stop()  # here, since the main thread may wait for work
                _thread.interrupt_main(self._signal)

    def _asked(self) -> str:
        try:
            return self._marker.read_text(encoding="utf-8")
        except OSError:
            return ""

    def _turn(self, *_: object) -> None:
        """Let go of the last window and begin the present one; on the main thread."""
        with suppress(Exception), self._lock:
            asked = "" if self._over.is_set() else self._asked()
            if asked != self._window:
                self._stop()
            if self._stopped is not None:
                self._let_go(self._stopped)
            if asked != self._window and _recorder is None:  # or else at the next look
                self._window = asked
                if asked:
                    self._begin()
        other = getattr(self._handler, "__self__", None)
        if isinstance(other, _Watch):
            other._turn()

    def _begin(self) -> None:
        global _recorder
        self._running = self._record(self._file(".part"), self._number)
        if next(self._running, self) is not self:  # it yielded: it records
            _recorder = self
            self._file(".on").touch()

    def _let_go(self, stopped: Generator[None, None, None]) -> None:
        global _recorder
        self._stopped = _recorder = None
        next(stopped, None)

    def _stop(self) -> None:
        """Stop, and leave the file; on any thread."""
        with suppress(Exception), self._lock:
            if self._running is not None:
                self._stopped, self._running = self._running, None
                next(self._stopped, None)
                self._file(".part").replace(self._file())

    def _file(self, suffix: str = "") -> Path:
        return Path(self._window) / f"{self._number}{suffix}"


# -- where processes start ------------------------------------------------------------------------

_following: list[Children] = []
_plain_start: Callable[[BaseProcess], None] | None = None


def _start(process: BaseProcess) -> None:
    assert _plain_start is not None  # set before this is called
    target = getattr(process, "_target", None)
    if target is None or process._parent_pid != os.getpid():  # type: ignore[attr-defined]
        return _plain_start(process)
    for children in _following:
        process._target = children.wrap(process._target)  # type: ignore[attr-defined]
    try:
        _plain_start(process)
    except BaseException:
        process._target = target  # type: ignore[attr-defined]
        raise


def _follow(children: Children) -> None:
    global _plain_start
    _following.append(children)
    if _plain_start is None:
        _plain_start = BaseProcess.start
        BaseProcess.start = _start  # type: ignore[method-assign, assignment]


def _unfollow(children: Children) -> None:
    global _plain_start
    if children in _following:
        _following.remove(children)
    # Where somebody else has replaced it since, ours stays below, and does nothing of its own.
    if not _following and BaseProcess.start is _start:
        BaseProcess.start, _plain_start = _plain_start, None  # type: ignore
