"""The files of a recorder: their folder, which one run owns, and their way to their targets.

A recorder writes to a spool file; all further steps run on worker threads: name -> compress ->
place -> upload -> prune.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from errno import ENOTDIR
from functools import partial
from glob import escape
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from lightning_perf.errors import describe, warn
from lightning_perf.files import NotRegularError, compress, place, read_bytes, written_whole
from lightning_perf.traces.names import (
    IN_EPOCH,
    TOTALS,
    NameFormat,
    Value,
    file_format,
    folder_format,
    numbered,
    remote_format,
    run_values,
    split_url,
    time_values,
)
from lightning_perf.traces.uploads import Sends, Target, Trace, TraceRun, UploadQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning_perf.core.progress import Ranks, Timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How the files of one recorder are named, compressed, uploaded and kept."""

    #: Format string of the folder.
    folder: str
    #: Format string of the file names.
    filename: str
    #: Format string of the names at the upload targets; None disables the upload.
    remote_file_name: str | None = None
    #: Whether to compress with gzip; appends ``.gz`` to both names, once.
    compress: bool = False
    #: Whether to replace files of the same name. Otherwise a new one gets a number.
    overwrite: bool = False
    #: How many of the latest files stay on the disk; -1 for all. Older ones are deleted once they
    #: are uploaded, never before. Without an upload at least one file stays: it is the only copy.
    num_traces_to_keep: int = -1
    #: Whether a file is left out if it was not started at the end of the run.
    optional: bool = False
    #: Whether to wait for the disk, so that a file survives a crash of the machine.
    durable: bool = True


def conflicts(
    pattern: NameFormat, values: Mapping[str, Value], folder: Path, now: Timestamp
) -> Path | None:
    """The first file, by name, of this pattern in a folder that is later than `now`, or None.

    A file is later if a total in its name is greater, or if a count within the epoch is greater
    and the epoch is the same. Both are compared as formatted in the name. A file of exactly this
    time is not a conflict: a checkpoint and a trace often fall on one batch, and a resume must
    work. A name without time variables conflicts if the file exists. Hidden files are ignored.
    ``values`` are those of all variables except time.
    """
    present = pattern.read(pattern.render({**values, **time_values(now)}), values) or {}
    for path in sorted(folder.glob("/".join(["*"] * (pattern.depth + 1)))):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            times = pattern.read(name.as_posix(), values)
            if times is not None and _is_after(times, present):
                return path
    return None


def _is_after(times: Mapping[str, float], present: Mapping[str, float]) -> bool:
    comparable: tuple[str, ...] = TOTALS
    if times.get("epoch") == present.get("epoch"):
        comparable += IN_EPOCH
    return not times or any(times[name] > present[name] for name in comparable if name in times)


#: The file with the identity of the run that owns a folder.
MARKER = ".run"


class RunFolder:
    """The folder of one recorder, which no other run uses.

    Its name contains the run's name, or, if another run of that name was first, the name with a
    part of the run's identity. The first recorder that writes marks the folder whose name contains
    the run's name. So all ranks and recorders on one file system find the same folder, concurrent
    runs find different ones, and ranks without a common file system agree on the second name.

    A folder whose pattern has no ``{run_name}`` belongs to the user: it is neither marked nor
    renamed, as if ``identity`` were None.
    """

    def __init__(
        self, root: Path, folder: str, ranks: Ranks, run_name: str, identity: str | None
    ) -> None:
        pattern = folder_format(folder)
        names = [run_name] if identity is None else [run_name, distinct_name(run_name, identity)]
        self._identity, self._names = identity or "", names
        self._folders = [Path(root, pattern.render(run_values(name, ranks))) for name in names]
        # All ranks mark the same folder: the part of rank 0's path up to the run's name.
        leader = replace(ranks, global_rank=0, local_rank=0, node_rank=0)
        leading = [Path(root, pattern.render(run_values(name, leader))) for name in names]
        shared = os.path.commonpath([*leading])
        depth = len(Path(shared).parts) + 1
        self._marked = [Path(*path.parts[:depth]) for path in leading if path != Path(shared)]
        self._claimed: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the files, or of the first file if it were written now."""
        return self._claimed or self._choose(owner_of)

    @property
    def run_name(self) -> str:
        """The run's name as it is in the folder's name."""
        return self._names[self._folders.index(self.folder)]

    def claim(self) -> Path:
        """Mark the folder as the run's and return it; later calls return the same folder."""
        if self._claimed is None:
            self._claimed = self._choose(mark)
        return self._claimed

    def _choose(self, owner: Callable[[Path, str], str]) -> Path:
        """The first folder that no other run owns, or the last one."""
        for marked, folder in zip(self._marked, self._folders, strict=False):
            if owner(marked, self._identity) == self._identity:
                return folder
        return self._folders[-1]


