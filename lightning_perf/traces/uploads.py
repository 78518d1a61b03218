"""The upload queue: retries, and the list of pending uploads."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.background.files import written_whole
from lightning_perf.errors import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from lightning_perf.background.worker import Worker
    from lightning_perf.core.progress import Timestamp
    from lightning_perf.errors import WarningDigest
    from lightning_perf.traces.writer import Target


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)


def split_url(name: str) -> tuple[str, str, str]:
    """Take a URL apart.

    Args:
        name: A URL, or any other name.

    Returns:
        The protocol, the host or bucket, and the path below it without slashes in front; of a name
        that is no URL, the name as it is in the third place.

    Example:
        >>> split_url("s3://bucket/traces/{run_name}.json")
        ('s3', 'bucket', 'traces/{run_name}.json')
        >>> split_url("/a/long/path")
        ('', '', '/a/long/path')
    """
    found = _URL.fullmatch(name)
    return ("", "", name) if found is None else (found[1], found[2], found[3])


def url_problem(name: str) -> str | None:
    """What is wrong with a remote name as a URL, if it is meant for one.

    Args:
        name: A format string.

    Returns:
        A clause, or None.
    """
    protocol, host, path = split_url(name)
    if not protocol:
        return "is neither a name nor the URL of a store" if "://" in name else None
    if "{" in host:
        return "has a variable in its host or bucket"
    if "::" in name or "://" in path:
        return "is a chain of URLs"
    if "?" in name:
        return "has a query, which may hold a secret: give that in fsspec's own settings"
    if protocol in ("file", "local") and host:
        return f"is not absolute: after {protocol}:// comes a third slash"
    return None


FILE_NAME = "pending_uploads.jsonl"


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A file on the disk that did not reach the server."""

    #: Absolute, so that it can be sent from anywhere on the machine.
    path: str
    #: The name that it shall have on the server.
    remote: str
    run_name: str
    #: Why the last attempt failed.
    error: str
    #: Where to: the address of its target, as the tracking address and the run's id.
    target: dict[str, str] = field(default_factory=dict)


def append_pending(root: Path, entry: PendingUpload) -> None:
    """Add an entry to the list; several processes may do so at once.

    Args:
        root: The folder of the list; it is made if need be.
        entry: What is to be sent later.

    Raises:
        OSError: If the list cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / FILE_NAME).open("ab") as file:
        # One write: lines of several ranks do not mix.
        file.write(_line(entry))


def read_pending(root: Path) -> list[PendingUpload]:
    """The entries of the list, oldest first; a line that was cut short is left out and named.

    Args:
        root: The folder of the list.

    Raises:
        OSError: If the list is there but cannot be read.
    """
    path = root / FILE_NAME
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            entries.append(PendingUpload(**json.loads(line)))
        except (ValueError, TypeError):
            warn(f"line {number} of {path} is not an entry and is left out.")
    return entries


def rewrite_pending(root: Path, entries: Iterable[PendingUpload]) -> None:
    """Replace the list as a whole; without entries it is removed.

    Args:
        root: The folder of the list.
        entries: What is still to be sent.

    Raises:
        OSError: If the list cannot be written; the old one stays.
    """
    path = root / FILE_NAME
    lines = [_line(entry) for entry in entries]
    if not lines:
        path.unlink(missing_ok=True)
        return
    with written_whole(path) as file:
        file.writelines(lines)


def _line(entry: PendingUpload) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"


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


class TraceIndex:
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


#: Files that one warning names at most; the list has them all.
_MOST_NAMED = 10


class Delivery:
    """The uploading end of a writer's pipe.

    Args:
        worker: Waits before a further attempt.
        index: Knows what is yet to be sent.
        warnings_digest: Where what did not arrive is told.
        root: Where the list of pending uploads lies.
        run_name: The run's name, for the list.
        backoff: Seconds to wait before each further attempt.
    """

    def __init__(
        self,
        worker: Worker,
        index: TraceIndex,
        warnings_digest: WarningDigest,
        root: Path,
        run_name: str,
        backoff: Sequence[float],
    ) -> None:
        self._worker, self._index, self._warnings_digest = worker, index, warnings_digest
        self._root, self._run_name, self._backoff = root, run_name, tuple(backoff)

    def upload(self, trace: Trace, again: Callable[[Trace], object]) -> Trace | None:
        """Try once to send a trace to all targets that have not got it.

        Args:
            trace: The trace; nothing is done if it is not to be sent.
            again: What to do with the trace at the next attempt, if this one fails.

        Returns:
            The trace if it needs nothing further, else None.
        """
        if not trace.sends:
            return trace
        left, why = _send(trace)
        if not left:
            self._index.settle(trace)
            return trace
        failed = replace(trace, failures=trace.failures + 1, sends=left)
        self._index.wait(failed)
        delays = self._backoff[trace.failures :]
        label = f"uploading {trace.path.name}"
        if not delays or not self._worker.submit(partial(again, failed), label, delays[0]):
            self.park([failed], why)
        return None

    def park(self, traces: Sequence[Trace], why: str) -> None:
        """List files for `lightning-perf upload`, and keep them on the disk until then.

        Args:
            traces: The traces; those that were sent, listed, or never to be sent are passed over.
            why: What kept them here.
        """
        parked = [trace for trace in traces if self._index.give_up(trace)]
        if not parked:
            return
        listed = advice = f"`lightning-perf upload` sends what {self._root / FILE_NAME} lists"
        for trace in parked:
            try:
                self._list(trace, why)
            except OSError as error:
                advice = f"they could not be listed for later, either ({describe(error)})"
        names = ", ".join(str(trace.path) for trace in parked[:_MOST_NAMED])
        more = f" and {len(parked) - _MOST_NAMED} more" if len(parked) > _MOST_NAMED else ""
        self._warnings_digest.once(
            f"files were not uploaded; {listed}",
            f"not uploaded ({why}): {names}{more}; {advice}.",
            len(parked),
        )

    def _list(self, trace: Trace, why: str) -> None:
        path = str(trace.path.absolute())
        for target, remote in trace.sends:
            entry = PendingUpload(path, remote, self._run_name, why, dict(target.address))
            append_pending(self._root, entry)


def _send(trace: Trace) -> tuple[tuple[tuple[Target, str], ...], str]:
    """Send to every target: those that did not take it, and what the last of them said."""
    left, why = [], ""
    for target, remote in trace.sends:
        try:
            target.send(trace.path, remote)
        except Exception as error:
            left.append((target, remote))
            why = describe(error)
    return tuple(left), why
