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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.background import wait_until
from lightning_perf.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROC = Path("/proc")
#: The name of the file in memory to which a process and its forked children write their stacks:
#: the signal on which they do, and the thread of the process that takes it.
_FILE = re.compile(r"/memfd:lightning_perf:stacks:(\d+):(\d+) \(deleted\)")
#: Seconds to wait for the stacks of another process, and for those of py-spy.
_PATIENCE, _PY_SPY_PATIENCE = 2.0, 20.0
#: Seconds between two looks at whether py-spy is still waited for.
_POLL = 0.1
#: Bytes of stacks that are read at most.
_MOST_BYTES = 1 << 20
#: The kernel's number for "send the signal to one thread".
_SIGEV_THREAD_ID = 4


class Stacks:
    """Gives access to the stacks of this process, also while C code holds the GIL.

    On Linux, this process and the children that it forks write their stacks to a file in memory
    when they get a real-time signal that nobody uses. The kernel sends it, too, if the thread that
    has constructed this does not `arm` it again in time. That thread takes the signal, which
    interrupts no system call of the training. Elsewhere, `own` works alone.

    Args:
        number: The signal, as `hold_signal` returns it.
    """

    def __init__(self, number: int) -> None:
        self._number, self._file, self._start = 0, -1, 0
        self._timer: _Timer | None = None
        with suppress(Exception):  # not Linux, or no signal is free
            thread = threading.get_native_id()
            self._file = os.memfd_create(f"lightning_perf:stacks:{number}:{thread}")
            faulthandler.register(number, file=self._file, all_threads=True)
            self._number = number
            self._timer = _Timer(number, thread)

    def arm(self, seconds: float) -> None:
        """Write the stacks after some seconds, unless this is called again before."""
        if self._timer is not None:
            self._handle_again()
            self._start = os.fstat(self._file).st_size
            if self._start > _MOST_BYTES:
                os.ftruncate(self._file, 0)
                self._start = os.lseek(self._file, 0, os.SEEK_SET)
            self._timer.set(seconds)

    def _handle_again(self) -> None:
        """Another Trainer has ended meanwhile, and set the signal's handler: see `hold_signal`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._number})  # it would have no handler
        faulthandler.unregister(self._number)
        faulthandler.register(self._number, file=self._file, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._number})

    def late(self) -> str:
        """What was written because `arm` was not called in time; empty if nothing was."""
        if self._timer is None:
            return ""
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
        """Restore what the signal does; may be called more than once.

        Only the thread that takes the signal may call this: it has none pending afterwards.
        """
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.close()
        if self._number:
            faulthandler.unregister(self._number)
            self._number = 0
        if self._file >= 0:
            with suppress(OSError):  # a forked child has closed all files
                os.close(self._file)
            self._file = -1


def hold_signal() -> int:
    """Reserve a real-time signal that nothing handles, so that it ends no process; 0 without one.

    Each Trainer of Lightning, at its end, sets all signals to what Python knew of them at its
    start, and so would let one of ours end the process if Python did not know a handler.
    """
    try:
        handled = _handled(os.getpid(), "SigCgt", "SigIgn", "SigBlk")
        free = range(signal.SIGRTMAX - 4, signal.SIGRTMIN, -1)
        number = next(each for each in free if not handled >> (each - 1) & 1)
    except Exception:  # not Linux, or all are in use
        return 0
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, _ignore)
    return number


def release_signal(number: int) -> None:
    """Undo `hold_signal`."""
    on_main = threading.current_thread() is threading.main_thread()
    if number and on_main and signal.getsignal(number) is _ignore:
        signal.signal(number, signal.SIG_DFL)


def _ignore(*_: object) -> None:
    """Handles a signal in place of faulthandler."""


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
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    bits = 0
    for name in masks:
        bits |= int(status[name], 16)
    return bits


def stacks_of(pid: int) -> str:
    """The stacks that another process writes on our signal.

    The signal would end a process without our handler. A process has it if it has our file open,
    which no program that it starts inherits, and handles the signal.

    Raises:
        LookupError: It has no handler of ours: it is not a training, has ended, or was not forked.
        TimeoutError: It wrote nothing, such as a stopped process.
    """
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if found := _FILE.fullmatch(str(link.readlink())):
                    return _requested(pid, link, *map(int, found.groups()))
    except TimeoutError:
        raise
    except OSError:
        pass
    raise LookupError(f"process {pid} has no handler of lightning_perf")


def _requested(pid: int, path: Path, number: int, thread: int) -> str:
    with path.open("rb", buffering=0) as file:
        start = size = file.seek(0, os.SEEK_END)

        def written() -> bool:
            nonlocal size
            before, size = size, os.fstat(file.fileno()).st_size
            return start < size == before

        # In a forked child, or a container, the thread has no such number.
        takes = thread if (PROC / str(pid) / "task" / str(thread)).exists() else pid
        if not _handled(pid, "SigCgt") >> (number - 1) & 1:
            raise LookupError(f"process {pid} does not handle signal {number}")
        if ctypes.CDLL(None).tgkill(pid, takes, number):
            raise LookupError(f"process {pid} has ended")
        wait_until(written, _PATIENCE)
        if size == start:
            raise TimeoutError(f"process {pid} does not answer")
        file.seek(start)
        return file.read(_MOST_BYTES).decode(errors="replace")


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


# -- what they mean -------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A line of code that a thread is in."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The line, what it calls if its file can be read, and where it is."""
        code = self.function
        with suppress(OSError, IndexError):
            lines = read_bytes(Path(self.file), _MOST_BYTES).decode(errors="replace").splitlines()
            code = lines[self.line - 1].strip()[:_LONGEST] or code
        return f"`{code}`, {Path(self.file).name}:{self.line}"