def owner_of(folder: Path, identity: str) -> str:
    """The identity of the run that owns a folder; our own if no run does."""
    marker = folder / MARKER
    try:
        return read_bytes(marker).decode(errors="replace")
    except OSError:  # such as a dangling link, or a file of another user
        return f"not {identity}" if os.path.lexists(marker) else identity


def mark(folder: Path, identity: str) -> str:
    """As `owner_of`, after marking a folder that no run owned."""
    make_folder(folder)
    if os.path.lexists(folder / MARKER):  # a full disk has no space for another attempt
        return owner_of(folder, identity)
    with (
        suppress(FileExistsError, NotRegularError),
        written_whole(folder / MARKER, durable=False, replaces=False) as file,
    ):
        file.write(identity.encode())
    return owner_of(folder, identity)


def distinct_name(run_name: str, identity: str) -> str:
    """The run's name with eight characters that distinguish it from other runs of that name.

    They are the first characters of an identity that is a UUID, else of its hash. A name that is
    the identity itself is returned unchanged.

    Example:
        >>> distinct_name("owl-7", "3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c")
        'owl-7-3f2a1b0c'
    """
    if identity == run_name:
        return run_name
    is_id = re.fullmatch(r"[0-9a-f]{32}", identity)
    return f"{run_name}-{(identity if is_id else sha256(identity.encode()).hexdigest())[:8]}"


def make_folder(folder: Path) -> None:
    """Create a folder; never raises `FileExistsError`, which means traces of another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder)) from error


def folder_of(run: TraceRun, folder: str) -> RunFolder:
    """The folder of a run's files, from its format string."""
    name, identity = run.run_name, run.identity
    if run.mirror is not None and identity is not None:  # the store holds runs of all machines
        name, identity = distinct_name(name, identity), None
    return RunFolder(run.root, folder, run.ranks, name, identity)


class FileNames:
    """The names of one recorder's files; those of stages other than train are in a subfolder."""

    def __init__(self, options: TraceOptions, run: TraceRun) -> None:
        gz, remote = options.compress, options.remote_file_name
        self._overwrite = options.overwrite
        self._file = file_format(options.filename, gz=gz)
        self._remote = None if remote is None else remote_format(remote, gz=gz)
        name, identity, ranks = run.run_name, run.identity, run.ranks
        distinct = name if identity is None else distinct_name(name, identity)
        # Stores hold runs of all machines; in MLflow each run has its own artifacts.
        in_store = remote is not None and bool(split_url(remote).protocol)
        self._values = run_values(name, ranks)
        self._remote_values = run_values(distinct if in_store else name, ranks)
        #: Where the files are.
        self.folder = folder_of(run, options.folder)
        self._take = partial(run.taken.take, most=run.most_remembered)

    def conflict(self, now: Timestamp, stage: str) -> Path | None:
        """A file of the stage that is later than `now`, or None."""
        values = {**self._values, "stage": stage}
        return conflicts(self._file, values, _within(self.folder.folder, stage), now)

    def reserve(
        self, timestamp: Timestamp, stage: str, raw: bool = False
    ) -> tuple[Path, str | None]:
        """The local path and the remote name of a new trace; each path is given once.

        A name that is taken gets a number, unless files may be overwritten. A `raw` file could not
        be compressed: its names have no ``.gz``.
        """
        now = {**time_values(timestamp), "stage": stage}
        folder, name = _within(self.folder.folder, stage), self._file.render(self._values | now)
        name = name.removesuffix(".gz") if raw else name
        number = 1 if self._overwrite else self._take(folder / name)
        path = folder / numbered(name, number)
        if self._remote is None:
            return path, None
        remote = PurePosixPath(self._remote.render(self._remote_values | now))
        name = remote.name.removesuffix(".gz") if raw else remote.name
        return path, str(_within(remote.parent, stage) / numbered(name, number))


