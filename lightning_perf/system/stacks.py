"""Stacks of processes: of this one, of its children, and of other trainings of the same user."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.background import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

PROC = Path("/proc")
#: The name of the file in memory to which a process writes its stacks: the signals on which it
#: does, and the thread that takes them.
_FILE = re.compile(r"/memfd:lightning_perf:stacks:(\d+):(\d+):(\d+):(\d+) \(deleted\)")
#: Seconds to wait for what another process writes on each signal, and for py-spy.
_PATIENCE, _PY_SPY_PATIENCE = (0.5, 1.0, 2.0), 20.0
#: Seconds to wait for the thread that answers requests, at its start and its end.
_THREAD_PATIENCE = 2.0
#: Seconds to wait for what the main thread writes before its next line.
_MOMENT = 0.05
#: Seconds between two looks at whether py-spy is still waited for.
_POLL = 0.1
#: Seconds without a change after which what C code writes is complete.
_SETTLED = 0.05
#: What Python writes before and after the stacks.
_BEGINS, _ENDS = b"stacks:\n", b"end of stacks\n"
_COMPLETE = re.compile(_BEGINS + b"(.+?)" + _ENDS, re.DOTALL)
#: Bytes of stacks that are read at most.
_MOST_BYTES = 1 << 20
#: The file whose code starts data loader workers, and how many calls it is from their fork.
_LOADER, _CALLS = "/torch/utils/data/dataloader.py", 8
#: The kernel's number for "send the signal to one thread".
_SIGEV_THREAD_ID = 4


class Stacks:
    """Writes the stacks of this process, and of its data loader workers, when requested.

    On Linux, a thread of each of these processes takes three real-time signals that nobody uses, so
    that they interrupt no system call of other threads. The stacks go into a file in memory, whose
    name has signals and thread. Other children have no such thread: it would be the last one of a
    child that ends with the thread that has forked it, and a child may need to have only one.

    1. The thread writes the stacks once it has the GIL.
    2. The main thread does before its next line of Python: some give up the GIL so often, and for
       so short, that other threads do not get it for seconds (CPython). The kernel sends this one,
       too, if nobody calls `arm` in time.
    3. C code does, also while other C code holds the GIL. It would crash a process that runs Python
       meanwhile, and so comes last.

    Constructed on another thread than the main one, it does 1 alone. Elsewhere than on Linux, `own`
    works alone.
    """

    def __init__(self) -> None:
        #: The signals, if there are any.
        self.numbers: tuple[int, ...] = ()
        self._file, self._ends, self._written, self._start = -1, False, 0, 0
        self._thread: threading.Thread | None = None
        self._timer: _Timer | None = None
        with suppress(Exception):  # not Linux, or no signals are free
            self.numbers = first, second, third = _free_signals()
            on_main = threading.current_thread() is threading.main_thread()
            if on_main:
                # Each Trainer of Lightning, at its end, sets all signals to what Python knew of
                # them at its start: without a handler, a signal would end the process.
                signal.signal(first, _ignore)
                signal.signal(second, self._write)
                signal.signal(third, _ignore)
            self._begin().wait(_THREAD_PATIENCE)
            _OPEN.add(self)
            if on_main and self._thread is not None:
                self._timer = _Timer(second, self._thread.native_id or 0)

    def _begin(self) -> threading.Event:
        """Start the thread; returns what is set once it answers."""
        ready = threading.Event()
        thread = threading.Thread(
            target=self._answer, args=(ready,), name="lightning_perf requests", daemon=True
        )
        thread.start()
        self._thread = thread
        return ready

    def begin_in_worker(self) -> None:
        """Answer requests in a forked worker, which has one thread, and the parent's file."""
        self._timer = None
        if self._has_file():
            os.close(self._file)
            self._file = -1
            signal.signal(self.numbers[1], self._write)
            self._begin()

    def _has_file(self) -> bool:
        """Whether the file is open: a forked child may have closed it, and opened another one."""
        try:
            return self._file >= 0 and os.path.samestat(os.fstat(self._file), self._is)
        except OSError:
            return False

    def _answer(self, ready: threading.Event) -> None:
        """Write the stacks each time that another process requests them, until `close`."""
        import fcntl  # not on Windows

        sys.setprofile(None)  # as in `Worker`
        first, *others = self.numbers
        faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
        # `sigwait` takes the first one; what the user has blocked elsewhere is not for this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults - {*others})
        with suppress(OSError):  # a sandbox
            names = ":".join(map(str, (*self.numbers, threading.get_native_id())))
            self._file = os.memfd_create(f"lightning_perf:stacks:{names}")
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # also once `arm` has emptied it
            self._is = os.fstat(self._file)
            self._handle_again()
        ready.set()
        while not self._ends:
            written = self._written
            signal.sigwait({first})
            if not self._ends and self._written == written:  # the main thread has not answered
                self._write()

    def _write(self, *_: object) -> None:
        """Write the stacks while no other thread runs Python."""
        self._written += 1
        with suppress(OSError, ValueError):  # there is no file any more
            own = os.memfd_create("lightning_perf")
            try:
                faulthandler.dump_traceback(own, all_threads=True)
                text = os.pread(own, _MOST_BYTES, 0)
            finally:
                os.close(own)
            # At once, since another thread may write, too.
            os.write(self._file, _BEGINS + text + _ENDS)

    def arm(self, seconds: float) -> None:
        """Write the stacks after some seconds, unless this is called again before.

        If C code holds the GIL then, they are those of the line that has called it.
        """
        if self._file < 0:
            return
        self._handle_again()
        if os.fstat(self._file).st_size > _MOST_BYTES:
            os.ftruncate(self._file, 0)
        self._start = os.fstat(self._file).st_size
        if self._timer is not None:
            self._timer.set(seconds)

    def _handle_again(self) -> None:
        """Handle the third signal: the end of another Trainer sets its handler, see `__init__`."""
        number = self.numbers[2]
        if signal.getsignal(number) not in (_ignore, signal.SIG_DFL, None):
            return  # the user's
        faulthandler.unregister(number)
        faulthandler.register(number, file=self._file, all_threads=True)

    def late(self) -> str:
        """What was written since `arm`, such as because it was not called in time; may be empty."""
        if self._file < 0:
            return ""
        # The main thread may be about to write.
        wait_until(lambda: os.fstat(self._file).st_size > self._start, _MOMENT)
        return os.pread(self._file, _MOST_BYTES, self._start).decode(errors="replace")

    @staticmethod
    def own() -> str:
        """The stacks of all threads of this process, with their names."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read(_MOST_BYTES).decode(errors="replace")
        if sys.version_info < (3, 14):  # later versions write the names
            for thread in threading.enumerate():
                known = f"hread 0x{thread.ident or 0:016x}"
                text = text.replace(f"{known} (", f"{known} [{thread.name}] (", 1)
        return text

    def close(self) -> None:
        """Write no more stacks, and restore the handlers if this is called on the main thread.

        May be called more than once.
        """
        self._ends = True
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.close()
        if self._thread is not None:
            _send(os.getpid(), self._thread.native_id or 0, self.numbers[0])
            self._thread.join(_THREAD_PATIENCE)
            if self._thread.is_alive():  # signals may still come
                return
            self._thread = None
        if self._file >= 0:
            faulthandler.unregister(self.numbers[2])
            if self._has_file():
                os.close(self._file)
            self._file = -1
        _OPEN.discard(self)
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                if signal.getsignal(number) in (self._write, _ignore):
                    signal.signal(number, signal.SIG_DFL)
            self.numbers = ()


#: Those whose requests a data loader worker answers, too.
_OPEN = weakref.WeakSet[Stacks]()


def _after_fork() -> None:
    """In a data loader worker, the thread that has forked it is the main thread."""
    frame = sys._getframe() if _OPEN else None
    for _ in range(_CALLS):
        if frame is None or frame.f_back is None:
            return
        caller = frame.f_back.f_code.co_filename
        if frame.f_code.co_name == "start" and caller.endswith(_LOADER):
            for each in list(_OPEN):
                with suppress(Exception):  # it has ended
                    each.begin_in_worker()
            return
        frame = frame.f_back


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _free_signals() -> tuple[int, ...]:
    """Three real-time signals that nothing handles; raises where there are none."""
    handled = _handled(os.getpid(), "SigCgt", "SigIgn", "SigBlk")
    numbers = range(signal.SIGRTMAX - 4, signal.SIGRTMIN, -1)
    first, second, third, *_ = (each for each in numbers if not handled >> (each - 1) & 1)
    return first, second, third


def _ignore(*_: object) -> None:
    """Handles a signal in place of faulthandler."""


def _send(pid: int, thread: int, number: int) -> bool:
    """Send a signal to a thread of a process; returns whether it exists."""
    return not ctypes.CDLL(None).tgkill(pid, thread, number)


class _Event(ctypes.Structure):
    """The kernel's ``sigevent``."""

    _fields_ = (
        ("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int),
        ("thread", ctypes.c_int), ("reserved", ctypes.c_byte * 44),
    )  # fmt: skip


class _Timer:
    """Sends a signal to a thread of this process after some seconds; raises without such timers.

    It is the kernel's, which needs no GIL. Forked children do not have it.
    """

    def __init__(self, number: int, thread: int) -> None:
        self._libc, self._id = ctypes.CDLL(None), ctypes.c_void_p()
        event = _Event(None, number, _SIGEV_THREAD_ID, thread)
        # 1 is CLOCK_MONOTONIC.
        if self._libc.timer_create(1, ctypes.byref(event), ctypes.byref(self._id)):
            raise OSError("the kernel has no such timer")

    def set(self, seconds: float) -> None:
        """Send the signal after some seconds; this replaces the earlier time."""
        whole = int(seconds)
        once = (ctypes.c_long * 4)(0, 0, whole, int(1e9 * (seconds - whole)) or 1)
        self._libc.timer_settime(self._id, 0, once, None)

    def close(self) -> None:
        """Never send it again."""
        self._libc.timer_delete(self._id)


# -- other processes ------------------------------------------------------------------------------


def _handled(pid: int, *masks: str) -> int:
    """The signals in these masks of a process, as bits (Linux)."""
    status, bits = _status(PROC / str(pid)), 0
    for name in masks:
        bits |= int(status[name], 16)
    return bits


def _own_number(task: Path) -> int:
    """The id of a thread as itself sees it, such as in a container."""
    return int(_status(task).get("NSpid", task.name).split()[-1])


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def stacks_of(pid: int) -> str:
    """The stacks that another process writes on our signal.

    A signal would end a process without our handlers. A process has them if it has our file open,
    and the thread that the file's name has: other children of a training lack the thread.

    Raises:
        LookupError: It has no handlers of ours: it is neither a training nor one of its forked data
            loader workers, or has ended.
        TimeoutError: It wrote nothing, such as a stopped process.
    """
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if found := _FILE.fullmatch(str(link.readlink())):
                    *numbers, own = map(int, found.groups())
                    for task in (PROC / str(pid) / "task").iterdir():
                        if _own_number(task) == own:
                            return _requested(pid, int(task.name), link, numbers)
    except TimeoutError:
        raise
    except OSError:
        pass
    raise LookupError(f"process {pid} has no handlers of lightning_perf")


def _requested(pid: int, thread: int, path: Path, numbers: Sequence[int]) -> str:
    with path.open("rb", buffering=0) as file:
        start, before, since, answer = file.seek(0, os.SEEK_END), b"", 0.0, b""

        def answered(in_c: bool) -> bool:
            nonlocal start, before, since, answer
            start = min(start, os.fstat(file.fileno()).st_size)  # the process may have emptied it
            file.seek(start)
            content = file.read(2 * _MOST_BYTES)
            if content != before:
                before, since = content, time.monotonic()
            if found := _COMPLETE.search(content):
                answer = found[1]
            elif in_c and time.monotonic() > since + _SETTLED:
                answer = content
            return bool(answer)

        for number, patience in zip(numbers, _PATIENCE, strict=True):
            # The first one needs no handler; others have none in a `fit` off the main thread.
            if number != numbers[0] and not _handled(pid, "SigCgt") >> (number - 1) & 1:
                break
            if state_of(pid) == "stopped":  # it would run Python again when it gets the signal
                break
            if not _send(pid, thread, number):
                raise LookupError(f"process {pid} has ended")
            wait_until(partial(answered, number == numbers[-1]), patience)
            if answer:
                return answer[:_MOST_BYTES].decode(errors="replace")
        raise TimeoutError(f"process {pid} does not answer")


def native_stacks(pid: int, stop: threading.Event | None = None) -> str:
    """The stacks of a process with those of its C code, if py-spy is installed; otherwise empty.

    It is ended after some seconds, or once ``stop`` is set.
    """
    beside = str(Path(sys.executable).parent)
    program = shutil.which("py-spy", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if program is None:
        return ""
    command, pipe = [program, "dump", "--native", "--pid", str(pid)], subprocess.PIPE
    until = time.monotonic() + _PY_SPY_PATIENCE
    try:
        with subprocess.Popen(  # noqa: S603  no shell
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace",
            start_new_session=True,  # without a terminal for passwords
        ) as process:  # fmt: skip
            while time.monotonic() < until and not (stop and stop.is_set()):
                with suppress(subprocess.TimeoutExpired):
                    out, error = process.communicate(timeout=_POLL)
                    return out or f"py-spy failed: {error[-500:]}\n"
            process.kill()
    except OSError as failed:
        return f"py-spy failed: {failed}\n"
    return "py-spy failed: it took too long\n"


def state_of(pid: int) -> str:
    """The state of a process, such as "stopped" or "sleeping"; "gone" if there is none."""
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


class Dump(NamedTuple):
    """The stacks of another process, or why there are none."""

    pid: int
    #: As `state_of` returns it.
    state: str
    text: str


def dump_of(pid: int, native: bool = False) -> Dump:
    """The stacks of another process: what it writes itself, and what py-spy finds if ``native``."""
    state, text = state_of(pid), ""
    if state not in ("stopped", "gone", "zombie"):
        with suppress(LookupError, TimeoutError):
            text = stacks_of(pid)
        if native:
            text += native_stacks(pid)
    return Dump(pid, state, text)
