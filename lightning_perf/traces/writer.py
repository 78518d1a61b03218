"""The trace writer: name -> compress -> place -> upload -> prune.

A recorder writes to a spool file; all further steps run on worker threads.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from glob import escape
from typing import TYPE_CHECKING

from lightning_perf.errors import describe, warn
from lightning_perf.files import compress, place, read_bytes, written_whole
from lightning_perf.traces.folder import FileNames, TraceOptions
from lightning_perf.traces.uploads import Sends, Target, Trace, TraceRun, UploadQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lightning_perf.core.progress import Timestamp

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
        self._lock = threading.Lock()
        self._readme_placed = self._readme_sent = False

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
        return self._names.spool(stage)

    def discard(self, spooled: Path) -> None:
        """Delete what a recorder has left at a path from `spool`."""
        for path in _left(spooled):
            path.unlink(missing_ok=True)

    def write(
        self,
        spooled: Path,
        timestamp: Timestamp,
        stage: str,
        prepare: Callable[[], None] | None = None,
    ) -> Path | None:
        """Submit a recording to the worker.

        If too many files wait there, an optional file is left out, and a recording is placed here,
        without compression: the training thread makes no pages.

        ``spooled``, a path from `spool`, has the recording at the latest after ``prepare``, which
        runs on the worker. ``timestamp`` is when the recording ended, for the name. Returns where
        the file will be, or None if it was processed here and failed.
        """
        path, remote = self._names.reserve(timestamp, stage)
        trace = Trace(spooled, path, timestamp, stage, self._sends(path, remote), prepare)
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
            self._place_readme(trace)
            return trace
        return None

    def _send(self, trace: Trace) -> None:
        with self._warns(trace):
            if self._uploads.send(trace, self._send):
                # After the trace, so that an unreachable server costs one attempt.
                self._send_readme(trace)
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

    def _place_readme(self, trace: Trace) -> None:
        if self._options.readme is None or self._readme_placed:
            return
        path, _ = self._names.readme(trace.timestamp, trace.stage)
        with suppress(OSError):
            if not path.exists():
                with written_whole(path) as file:
                    file.write(self._options.readme.encode())
            self._readme_placed = True

    def _send_readme(self, trace: Trace) -> None:
        """Send the README to all targets, once; a failure is retried with the next trace."""
        if self._options.readme is None or self._readme_sent or not trace.sends:
            return
        path, remote = self._names.readme(trace.timestamp, trace.stage)
        with suppress(Exception):
            # A file with other content is the user's.
            if read_bytes(path) == self._options.readme.encode():
                for target, name in self._sends(path, remote, replaces=True):
                    target.send(path, name)
            self._readme_sent = True

    def _prune(self, trace: Trace) -> None:
        keep = self._options.num_traces_to_keep
        if self._is_mirrored(trace.path):
            # A later trace of the same path may still wait for its upload.
            if trace.path not in (later.path for later in self._uploads.unsent):
                trace.path.unlink(missing_ok=True)
        elif keep >= 0:
            for path in self._uploads.expire(keep if trace.sends else max(1, keep)):
                path.unlink(missing_ok=True)

    def _sends(self, path: Path, remote: str | None, replaces: bool = False) -> Sends:
        """The targets of a file, each with its name there."""
        sends = [] if remote is None else [(target, remote) for target in self._targets]
        if (mirror := self._run.mirror) is not None and self._is_mirrored(path):
            name = path.relative_to(self._run.root).as_posix()
            sends.append(mirror(name, replaces or self._options.overwrite))
        return tuple(sends)

    def _is_mirrored(self, path: Path) -> bool:
        # The user chose an absolute folder for this machine.
        return self._run.mirror is not None and path.is_relative_to(self._run.root)


def _left(spooled: Path) -> list[Path]:
    """What a recorder has written to a path, or beside it, as torch does to one with .tmp."""
    return sorted(spooled.parent.glob(f"{escape(spooled.name)}*"))
