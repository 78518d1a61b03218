"""Bounded waits at the end of a run, and what people see of the long ones."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def wait_until(done: Callable[[], bool], timeout: float) -> None:
    """Ask again and again, at least once.

    Args:
        done: Whether there is nothing to wait for.
        timeout: Seconds at most.
    """
    until = time.monotonic() + timeout
    while not done() and time.monotonic() < until:
        time.sleep(0.001)


@contextmanager
def waiting(what: str, jobs: int, timeout: float) -> Iterator[Callable[[int], None] | None]:
    """A bar on the terminal, or one line where there is none.

    Args:
        what: What is waited for, such as ``finishing traces``.
        jobs: How many are left.
        timeout: Seconds that the wait takes at most.

    Yields:
        What to call with the number of jobs left whenever that changes; None without a bar.
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
