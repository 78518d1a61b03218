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


@dataclass(frozen=True, slots=True)
class Trace:
    """One recording on its way through the pipe."""

    #: The recorder's raw file; each trace has its own.
    spooled: Path
    path: Path
    #: The name to upload it by, or None to leave it here.
    remote: str | None
    timestamp: Timestamp
    #: Completes the raw file before anything else is done.
    prepare: Callable[[], None] | None = None
    #: How often its upload has failed.
    failures: int = 0


class Ledger:
    """The traces of one writer: queued, placed, settled; safe to use from several threads.

    Args:
        keep: How many of the latest traces `saved` remembers; -1 for all.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._names: set[Path] = set()
        # Oldest first. Traces go by their raw file, files by a path that a later one may take.
        self._queued: dict[Path, Trace] = {}
        self._unsent: dict[Path, Trace] = {}
        self._placed: dict[Path, Trace] = {}
        self._saved: dict[Path, Trace] = {}

    def reserve(self, path: Path) -> bool:
        """Take a path for a new trace; False if a file or an earlier trace has it."""
        with self._lock:
            taken = path in self._names or os.path.lexists(path)
            self._names.add(path)
            return not taken

    def queue(self, trace: Trace) -> None:
        """The trace waits to be placed."""
        with self._lock:
            self._queued[trace.spooled] = trace

    def claim(self, trace: Trace) -> bool:
        """Whether the caller is to place the trace: the first one that asks is."""
        with self._lock:
            return self._queued.pop(trace.spooled, None) is not None

    def place(self, trace: Trace) -> None:
        """The trace is in its place, and waits to be sent if it has a remote name."""
        with self._lock:
            for files in (self._placed, self._saved):
                files.pop(trace.path, None)
                files[trace.path] = trace
            if 0 <= self._keep < len(self._saved):
                del self._saved[next(iter(self._saved))]
            if trace.remote is not None:
                self._unsent[trace.spooled] = trace

    def settle(self, trace: Trace) -> bool:
        """The trace was sent or given up; False if there was nothing to send any more."""
        with self._lock:
            return self._unsent.pop(trace.spooled, None) is not None

    def stay(self, trace: Trace) -> None:
        """The trace's file is never to be deleted."""
        with self._lock:
            self._placed.pop(trace.path, None)

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
    def saved(self) -> list[Trace]:
        """The latest traces that were placed, the latest of all at the end."""
        with self._lock:
            return list(self._saved.values())
