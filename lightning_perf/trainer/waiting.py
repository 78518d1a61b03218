"""What people see while a run that is over waits for its files."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def waiting(what: str, jobs: int, timeout: float) -> Iterator[Callable[[int], None] | None]:
    """A bar on the terminal, or one line where there is none.

    Args:
        what: What is waited for.
        jobs: How many are left.
        timeout: Seconds that the wait takes at most.

    Yields:
        What to call with the number of jobs left whenever that changes; None without a bar.
    """
    from rich.console import Console
    from rich.progress import Progress

    text = f"lightning_perf: {what}; waiting up to {timeout:.0f} s"
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{text} for {jobs} of them", file=sys.stderr)  # noqa: T201
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(text, total=jobs)
        yield lambda left: bar.update(task, completed=jobs - left)