_Folder = TypeVar("_Folder", bound=PurePath)


def _within(folder: _Folder, stage: str) -> _Folder:
    return folder if stage == "train" else folder / stage


# Bytes left on a full disk: less than one block of common file systems.
_FULL = 1 << 16


class TraceWriter:
    """Writes the traces of one recorder on one rank.

    A failure in the pipeline never reaches the training thread: it becomes a warning, and the
    recording stays on the disk. Each file is uploaded to all targets.
    """

    def __init__(
        self, options: TraceOptions, run: TraceRun, targets: Sequence[Target] = ()
    ) -> None:
        self._options, self._run, self._targets = options, run, tuple(targets)
        self._names = FileNames(options, run)
        self._uploads = UploadQueue(run, prunes=options.num_traces_to_keep >= 0)
        # By raw file. Single operations of a dictionary are atomic.
        self._queued: dict[Path, Trace] = {}
        self._saved: dict[Path, Trace] = {}
        self._earlier: Sequence[Trace] = ()
        keep = options.num_traces_to_keep
        self._most_saved = keep if keep >= 0 else run.most_remembered
        self._lock = threading.RLock()

    @property
    def run_name(self) -> str:
        """The run's name as it is in the folder's name: with an id if another run has the name."""
        return self._names.folder.run_name

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """The latest `num_traces_to_keep` traces (some thousands for -1), the latest last.

        Each is its timestamp and a list of paths by global rank: this rank's path, and None for
        all others. Those of earlier runs come first.
        """
        here, world_size = self._run.ranks.global_rank, self._run.ranks.world_size
        with self._lock:
            earlier = [trace for trace in self._earlier if trace.path not in self._saved]
            saved = [*earlier, *self._saved.values()]
        return [
            (trace.timestamp, [trace.path if rank == here else None for rank in range(world_size)])
            for trace in deque(saved, self._most_saved)
        ]

    @property
    def saved_in_run(self) -> list[Path]:
        """The paths of these traces, without those of earlier runs."""
        with self._lock:
            return list(self._saved)

    def follow(self, earlier: TraceWriter) -> None:
        """List the traces of the same recorder in an earlier run, too."""
        with earlier._lock:
            latest = deque([*earlier._earlier, *earlier._saved.values()], self._most_saved)
        # Without the targets, which belong to that run.
        self._earlier = [replace(trace, sends=()) for trace in latest]

    def latest(self, stage: str) -> Path | None:
        """The latest of these traces of a stage; None without one."""
        with self._lock:
            saved = reversed(self._saved.values())
            return next((trace.path for trace in saved if trace.stage == stage), None)

    def check(self, now: Mapping[str, Timestamp], resumes: bool = False) -> None:
        """Refuse a folder with traces later than `now`, unless they may be overwritten.

        Raises `FileExistsError`. The checkpoint from which a run `resumes` may be older than its
        traces, so that later traces are then only a warning.
        """
        stages = () if self._options.overwrite else now.items()
        later = (self._names.conflict(timestamp, stage) for stage, timestamp in stages)
        path = next(filter(None, later), None)
        if path is None:
            return
        if not resumes:
            raise FileExistsError(
                f"{path} was written by a run that got further than this one. Set overwrite=True "
                "to replace it, give another folder or filename, or resume that run from its "
                "checkpoint (ckpt_path)."
            )
        warn(
            f"{path} was written after the point from which this run resumes. It is kept; new "
            "traces get a number if their names are taken."
        )

    def spool(self, stage: str) -> Path:
        """A new hidden path in the folder of the traces, for a recorder to write to.

        It has the suffix of `filename`, but no ``.gz``.
        """
        folder = _within(self._names.folder.claim(), stage)
        make_folder(folder)
        # Random, so that no other user with write access to the folder can create a link of that
        # name.
        number = f"{self._run.ranks.global_rank}-{os.urandom(8).hex()}"
        suffix = re.search(r"\.\w+$", self._options.filename.removesuffix(".gz"))
        return folder / f".spool-rank{number}{suffix[0] if suffix else ''}"

    def discard(self, spooled: Path) -> None:
        """Delete what a recorder has left at a path from `spool`, where that is possible."""
        for path in _left(spooled):
            with suppress(OSError):
                path.unlink()

    def write(
        self,
        spooled: Path,
        timestamp: Timestamp,
        stage: str,
        prepare: Callable[[], None] | None = None,
        whole: bool = True,
    ) -> Path | None:
        """Submit a recording to the worker.

        If too many files wait there, an optional file is left out, and a recording is placed here,
        without compression: the training thread makes no pages.

        ``spooled``, a path from `spool`, has the recording at the latest after ``prepare``, which
        runs on the worker. ``timestamp`` is when the recording ended, for the name. One that is not
        ``whole`` was truncated by a limit. Returns where the file will be, or None if it was
        processed here and failed.
        """
        path, remote = self._names.reserve(timestamp, stage)
        sends = self._sends(path, remote)
        trace = Trace(spooled, path, timestamp, stage, sends, prepare, whole)
        self._queued[spooled] = trace
        if self._run.file_worker.submit(partial(self._process, trace), path.name):
            return path
        return self._give_up(trace, "too many files wait", compressed=False)

    def close(self) -> None:
        """Place the files that the worker has not started, and list those that were not uploaded.

        Call it after the worker was drained or closed. The worker finishes the files that it has
        started.
        """
        for trace in list(self._queued.values()):
            self._give_up(trace, "the run ended first")
        self._uploads.park(self._uploads.unsent, "the run ended first")
        gone = [path for path in self.saved_in_run if not path.exists()]
        if gone and not self._is_mirrored(gone[0]):
            why = "they were moved or deleted after they were written"
            more = f" and {len(gone) - 1} more" if gone[1:] else ""
            message = f"files of this run no longer exist, {gone[0]}{more}: {why}."
            self._run.digest.once(f"kinds of files are gone: {why}", message)

    # -- the pipeline -----------------------------------------------------------------------------

    def _process(self, trace: Trace) -> None:
        placed = self._place(trace)
        if placed is None:
            return
        if not placed.sends:
            self._send(placed)
        elif not self._run.worker.submit(partial(self._send, placed), placed.path.name):
            self._uploads.park([placed], "too many uploads wait")

    def _give_up(self, trace: Trace, why: str, compressed: bool = True) -> Path | None:
        """Leave an optional file out; place others on this thread, which waits for no server."""
        if self._options.optional:
            if self._queued.pop(trace.spooled, None) is not None:
                message = f"{trace.path} was not made: {why}. Its source is kept."
                self._run.digest.once(f"files were not made: {why}", message)
            return None
        if (placed := self._place(trace, compressed)) is None:
            return None
        self._uploads.park([placed], why)
        with self._warns(placed):
            self._prune(placed)
        return placed.path

    def _place(self, trace: Trace, compressed: bool = True) -> Trace | None:
        """Complete a recording and move it to its name; None if that failed or is already done."""
        if self._queued.pop(trace.spooled, None) is None:
            return None
        with self._warns(trace):
            if trace.prepare is not None:
                # The folder may have been deleted in the meantime.
                trace.spooled.parent.mkdir(parents=True, exist_ok=True)
                trace.prepare()
                trace = replace(trace, prepare=None)  # it may reference the recorder's memory
            if self._is_empty(trace):
                return None
            trace = self._move(trace, compressed)
            self._remember(trace)
            self._uploads.add(trace)
            return trace
        return None

    def _send(self, trace: Trace) -> None:
        with self._warns(trace):
            if self._uploads.send(trace, self._send):
                self._prune(trace)

    @contextmanager
    def _warns(self, trace: Trace) -> Iterator[None]:
        """Turn errors into a warning that says where the recording is."""
        try:
            yield
        except Exception as error:
            if self._options.optional:
                self.discard(trace.spooled)
            kept = next(filter(os.path.lexists, (*_left(trace.spooled), trace.path)), None)
            where = "no file is left" if kept is None else f"see {kept}"
            placed = self._saved.get(trace.path)
            if kept == trace.path and (placed is None or placed.spooled != trace.spooled):
                where = "the file there is the state of an earlier moment"
            message = f"{trace.path} was not finished ({describe(error)}); {where}."
            kind = f"traces were not finished; see {trace.spooled.parent}"
            self._run.digest.once(kind, message)

    # -- its steps --------------------------------------------------------------------------------

    def _is_empty(self, trace: Trace) -> bool:
        """Warn about a missing or empty recording, and about a full disk."""
        spooled = trace.spooled
        if not (spooled.exists() and spooled.stat().st_size):
            self.discard(spooled)
            message = (
                f"the recorder wrote nothing for {trace.path}: the disk may be full, or the folder "
                "was deleted."
            )
            self._run.digest.once("recordings were empty", message)
            return True
        if not trace.whole:
            message = f"{trace.path} may be truncated: a file may not be larger (ulimit -f)."
            self._run.digest.once("traces may be truncated: a file may not be larger", message)
        usage = shutil.disk_usage(spooled.parent)
        # Some recorders ignore write errors; some network disks report no sizes.
        if usage.total and usage.free < _FULL:
            message = f"the disk of {spooled.parent} is full: {trace.path.name} may be truncated."
            self._run.digest.once("traces may be truncated: the disk is full", message)
        return False

    def _move(self, trace: Trace, compressed: bool) -> Trace:
        """Move the file to its name, compressed or as it is."""
        if not self._options.compress:
            return self._put(trace, partial(place, durable=self._options.durable))
        failed = ""
        if compressed:
            try:
                return self._put(trace, compress)
            except OSError as error:  # on a full disk a rename still works
                failed = describe(error)
        trace = self._put(self._renamed(trace, raw=True), place, raw=True)
        if failed:
            message = f"{trace.path} was saved without compression ({failed})."
            self._run.digest.once("traces were saved without compression", message)
        return trace

    def _put(self, trace: Trace, move: Callable[..., None], raw: bool = False) -> Trace:
        """Move the file to its name, or to the next one if another process was first."""
        while True:
            try:
                move(trace.spooled, trace.path, replaces=self._options.overwrite)
                return trace
            except FileExistsError:
                if not os.path.lexists(trace.path):
                    raise  # a file is in the place of a folder
            trace = self._renamed(trace, raw)

    def _renamed(self, trace: Trace, raw: bool) -> Trace:
        """The trace with its next name; that of a ``raw`` file has no ``.gz``."""
        path, remote = self._names.reserve(trace.timestamp, trace.stage, raw)
        return replace(trace, path=path, sends=self._sends(path, remote))

    def _remember(self, trace: Trace) -> None:
        with self._lock:
            self._saved.pop(trace.path, None)
            self._saved[trace.path] = trace
            if len(self._saved) > self._most_saved:
                del self._saved[next(iter(self._saved))]

    def _prune(self, trace: Trace) -> None:
        keep = self._options.num_traces_to_keep
        if self._is_mirrored(trace.path):
            # A later trace of the same path may still wait for its upload.
            if trace.path not in (later.path for later in self._uploads.unsent):
                trace.path.unlink(missing_ok=True)
        elif keep >= 0:
            for path in self._uploads.expire(keep if trace.sends else max(1, keep)):
                path.unlink(missing_ok=True)

    def _sends(self, path: Path, remote: str | None) -> Sends:
        """The targets of a file, each with its name there."""
        sends = [] if remote is None else [(target, remote) for target in self._targets]
        if (mirror := self._run.mirror) is not None and self._is_mirrored(path):
            name = path.relative_to(self._run.root).as_posix()
            sends.append(mirror(name, self._options.overwrite))
        return tuple(sends)

    def _is_mirrored(self, path: Path) -> bool:
        # The user chose an absolute folder for this machine.
        return self._run.mirror is not None and path.is_relative_to(self._run.root)


def _left(spooled: Path) -> list[Path]:
    """What a recorder has written to a path, or beside it, as torch does to one with .tmp."""
    return sorted(spooled.parent.glob(f"{escape(spooled.name)}*"))
