"""The pipe that carries what was recorded to where people look.

Record into a spool -> compress or place -> upload -> prune: all but the first on the worker.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.background.files import compress, place
from lightning_perf.errors import ConfigError, WarningDigest, describe, warn
from lightning_perf.traces.folder import Layout
from lightning_perf.traces.names import file_format, folder_format, remote_format
from lightning_perf.traces.readme import Readme
from lightning_perf.traces.uploads import Delivery, Trace, TraceIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_perf.background.worker import Worker
    from lightning_perf.core.progress import Ranks, Timestamp

    Sends = tuple[tuple["Target", str], ...]

    Step = Callable[[Trace], Trace | None]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One place that files are sent to: a run in MLflow, or a store."""

    #: Sends a file by a remote name, and raises if it cannot. For the worker thread.
    send: Callable[[Path, str], None]
    #: What a later upload needs to know of the place, without user names and passwords.
    address: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A folder of a store that is to hold what a local folder holds, under the same names."""

    #: Gives a file a number where its name is taken.
    adding: Target
    #: Replaces a file whose name is taken.
    replacing: Target
    #: The folder, below the host or bucket.
    folder: str


# Bytes that are left on a disk which is full: less than the least that it gives out.
_FULL = 1 << 16


class Placer:
    """Names traces, and brings them there.

    Args:
        layout: What they may be called.
        index: Which names are taken.
        warnings_digest: Where trouble is told.
        packs: Whether they are compressed.
        overwrite: Whether names that are taken are taken all the same.
        sends: Where a file goes, by its path and its remote name.
    """

    def __init__(
        self,
        layout: Layout,
        index: TraceIndex,
        warnings_digest: WarningDigest,
        packs: bool,
        overwrite: bool,
        sends: Callable[[Path, str | None], Sends],
    ) -> None:
        self._layout, self._index, self._warnings_digest = layout, index, warnings_digest
        self._packs, self._overwrite, self._sends = packs, overwrite, sends

    def names(self, timestamp: Timestamp, stage: str, raw: bool = False) -> tuple[Path, str | None]:
        """Where a new trace goes, as `Layout.names`."""
        names = partial(self._layout.names, timestamp, stage, raw=raw)
        number = 1 if self._overwrite else self._index.take(lambda n: names(number=n)[0])
        return names(number=number)

    def prepare(self, trace: Trace) -> Trace:
        """Complete the raw file."""
        if trace.prepare is not None:
            # The folder may have been removed since the recorder began.
            trace.spooled.parent.mkdir(parents=True, exist_ok=True)
            trace.prepare()
        return replace(trace, prepare=None)  # which may hold the recorder and its memory

    def inspect(self, trace: Trace) -> Trace | None:
        """Pass over a file that holds nothing; on a full disk, doubt it."""
        if not (trace.spooled.exists() and trace.spooled.stat().st_size):
            trace.spooled.unlink(missing_ok=True)
            message = (
                f"the recorder left nothing for {trace.path}: is the disk full, or was the folder "
                "removed?"
            )
            self._warnings_digest.once("recordings were empty", message)
            return None
        folder = trace.spooled.parent
        usage = shutil.disk_usage(folder)
        # Some recorders do not notice; and some network disks tell no sizes at all.
        if usage.total and usage.free < _FULL:
            message = f"the disk of {folder} is full: {trace.path.name} may be cut short."
            self._warnings_digest.once("traces may be cut short: the disk is full", message)
        return trace

    def place(self, trace: Trace) -> Trace:
        """Move the file to its name, compressed or as it is."""
        try:
            (compress if self._packs else place)(trace.spooled, trace.path)
        except OSError as error:
            if not self._packs:
                raise
            return self._place_raw(trace, error)
        self._index.place(trace)
        return trace

    def _place_raw(self, trace: Trace, error: OSError) -> Trace:
        """What cannot be compressed, as on a disk that is full, need not be: a rename is free."""
        path, remote = self.names(trace.timestamp, trace.stage, raw=True)
        raw = replace(trace, path=path, sends=self._sends(path, remote))
        place(raw.spooled, raw.path)
        self._index.place(raw)
        message = f"{raw.path} was not compressed ({describe(error)}), and stays as it is."
        self._warnings_digest.once("traces were not compressed", message)
        return raw


class TraceWriter:
    """Writes the traces of one recorder on one rank.

    Nothing that fails in the pipe reaches the training thread; it becomes a warning, and what was
    recorded stays on the disk. A trace whose name is taken gets a number (``rank0-2.5.json``)
    unless `overwrite` is set.

    Args:
        worker: Sends what is placed, and what else takes a network; it may be shared.
        root: What `folder` lies under, unless that is absolute.
        folder: Format string of the folder.
        filename: Format string of the file names.
        remote_file_name: Format string of the names to upload by, or None to upload nothing.
        ranks: Where this process stands.
        run_name: The run's name, of any characters.
        compress: Whether to compress with gzip; then ``.gz`` is appended to both names, once.
        identity: What tells the run from others of its name, the same on all ranks, so that they
            share no folder: see `Home`. None to take the folder as it is.
        overwrite: Whether traces of an earlier run may be replaced.
        num_traces_to_keep: How many of the latest files of this writer stay on the disk; -1 for
            all. Older ones are deleted once they are uploaded, and never when that failed.
            Where nothing is uploaded, one file stays even for 0: it is the only copy.
        targets: Where files are sent to, each of them to all.
        readme: What a ``README.md`` beside the traces says, here and where they are sent to; None
            for none. A file of that name that is there already stays.
        backoff: Seconds to wait before each further attempt to upload.
        file_worker: Makes files, so that uploads never hold that up; by default `worker` does both.
        warnings_digest: Collects warnings where several writers share one; its owner summarizes
            them.
        optional: Whether the files are made of others that are kept, so that what is not begun at
            the end of a run is left out.
        mirror: The store whose folder `root` stands for: files are sent there under the names that
            they have below `root`, and stay here only until they have arrived everywhere.

    Raises:
        ConfigError: If a format string or `num_traces_to_keep` cannot work.
    """

    def __init__(
        self,
        worker: Worker,
        root: Path,
        folder: str,
        filename: str,
        remote_file_name: str | None,
        ranks: Ranks,
        run_name: str,
        compress: bool,
        identity: str | None = None,
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
        targets: Sequence[Target] = (),
        readme: str | None = None,
        backoff: Sequence[float] = (1.0, 2.0, 4.0),
        file_worker: Worker | None = None,
        warnings_digest: WarningDigest | None = None,
        optional: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        check_names(folder, filename, remote_file_name, num_traces_to_keep)
        self._layout = Layout(
            root,
            folder,
            filename,
            remote_file_name,
            ranks,
            run_name,
            identity,
            compress,
            mirror is not None,
        )
        self._root, self._mirror = Path(root), mirror
        self._worker, self._ranks, self._overwrite = worker, ranks, overwrite
        self._keep, self._targets = num_traces_to_keep, tuple(targets)
        self._file_worker, self._optional = file_worker or worker, optional
        self._index, self._warnings_digest = (
            TraceIndex(self._keep),
            warnings_digest or WarningDigest(),
        )
        self._shares_complaints = warnings_digest is not None
        placer = self._placer = Placer(
            self._layout, self._index, self._warnings_digest, compress, overwrite, self._sends
        )
        self._delivery = Delivery(
            worker, self._index, self._warnings_digest, Path(root), run_name, backoff
        )
        self._readme = None if readme is None else Readme(readme)
        self._recording: tuple[Step, ...] = (
            placer.prepare,
            placer.inspect,
            placer.place,
            self._explain,
        )
        self._sending: tuple[Step, ...] = (self._upload, self._send_readme, self._prune)

    @property
    def run_name(self) -> str:
        """The run's name as its folder bears it: with an id where another run has the name."""
        return self._layout.run_name

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """The latest `num_traces_to_keep` traces, or some thousands for -1, the latest last.

        Each is its timestamp and the paths by global rank: this rank's own, and None for others.
        """
        here = self._ranks.global_rank
        return [
            (timestamp, [path if rank == here else None for rank in range(self._ranks.world_size)])
            for path, timestamp in self._index.saved
        ]

    def check(self, now: Mapping[str, Timestamp], resumes: bool = False) -> None:
        """Refuse a folder that holds later traces than the present moment, unless overwriting.

        Args:
            now: Where each stage stands that may be recorded.
            resumes: Whether the run continues an earlier one, from a checkpoint that may be older
                than its traces: then one warning is all, since new traces get numbers.

        Raises:
            FileExistsError: If there is such a file, and the run does not resume.
        """
        stages = () if self._overwrite else now.items()
        later = (self._layout.conflict(timestamp, stage) for stage, timestamp in stages)
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
            f"{path} was written after the point that this run resumes from. It stays, and new "
            "traces get a number where their names are taken."
        )

    def spool(self, stage: str) -> Path:
        """A new hidden path, in the folder of the traces, for a recorder to write to.

        Args:
            stage: What is recorded.

        Returns:
            A path at which there is no file, with the suffix of `filename` but without ``.gz``.

        Raises:
            OSError: If the folder cannot be made.
        """
        return self._layout.spool(stage)

    def write(
        self,
        spooled: Path,
        timestamp: Timestamp,
        stage: str,
        prepare: Callable[[], None] | None = None,
    ) -> Path | None:
        """Hand a recording over to the worker; it is done here if the worker does not take it.

        Args:
            spooled: Where the recording is, or will be once `prepare` has run; from `spool`.
            timestamp: When the recording ended; it goes into the name.
            stage: What was recorded.
            prepare: Completes the spooled file, on the worker.

        Returns:
            Where the file will be, or None if it had to be done here and failed.
        """
        path, remote = self._placer.names(timestamp, stage)
        trace = Trace(spooled, path, timestamp, stage, self._sends(path, remote), prepare)
        self._index.queue(trace)
        if self._file_worker.submit(partial(self._process, trace), trace.path.name):
            return trace.path
        return self._keep_here(trace, "the worker took no more jobs")

    def close(self) -> None:
        """Do here what the worker has left: place what waits, list what was not uploaded.

        Call it once the worker was drained or closed. Files that the worker is busy with are
        left to it.
        """
        for trace in self._index.queued:
            if self._optional:
                self._leave_out(trace)
            else:
                self._keep_here(trace, "the run ended first")
        self._delivery.park(self._index.unsent, "the run ended first")
        if not self._shares_complaints:
            self._warnings_digest.summarize()

    def _sends(
        self, path: Path, remote: str | None, replaces: bool | None = None
    ) -> tuple[tuple[Target, str], ...]:
        """Where a file goes, each place with its name there."""
        sends = [] if remote is None else [(target, remote) for target in self._targets]
        if (mirror := self._mirror_of(path)) is not None:
            replaces = self._overwrite if replaces is None else replaces
            name = f"{mirror.folder}/{path.relative_to(self._root).as_posix()}".lstrip("/")
            sends.append((mirror.replacing if replaces else mirror.adding, name))
        return tuple(sends)

    def _mirror_of(self, path: Path) -> Mirror | None:
        # A folder that is absolute is where the user wants it: here.
        return self._mirror if path.is_relative_to(self._root) else None

    def _process(self, trace: Trace) -> None:
        if not self._index.claim(trace):
            return
        with self._file_worker.local():
            placed = self._fold(trace, self._recording)
        if placed is None:
            return
        send = partial(self._fold, placed, self._sending)
        if self._file_worker is self._worker or not placed.sends:
            send()
        elif not self._worker.submit(send, placed.path.name):
            self._delivery.park([placed], "too many uploads wait")

    def _leave_out(self, trace: Trace) -> None:
        """Do without a file that is made of others: making it could take minutes."""
        if self._index.claim(trace):
            message = f"{trace.path} was not made: the run ended first. What it is made of is kept."
            self._warnings_digest.once("files were not made: the run ended first", message)

    def _keep_here(self, trace: Trace, why: str) -> Path | None:
        """Place a trace on the calling thread, which must not wait for a server."""
        placed = self._fold(trace, self._recording) if self._index.claim(trace) else None
        if placed is None:
            return None
        self._delivery.park([placed], why)
        self._fold(placed, (self._prune,))
        return placed.path

    def _fold(self, trace: Trace, steps: Sequence[Step]) -> Trace | None:
        passed: Trace | None = trace
        try:
            for step in steps:
                if passed is not None:
                    passed = step(passed)
        except Exception as error:
            kept = next(filter(os.path.lexists, (trace.spooled, trace.path)), None)
            where = "nothing of it is left" if kept is None else f"see {kept}"
            message = f"{trace.path} was not finished ({describe(error)}); {where}."
            folder = trace.spooled.parent
            self._warnings_digest.once(f"traces were not finished; see {folder}", message)
            return None
        return passed

    def _explain(self, trace: Trace) -> Trace:
        if self._readme is not None:
            self._readme.place(self._layout.readme(trace.timestamp, trace.stage)[0])
        return trace

    def _upload(self, trace: Trace) -> Trace | None:
        return self._delivery.upload(trace, partial(self._fold, steps=self._sending))

    def _send_readme(self, trace: Trace) -> Trace:
        # After the trace, so that a server that takes nothing is not asked twice.
        if self._readme is not None and trace.sends:
            path, remote = self._layout.readme(trace.timestamp, trace.stage)
            self._readme.send(path, self._sends(path, remote, replaces=True))
        return trace

    def _prune(self, trace: Trace) -> Trace:
        if self._mirror_of(trace.path) is not None:
            # A later trace may have taken the name, and wait.
            if trace.path not in (later.path for later in self._index.unsent):
                trace.path.unlink(missing_ok=True)
        elif self._keep >= 0:
            uploads = bool(trace.sends)
            for path in self._index.expire(self._keep if uploads else max(1, self._keep)):
                path.unlink(missing_ok=True)
        return trace


def check_names(
    folder: str, filename: str, remote_file_name: str | None, num_traces_to_keep: int = -1
) -> None:
    """Refuse what a writer would refuse: for callbacks, which are made long before their writer.

    Args:
        folder: As for `TraceWriter`.
        filename: As for `TraceWriter`.
        remote_file_name: As for `TraceWriter`.
        num_traces_to_keep: As for `TraceWriter`.

    Raises:
        ConfigError: If a format string cannot work, or the number is neither -1 nor one of files.
    """
    folder_format(folder)
    file_format(filename)
    if remote_file_name is not None:
        remote_format(remote_file_name)
    if type(num_traces_to_keep) is not int or num_traces_to_keep < -1:
        problem = "is neither -1 nor a number of files"
        raise ConfigError("num_traces_to_keep", num_traces_to_keep, problem, "5")
