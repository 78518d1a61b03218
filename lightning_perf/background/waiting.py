"""Bounded waits, and their progress in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def wait_until(done: Callable[[], bool], timeout: float) -> None:
    """Poll `done`, at least once, until it is true or `timeout` seconds have passed."""
    until = time.monotonic() + timeout
    while not done() and time.monotonic() < until:
        time.sleep(0.001)


@contextmanager
def waiting(what: str, jobs: int, timeout: float) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar on a terminal, and one line elsewhere.

    Args:
        what: The work, such as ``finishing traces``.
        jobs: The number of jobs left.
        timeout: The longest wait, in seconds.

    Yields:
        A function to call with the number of jobs left when it changes; None without a bar.
    """
    from rich.console import Console
    from rich.progress import Progress

    def text(left: int) -> str:
        return f"lightning_perf: {what}: {left} left (at most {timeout:.0f} s)"

    console = Console(stderr=True)
    if not console.is_terminal:
        print(text(jobs), file=sys.stderr)  # noqa: T201
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(text(jobs), total=jobs)
        yield lambda left: bar.update(task, completed=jobs - left, description=text(left))
