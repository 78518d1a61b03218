"""What the stacks of a process, as faulthandler writes them, say about a training."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Bytes of a file of code that are read at most, and characters of a line that are shown.
_MOST_BYTES, _LONGEST = 1 << 20, 80
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
