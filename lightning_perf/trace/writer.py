"""The pipe that carries what was recorded to where people look.

Record into a spool -> compress or place -> upload -> prune: all but the first on the worker.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.trace.compress import compress as compress_into
from lightning_perf.trace.compress import place
from lightning_perf.trace.delivery import Delivery
from lightning_perf.trace.layout import Layout
from lightning_perf.trace.ledger import Ledger, Trace
from lightning_perf.trace.names import file_format, folder_format, remote_format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_perf.moment import Ranks
    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trace.worker import Worker

    Step = Callable[[Trace], Trace | None]


class TraceWriter:
    """Writes the traces of one recorder on one rank.

    Nothing that fails in the pipe reaches the training thread; it becomes a warning, and what was
    recorded stays on the disk. A trace whose name is taken gets a number (``rank0-2.5.json``)
    unless `overwrite` is set.

    Args:
        worker: Does the work; it may be shared.
        root: What `folder` lies under, unless that is absolute.
        folder: Format string of the folder.
        filename: Format string of the file names.
        remote_file_name: Format string of the names to upload by, or None to upload nothing.
        ranks: Where this process stands.
        run_name: The run's name, of any characters.
        compress: Whether to compress with gzip; then ``.gz`` is appended to both names, once.
        overwrite: Whether traces of an earlier run may be replaced.
        num_traces_to_keep: How many of the latest files of this writer stay on the disk; -1 for
            all. Older ones are deleted once they are uploaded, and never when that failed.
            Where nothing is uploaded, one file stays even for 0: it is the only copy.
        upload: Sends a file by a remote name, and raises if it cannot.
        upload_target: What a later upload needs to know, for `PendingUpload.target`; user names
            and passwords in addresses are left out.
        backoff: Seconds to wait before each further attempt to upload.

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
        overwrite: bool = False,
        num_traces_to_keep: int = -1,
        upload: Callable[[Path, str], None] | None = None,
        upload_target: Mapping[str, str] | None = None,
        backoff: Sequence[float] = (1.0, 2.0, 4.0),
    ) -> None:
        check_names(folder, filename, remote_file_name, num_traces_to_keep)
        self._layout = Layout(root, folder, filename, remote_file_name, ranks, run_name, compress)
        self._worker, self._ranks, self._overwrite = worker, ranks, overwrite
        self._keep, self._uploads = num_traces_to_keep, upload is not None
        self._move = compress_into if compress else place
        self._ledger = Ledger(self._keep)
        self._delivery = Delivery(
            worker, self._ledger, Path(root), run_name, upload, upload_target or {}, backoff
        )
        self._recording: tuple[Step, ...] = (self._prepare, self._inspect, self._place)
        self._sending: tuple[Step, ...] = (self._upload, self._prune)

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """The latest `num_traces_to_keep` traces, the latest last.

        Each is its timestamp and the paths by global rank: this rank's own, and None for others.
        """
        here = self._ranks.global_rank
        return [
            (
                trace.timestamp,
                [trace.path if rank == here else None for rank in range(self._ranks.world_size)],
            )
            for trace in self._ledger.saved
        ]

    def check(self, now: Mapping[str, Timestamp], resumes: bool = False) -> None:
        """Refuse a folder that holds later traces than the present moment, unless overwriting.

        Args:
            now: Where each stage stands that may be recorded.
            resumes: Whether the run goes on from a checkpoint, which may be older than its traces:
                then one warning is all, since new traces get numbers.

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
                "to replace it, give another folder, or resume that run from its checkpoint."
            )
        warn(
            f"{path} was written after the checkpoint that this run resumes from. It stays, and "
            "new traces get a number where their names are taken."
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
        trace = self._trace(spooled, timestamp, stage, prepare)
        self._ledger.queue(trace)
        if self._worker.submit(partial(self._process, trace), trace.path.name):
            return trace.path
        return trace.path if self._keep_here(trace, "the worker took no more jobs") else None

    def close(self) -> None:
        """Do here what the worker has left: place what waits, list what was not uploaded.

        Call it once the worker was drained or closed. Files that the worker is busy with are
        left to it.
        """
        for trace in self._ledger.queued:
            self._keep_here(trace, "the run ended first")
        self._delivery.park(self._ledger.unsent, "the run ended first")

    def _trace(
        self, spooled: Path, timestamp: Timestamp, stage: str, prepare: Callable[[], None] | None
    ) -> Trace:
        for number in itertools.count(1):
            path, remote = self._layout.names(timestamp, stage, number)
            if self._overwrite or self._ledger.reserve(path):
                break
        return Trace(spooled, path, remote if self._uploads else None, timestamp, prepare)

    def _process(self, trace: Trace) -> None:
        if self._ledger.claim(trace):
            self._fold(trace, (*self._recording, *self._sending))

    def _keep_here(self, trace: Trace, why: str) -> bool:
        """Place a trace on the calling thread, which must not wait for a server."""
        if not self._ledger.claim(trace) or self._fold(trace, self._recording) is None:
            return False
        self._delivery.park([trace], why)
        self._fold(trace, (self._prune,))
        return True

    def _fold(self, trace: Trace, steps: Sequence[Step]) -> Trace | None:
        passed: Trace | None = trace
        try:
            for step in steps:
                if passed is not None:
                    passed = step(passed)
        except Exception as error:
            kept = next(filter(os.path.lexists, (trace.spooled, trace.path)), None)
            where = "nothing of it is left" if kept is None else f"see {kept}"
            warn(f"{trace.path} was not finished ({describe(error)}); {where}.")
            return None
        return passed

    def _prepare(self, trace: Trace) -> Trace:
        if trace.prepare is not None:
            # The folder may have been removed since the recorder began.
            trace.spooled.parent.mkdir(parents=True, exist_ok=True)
            trace.prepare()
        return replace(trace, prepare=None)  # which may hold the recorder and its memory

    def _inspect(self, trace: Trace) -> Trace | None:
        if trace.spooled.exists() and trace.spooled.stat().st_size:
            return trace
        trace.spooled.unlink(missing_ok=True)
        warn(
            f"the recorder left nothing for {trace.path}: is the disk full, or was the folder "
            "removed?"
        )
        return None

    def _place(self, trace: Trace) -> Trace:
        self._move(trace.spooled, trace.path)
        self._ledger.place(trace)
        return trace

    def _upload(self, trace: Trace) -> Trace | None:
        return self._delivery.upload(trace, partial(self._fold, steps=self._sending))

    def _prune(self, trace: Trace) -> Trace:
        if self._keep >= 0:
            uploads = trace.remote is not None
            for path in self._ledger.expire(self._keep if uploads else max(1, self._keep)):
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