#: Characters of a line of code that are shown.
_LONGEST = 80
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
#: Code of Lightning; of it and other libraries whose callers matter more; of Python itself.
_LIGHTNING = re.compile(r"/(?:lightning/pytorch|lightning/fabric|pytorch_lightning)/")
_LIBRARIES = re.compile(
    r"/(?:lightning/pytorch|lightning/fabric|pytorch_lightning|lightning_fabric|lightning_perf"
    r"|torch|torchmetrics)/"
    r"|/lib/python3\.\d+/(?!(?:site|dist)-packages/)|^<"
)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_WORKER, _WORKER_FILE = "_worker_loop", "/torch/utils/data/_utils/worker.py"
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd.py")
#: Files of torch that are on the stack while it compiles, and not while compiled code runs.
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")


def threads_in(text: str) -> Iterator[tuple[int, list[Frame]]]:
    r"""The threads in a text of stacks, each with its frames, the innermost first.

    The main thread is the last one.

    Example:
        >>> text = 'Thread 0x00ff (most recent call first):\n  File "a.py", line 3 in wait\n'
        >>> list(threads_in(text))
        [(255, [Frame(file='a.py', line=3, function='wait')])]
    """
    number, frames = None, list[Frame]()
    for line in text.splitlines():
        if head := _THREAD.fullmatch(line):
            if number is not None:
                yield number, frames
            number, frames = int(head[1], 16), []
        elif found := _FRAME.fullmatch(line):
            frames.append(Frame(found[1], int(found[2]), found[3]))
    if number is not None:
        yield number, frames


def main_thread(text: str) -> list[Frame]:
    """The frames of the main thread in a text of stacks; empty without one."""
    threads = [frames for _, frames in threads_in(text)]
    return threads[-1] if threads else []


def is_worker(frames: Sequence[Frame]) -> bool:
    """Whether a main thread is that of a data loader worker."""
    return any(each.function == _WORKER and each.file.endswith(_WORKER_FILE) for each in frames)


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code, or of another package that it calls.

    None if there is none between Lightning, or the loop of a data loader worker, and the libraries
    that are skipped: such a worker waits for work.
    """
    ends = [
        number
        for number, each in enumerate(frames)
        if _LIGHTNING.search(each.file) or each.function == _WORKER
    ]
    if is_worker(frames):  # a forked one has the frames of its parent behind its own
        ends = [next(n for n, each in enumerate(frames) if each.function == _WORKER)]
    within = frames[: ends[-1]] if ends else frames
    others = [each for each in within if not _LIBRARIES.search(each.file)]
    own = [each for each in others if not _INSTALLED.search(each.file)]
    return next(iter(own or others), None)


def collective_in(frames: Sequence[Frame]) -> str:
    """The function in which a thread waits for other ranks, of torch or our own; empty if none."""
    for each in frames:
        own = each.function == "finish" and each.file.endswith("/lightning_perf/run/collective.py")
        if own or each.file.endswith("/distributed_c10d.py"):
            return "the last metrics of all ranks" if own else each.function
    return ""


def is_debugged(frames: Sequence[Frame]) -> bool:
    """Whether a debugger of Python has stopped the thread."""
    return any(each.file.endswith(_DEBUGGERS) for each in frames)


def compiles(frames: Sequence[Frame]) -> bool:
    """Whether the thread compiles code of torch."""
    return any(each.file.endswith(_COMPILERS) for each in frames)
