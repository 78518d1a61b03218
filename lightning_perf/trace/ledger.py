"""What has become of each trace: written by the worker, read by the training thread too."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trace.targets import Target

#: Names and saved traces that a writer remembers at most: some megabytes.
MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Trace:
    """One recording on its way through the pipe."""

    #: The recorder's raw file; each trace has its own.
    spooled: Path
    path: Path
    timestamp: Timestamp
    stage: str
    #: Where it is yet to be sent, each with its name there.
    sends: tuple[tuple[Target, str], ...] = ()
    #: Completes the raw file before anything else is done.
    prepare: Callable[[], None] | None = None
    #: How often its upload has failed.
    failures: int = 0


class Ledger:
    """The traces of one writer: queued, placed, settled; safe to use from several threads.

    What waits is bounded by the worker's queue, what was placed by `keep`, and the rest by
    `MOST_REMEMBERED`.

    Args:
        keep: How many of the latest traces `saved` remembers; -1 for as many as fit.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        # The last number that each name was given.
        self._numbers: dict[Path, int] = {}
        # Oldest first. Traces go by their raw file, files by a path that a later one may take.
        self._queued: dict[Path, Trace] = {}
        self._unsent: dict[Path, Trace] = {}
        self._placed: dict[Path, Trace] = {}
        self._saved: dict[Path, Timestamp] = {}

    def take(self, path_of: Callable[[int], Path]) -> int:
        """Take a path for a new trace: the first that neither a file nor a trace before it has.

        Of very many traces, those whose files were removed and whose names do not come again for
        long are forgotten. A name that then comes after all replaces its trace on the server.

        Args:
            path_of: The path with a number.

        Returns:
            The number, from 1.
        """
        with self._lock:
            plain = path_of(1)
            number = self._numbers.pop(plain, 0) + 1
            while (path := path_of(number)) in self._numbers or os.path.lexists(path):
                number += 1
            self._numbers[path] = 1
            self._numbers[plain] = number
            while len(self._numbers) > MOST_REMEMBERED:
                del self._numbers[next(iter(self._numbers))]
            return number

    def queue(self, trace: Trace) -> None:
        """The trace waits to be placed."""
        with self._lock:
            self._queued[trace.spooled] = trace

    def claim(self, trace: Trace) -> bool:
        """Whether the caller is to place the trace: the first one that asks is."""
        with self._lock:
            return self._queued.pop(trace.spooled, None) is not None

    def place(self, trace: Trace) -> None:
        """The trace is in its place, and waits to be sent if it is to be sent."""
        with self._lock:
            self._saved.pop(trace.path, None)
            self._saved[trace.path] = trace.timestamp
            if len(self._saved) > (self._keep if self._keep >= 0 else MOST_REMEMBERED):
                del self._saved[next(iter(self._saved))]
            if self._keep >= 0:
                self._placed.pop(trace.path, None)
                self._placed[trace.path] = trace
            if trace.sends:
                self._unsent[trace.spooled] = trace

    def wait(self, trace: Trace) -> None:
        """Some targets did not take the trace; those that did are no longer among its own."""
        with self._lock:
            if trace.spooled in self._unsent:
                self._unsent[trace.spooled] = trace

    def settle(self, trace: Trace) -> None:
        """The trace was sent."""
        with self._lock:
            self._unsent.pop(trace.spooled, None)

    def give_up(self, trace: Trace) -> bool:
        """Send the trace no more, and never delete its file; False if nothing was to be sent."""
        with self._lock:
            waited = self._unsent.pop(trace.spooled, None) is not None
            if waited:
                self._placed.pop(trace.path, None)
            return waited

    def expire(self, keep: int) -> list[Path]:
        """Give up all files but the latest and those that are yet to be sent, and return them."""
        with self._lock:
            waiting = {trace.path for trace in self._unsent.values()}
            older = list(self._placed)[: max(0, len(self._placed) - keep)]
            expired = [path for path in older if path not in waiting]
            for path in expired:
                del self._placed[path]
            return expired

    @property
    def queued(self) -> list[Trace]:
        """The traces that wait to be placed, oldest first."""
        with self._lock:
            return list(self._queued.values())

    @property
    def unsent(self) -> list[Trace]:
        """The traces that wait to be sent, oldest first."""
        with self._lock:
            return list(self._unsent.values())

    @property
    def saved(self) -> list[tuple[Path, Timestamp]]:
        """The latest traces that were placed, the latest of all at the end."""
        with self._lock:
            return list(self._saved.items())
