"""The upload queue of a run: targets, retries, and the list of pending uploads."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from errno import ENOSPC
from functools import partial
from typing import TYPE_CHECKING

from lightning_perf.errors import WarningDigest, describe, warn
from lightning_perf.files import appended, check_own, parsed, read_bytes, replace_file
from lightning_perf.traces.names import TakenNames

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lightning_perf.background import Worker
    from lightning_perf.core.progress import Ranks, Timestamp


class NotHere(OSError):
    """This process can never upload to a target; another one may."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A place that files are uploaded to: an MLflow run or a store."""

    #: Uploads a file under a remote name, and raises on failure. Runs on the worker thread.
    send: Callable[[Path, str], None]
    #: The data by which a later upload finds the target, without credentials.
    address: Mapping[str, str] = field(default_factory=dict)


#: Targets, each with the name of the file there.
Sends = tuple[tuple[Target, str], ...]


#: A folder in a store that mirrors a local one: the target of a file and its name there, by its
#: name in the folder, and whether it replaces a file of that name; otherwise it gets a number.
Mirror = Callable[[str, bool], tuple[Target, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """Settings that all trace writers of a run share."""

    #: Runs uploads.
    worker: Worker
    #: Compresses and places files, so that slow uploads do not delay them.
    file_worker: Worker
    #: The parent of relative folders.
    root: Path
    ranks: Ranks
    #: May hold any characters.
    run_name: str
    #: Distinguishes runs of one name, and is the same on all ranks. With None the folder is used as
    #: it is.
    identity: str | None = None
    #: The store that mirrors `root`: files are sent there under their names below `root`, and stay
    #: on this machine only until they are uploaded.
    mirror: Mirror | None = None
    #: Collects the warnings of all writers; its creator summarizes them.
    digest: WarningDigest = field(default_factory=WarningDigest)
    #: The names that the writers of the run have given.
    taken: TakenNames = field(default_factory=TakenNames)
    #: Seconds to wait before each further upload attempt.
    backoff: Sequence[float] = (1.0, 2.0, 4.0)
    #: The maximum traces and names that a writer remembers: some megabytes.
    most_remembered: int = 4096


@dataclass(frozen=True, slots=True)
class Trace:
    """One recording in the pipeline."""

    #: The recorder's raw file, unique to this trace.
    spooled: Path
    path: Path
    timestamp: Timestamp
    stage: str
    #: The targets to which it still has to be uploaded.
    sends: Sends = ()
    #: Completes the raw file before all other steps.
    prepare: Callable[[], None] | None = None
    #: Whether it is complete: a truncated one does not displace others that are kept.
    whole: bool = True
    #: The number of failed upload attempts.
    failures: int = 0


FILE_NAME = "pending_uploads.jsonl"
_MOVED = f"{FILE_NAME}.moved-"
#: The list of one trace that is being uploaded. It is read if its process is killed.
_OPEN = f"{FILE_NAME}.open-"
#: The most bytes of a damaged line that a warning shows.
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A local file that still has to be uploaded."""

    #: Absolute, so that the upload may start from any folder.
    path: str
    #: The file's name at the target.
    remote: str
    run_name: str
    #: Why the last attempt failed.
    error: str
    #: The address of the target.
    target: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> bytes:
        """The entry as a line of a list, without its end."""
        return json.dumps(asdict(self)).encode()


def append_pending(root: Path, entry: PendingUpload) -> None:
    """Append an entry to the list in `root`; safe with several processes."""
    _append(root / FILE_NAME, entry.line)


def _append(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        with appended(path) as file:
            # A line that a full disk cut must not spoil this one.
            file.seek(max(file.tell() - 1, 0))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            # A single write, so that lines of several ranks do not mix.
            whole = start + line + b"\n"
            if file.write(whole) < len(whole):
                raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
            # `taken_pending` may have moved the list and read it before the line was there.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return


@contextmanager
def taken_pending(
    root: Path, damaged: dict[bytes, None] | None = None
) -> Iterator[dict[Hashable, PendingUpload]]:
    """Take all entries off the lists in `root`; those that are left at the end are listed again.

    Entries that other processes append meanwhile begin a new list. If this is interrupted, an entry
    may be listed twice, and none is lost. Damaged lines stay listed, with a warning, and are added
    to ``damaged``. A list that is a link or no file raises `OSError` and stays: it could name any
    file.
    """
    for path in [root / FILE_NAME, *root.glob(f"{_OPEN}*")]:
        with suppress(FileNotFoundError):
            check_own(path)
            replace_file(path, root / f"{_MOVED}{os.urandom(4).hex()}")
    lists = sorted(root.glob(f"{_MOVED}*"))  # also of interrupted calls
    for path in lists:
        check_own(path)
    left: dict[Hashable, PendingUpload] = {}
    damaged = {} if damaged is None else damaged
    for line in (line for path in lists for line in read_bytes(path).splitlines()):
        if (entry := _read(line)) is not None:
            left[entry.path, entry.remote, *sorted(entry.target.items())] = entry
        elif line.strip():
            damaged[line] = None
    if damaged:
        first = next(iter(damaged))[:_MOST_SHOWN].decode(errors="replace")
        warn(
            f"{root / FILE_NAME} has damaged lines, which are not uploaded and stay there: correct "
            f"or delete them. The first begins with {first!r}."
        )
    try:
        yield left
    finally:
        for entry in left.values():
            append_pending(root, entry)
        for line in damaged:
            _append(root / FILE_NAME, line)
        for path in lists:
            path.unlink(missing_ok=True)


def _read(line: bytes) -> PendingUpload | None:
    """The entry of a line; None if it is damaged."""
    try:
        fields = parsed(line)
        target = dict(fields.pop("target", {}))
        if {*map(type, (*fields.values(), *target, *target.values()))} != {str}:
            raise TypeError("the values of an entry are strings")
        return PendingUpload(**fields, target=target)
    except (AttributeError, TypeError, ValueError):
        return None


#: The maximum files that one warning names; the list has all of them.
_MOST_NAMED = 10


class UploadQueue:
    """The placed traces of one writer, until they are uploaded and pruned; thread-safe.

    Each one that still has to be uploaded is in a list of its own on the disk, since the process
    may be killed at any time.
    """

    def __init__(self, run: TraceRun, prunes: bool) -> None:
        self._run, self._prunes = run, prunes
        self._lock = threading.RLock()
        # Both oldest first. Traces are identified by their raw file: paths may be reused.
        self._unsent: dict[Path, Trace] = {}
        # Whether each one is whole, by its path.
        self._prunable: dict[Path, bool] = {}

    @property
    def unsent(self) -> list[Trace]:
        """The traces that wait for their upload, oldest first."""
        with self._lock:
            return list(self._unsent.values())

    def add(self, trace: Trace) -> None:
        """Add a trace whose file is in its place."""
        with self._lock:
            if self._prunes:
                self._prunable.pop(trace.path, None)
                self._prunable[trace.path] = trace.whole
            if trace.sends:
                self._unsent[trace.spooled] = trace
                with suppress(OSError):  # on a full disk the upload may still succeed
                    self._append(self._list(trace), trace, "the run was killed first")

    def _list(self, trace: Trace) -> Path:
        return self._run.root / f"{_OPEN}{trace.spooled.stem.lstrip('.')}"

    def _append(self, path: Path, trace: Trace, why: str) -> None:
        for target, remote in trace.sends:
            file, address = str(trace.path.absolute()), dict(target.address)
            entry = PendingUpload(file, remote, self._run.run_name, why, address)
            _append(path, entry.line)

    def send(self, trace: Trace, retry: Callable[[Trace], object]) -> bool:
        """Try once to upload a trace to all targets that do not have it.

        If that fails, `retry` is called later, on the worker. Returns whether all targets have it,
        and it was not listed in the meantime: a listed file stays.
        """
        left, why, final = [], "", True
        for target, remote in trace.sends:
            try:
                target.send(trace.path, remote)
            except Exception as error:
                left.append((target, remote))
                why, final = describe(error), final and isinstance(error, NotHere)
        failed = replace(trace, failures=trace.failures + 1, sends=tuple(left))
        with self._lock:
            waits = trace.spooled in self._unsent
            if waits and left:
                self._unsent[trace.spooled] = failed
            elif waits:
                del self._unsent[trace.spooled]
        if not left:
            with suppress(OSError):
                self._list(trace).unlink(missing_ok=True)
            return waits or not trace.sends
        delays = () if final else self._run.backoff[trace.failures :]
        label = f"uploading {trace.path.name}"
        if not delays or not self._run.worker.submit(partial(retry, failed), label, delays[0]):
            self.park([failed], why)
        return False

    def park(self, traces: Sequence[Trace], why: str) -> None:
        """Stop uploading traces: keep their files and list them for `lightning-perf upload`."""
        with self._lock:
            parked = [t for t in traces if self._unsent.pop(t.spooled, None) is not None]
            for trace in parked:
                self._prunable.pop(trace.path, None)
        if not parked:
            return
        root = self._run.root
        listed = advice = f"`lightning-perf upload` sends what {root / FILE_NAME} lists"
        try:
            for trace in parked:
                self._append(root / FILE_NAME, trace, why)
                self._list(trace).unlink(missing_ok=True)
        except OSError as error:
            advice = f"the list of pending uploads could not be written ({describe(error)})"
        names = ", ".join(str(trace.path) for trace in parked[:_MOST_NAMED])
        more = f" and {len(parked) - _MOST_NAMED} more" if len(parked) > _MOST_NAMED else ""
        self._run.digest.once(
            f"files were not uploaded; {listed}",
            f"not uploaded ({why}): {names}{more}; {advice}.",
            len(parked),
        )

    def expire(self, keep: int) -> list[Path]:
        """Forget and return all uploaded files but the latest `keep`, whole and truncated each."""
        with self._lock:
            waiting = {trace.path for trace in self._unsent.values()}
            expired = []
            for kind in (True, False):
                paths = [path for path, whole in self._prunable.items() if whole == kind]
                older = paths[: max(0, len(paths) - keep)]
                expired += [path for path in older if path not in waiting]
            for path in expired:
                del self._prunable[path]
            return expired
