"""Prints to the terminal, with escapes for control characters: names may be those of strangers."""

from __future__ import annotations

import select
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from lightning_perf.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def say(*lines: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Print lines to stdout or another file."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    print(*(_shown(str(line), encoding) for line in lines), sep="\n", file=file, flush=flush)


def _shown(text: str, encoding: str) -> str:
    """The text with escapes for controls, and for what the output cannot encode."""
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def unread(file: TextIO) -> bool:
    """Whether it is a pipe whose reader has ended, such as head.

    Text for it would stay in its buffer, and change the exit code of Python.
    """
    with suppress(AttributeError, OSError, ValueError):  # no descriptor, or no polls: Windows
        poll = select.poll()
        poll.register(file.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def new_console(*, soft_wrap: bool = False, stderr: bool = False) -> Console:
    """A console for names given by users, which may look like markup or have control characters.

    With ``soft_wrap``, lines are not wrapped: paths are meant to be copied.
    """
    return _kind()(
        soft_wrap=soft_wrap, stderr=stderr, markup=False, emoji=False, highlight=False
    )  # fmt: skip


@contextmanager
def waiting(
    what: str, jobs: int, timeout: float, *, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for ``jobs`` on a terminal, one line elsewhere, nothing if not ``shown``.

    Yields a function to call with the number of jobs left.
    """
    from rich.progress import Progress

    console = new_console(stderr=True)
    text = f"lightning_perf: {what}: {jobs} left (at most {timeout:.0f} s)"
    if shown and console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(text, total=jobs)
            yield lambda left: bar.update(task, completed=jobs - left)
        return
    if shown:
        with suppress(OSError):  # its reader has ended
            say(text, file=sys.stderr)
    yield lambda _: None


def _kind() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class EscapingConsole(Console):
        """A console that sends no controls but rich's own."""

        def on_broken_pipe(self) -> NoReturn:
            """Raise the BrokenPipeError, where rich would end the process and replace stdout."""
            raise

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            # Before it is wrapped: what is shown instead is wider.
            if isinstance(renderable, Text):
                plain = _shown(renderable.plain, self.encoding)
                if renderable.plain != plain:
                    renderable = Text(plain, renderable.style)
            for part in super().render(renderable, options):
                text = part.text if part.control else _shown(part.text, self.encoding)
                yield part if text == part.text else Segment(text, part.style)

    return EscapingConsole
