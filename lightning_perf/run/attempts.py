"""Attempts of a job: each process that trains leaves a file, which later ones read for goodput."""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from operator import sub
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from lightning_perf.background import URGENT
from lightning_perf.core.goodput import FINISHED, STALLED, Attempt, goodput, held_and_kept
from lightning_perf.errors import printable
from lightning_perf.files import written_whole
from lightning_perf.run import compat
from lightning_perf.run.destination import named_run
from lightning_perf.system.process import is_alive, started, this_process
from lightning_perf.traces.names import safe
from lightning_perf.tracking.attempts import attempts_in, prune
from lightning_perf.tracking.summary import ATTEMPTS, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lightning_perf.background import Worker
    from lightning_perf.core.progress import Ranks
    from lightning_perf.run.destination import Reporting
    from lightning_perf.run.profiler import Spans
    from lightning_perf.run.stages import Progress, StageStack
    from lightning_perf.run.windows import Windows
    from lightning_perf.traces.writer import RunFolder

#: Seconds until the first sign of life, and between two; those of checkpoints come at most once per
#: `FIRST`.
FIRST, INTERVAL = 1.0, 5.0
#: A batch that takes this many times as long as those before it may be a stall.
_LONGER = 3
#: Checkpoints that a file lists, the latest ones.
_MOST_CHECKPOINTS = 20
#: Environment variables of the cluster that a file contains.
_LABELS = ("SLURM_JOB_ID", *compat.RESTARTS)
#: The id of this process once its first training has begun.
_trained = 0


class Trained(Protocol):
    """What the log reads of a `Run`."""

    trainer: Any
    ranks: Ranks
    progress: Progress
    stages: StageStack
    spans: Spans
    reporting: Reporting
    windows: Windows
    file_worker: Worker

    @property
    def stage(self) -> str:
        """The running stage."""

    @property
    def leaves_files(self) -> bool:
        """Whether the run has something to leave."""

    def note_summary(self) -> None:
        """Write the summary so far, on the thread that makes files."""


class AttemptLog:
    """Keeps the file of this attempt up to date on rank 0, from the first batch of a fit on.

    Nothing runs per batch: the counts are read at each sign of life, on the thread that makes
    files, and at each checkpoint.
    """

    def __init__(self) -> None:
        self._made = time.time()  # noqa: TID251 (as other machines have it)
        #: Training seconds of the checkpoint that is resumed.
        self.resumed = 0.0
        # The earlier attempts of this job, and the fields of this one that do not change.
        self._earlier: list[Attempt] = []
        self._same: dict[str, Any] = {}
        # The folder of the files: that of another run, or of this one once that has files.
        self._folder: Path | None = None
        self._run_folder: RunFolder
        # At the start of training: the step, and seconds of validation, of checkpoints in training
        # and in validation, and of pauses in the training that is resumed.
        self._first_step, self._validated = 0, 0.0
        self._measured = self._saving_began = 0.0, 0.0
        self._paused = 0.0
        # Seconds since the epoch when `perf_counter` was 0.
        self._wall = 0.0
        # This attempt, at its end.
        self._ended: Attempt | None = None
        # The step and the training seconds of checkpoints, their number, and at the last one the
        # seconds without pauses.
        self._saved: deque[tuple[int, float]] = deque(maxlen=_MOST_CHECKPOINTS)
        self._saves, self._covered = 0, 0.0
        # Whether a sign of life is due for a checkpoint, and when the next one may come.
        self._notes, self._next_note = False, 0.0
        # At the last update: seconds of training; of checkpoints in training, and those before the
        # current batch; of stalls that are over, and of a stall in the current batch.
        self._looking = RLock()  # a signal may end the run within it
        self._trained = self._saving = self._saving_before = 0.0
        self._stalls = self._stalled = 0.0
        # Seconds that training waited for its first batch; None until that starts.
        self._waited: float | None = None
        # Seconds of the last batches, as far as they were seen before their ends.
        self._unfinished, self._lasted = 0.0, deque([0.0, 0.0], 2)

    @property
    def job(self) -> str:
        """The job of this attempt, once it has begun."""
        return str(self._same.get("job", ""))

    # -- on the training thread -------------------------------------------------------------------

    def begin(self, run: Trained) -> None:
        """The batches of an epoch begin; the first one begins the attempt."""
        global _trained
        root, trainer = run.reporting.root(None), run.trainer
        local = not root.discards and root.mirror is None
        if self._same or run.ranks.global_rank != 0 or trainer.state.fn != "fit" or not local:
            return
        now, pid = time.time(), os.getpid()  # noqa: TID251
        # A notebook may have been open for days: its start is not that of the training.
        alone = _trained != pid and not (hasattr(sys, "ps1") or "ipykernel" in sys.modules)
        began, _trained = _process_start() if alone else self._made, pid
        self._wall = now - perf_counter()
        counters, progress = run.progress.stages["train"], run.progress
        paused = self._paused = min(max(0.0, progress.paused_seconds), self.resumed)
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        name = f"{moment}.{int(now * 1000) % 1000:03d}-{pid}"
        self._same = {
            "name": name, "job": name, "began": began, **this_process(),
            "folder": run.reporting.run_folder().folder.name, "setup": max(now - began, 0.0),
            "resumed": self.resumed - paused, "first": counters.total_wct - paused,
        }  # fmt: skip
        self._first_step, self._validated = counters.step, progress.validation_seconds
        self._trained, self._saving_began = counters.total_wct, self._saving_seconds(run)
        self._run_folder = run.reporting.run_folder(named_run())
        self._continue_job(run, root.path)
        self._note_job(run)
        self._submit(self.beat, run, FIRST)

    def begin_first_batch(self, run: Trained) -> None:
        """The first batch is loaded: the wait for it is part of the set-up."""
        if self._same and self._waited is None:
            with self._looking:
                now = perf_counter()
                self._waited = now - run.progress.stages["train"].mark
                self._same["setup"] = self._since_start(now)
                self._same["first"] += self._waited

    def _since_start(self, now: float) -> float:
        """Seconds since the process started."""
        return max(self._wall + now - float(self._same["began"]), 0.0)

    def _continue_job(self, run: Trained, root: Path) -> None:
        """Find the earlier attempts of this job.

        A run that the user has named continues what has its name: the job of its checkpoint, or the
        latest one. Otherwise a checkpoint belongs to the job that wrote it, if that is below the
        same ``default_root_dir``: elsewhere, such as for fine-tuning, it begins a new job. Without
        one, the same run of MLflow, and a process that a cluster has restarted, continue what is in
        their own folder.
        """
        named, saved = named_run(), run.progress.saved_job
        run.progress.saved_job = {}
        places: dict[Path, str | None] = {}
        folder, job = str(saved.get("folder")), str(saved.get("job"))
        if not named and safe(folder) == folder:
            places[root / folder / ATTEMPTS] = job
        # In MLflow, the folder is of one run id.
        if named or run.reporting.tags is not None or compat.resumes(run.trainer):
            places.setdefault(self._run_folder.folder / ATTEMPTS, None)
        for place, wanted in places.items():
            if not (found := attempts_in(place, wanted)):
                continue
            last = ([each for each in found if each.job == job] or found)[-1]
            if (last.status == FINISHED and not self.resumed) or _lives(last):
                continue
            self._folder, self._same["job"] = place, last.job
            self._earlier = [each for each in found if each.job == last.job]
            if self._same["began"] < last.seen < self._wall + perf_counter():
                # Its process did something else before, such as that attempt: `exec` keeps its age.
                self._same["began"] = last.seen
            number, where = len(self._earlier) + 1, place.parent
            compat.rank_zero_info(
                f"lightning_perf: this is attempt {number} of the run in {where}."
            )
            return

    def _note_job(self, run: Trained) -> None:
        """Checkpoints name the job."""
        folder = self._folder or self._run_folder.folder / ATTEMPTS
        run.progress.job = {"folder": folder.parent.name, "job": self._same["job"]}

    def save(self, run: Trained) -> None:
        """Record a checkpoint; each callback calls this when Lightning saves its state."""
        if not self._same or self._ended is not None:
            return
        counters = run.progress.stages["train"]
        now = counters.step, counters.total_wct
        if [*self._saved][-1:] != [now]:
            # With the pauses so far, which the state has.
            self._covered = self._attempt(run, RUNNING).last
            self._saved.append(now)
            self._saves += 1
            self._note_soon(run)

    # -- on any thread ----------------------------------------------------------------------------

    def _submit(self, job: Callable[[Trained], None], run: Trained, delay: float) -> None:
        """Run a job on the thread that makes files; one that waits keeps no run alive."""
        run.file_worker.submit(partial(_call, job, weakref.ref(run)), "the attempt", delay)

    def _note_soon(self, run: Trained) -> None:
        """Have the file written: after a kill, it tells which checkpoints there were."""
        if not self._notes:
            self._notes = True
            self._submit(self.note, run, max(self._next_note - perf_counter(), 0.0))

    def goodput(self, run: Trained, status: str) -> dict[str, Any]:
        """The goodput of the job so far, and write the file; empty if no training has begun."""
        if not self._same or self._ended is not None:  # the last live summary comes after the end
            return {}
        own = self._attempt(run, status)
        if status != RUNNING:
            self._ended = own
        # A signal that ends the wait for traces does not drop this.
        run.file_worker.submit(partial(self._write, run, own), "the attempt", URGENT)
        found = goodput([*self._earlier, own])
        self._note(run, own, found)
        held, kept = self._of_run(own, found)
        if held < found["held_seconds"]:
            found |= {"run_held_seconds": held, "run_kept_seconds": kept}
        return found

    def _of_run(self, own: Attempt, found: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds of this run, and those that were kept: its job may have several runs."""
        return held_and_kept(found, [each for each in self._earlier if each.folder != own.folder])

    def _note(self, run: Trained, own: Attempt, found: Mapping[str, Any]) -> None:
        """Tell MLflow what the attempts of this run of MLflow took."""
        if run.reporting.tags is None or self._ended not in (None, own):
            return
        held, kept = self._of_run(own, found)
        content = {
            "job": own.job, "seen": own.seen, "held_seconds": held, "kept_seconds": kept,
            "goodput": found["share"], "process": this_process(),
        }  # fmt: skip
        run.reporting.note_attempts(content)

    def _saving_seconds(self, run: Trained) -> tuple[float, float]:
        """Seconds of checkpoints in training and in validation, while something measures them."""
        if (recorder := run.spans.recorder) is not None:
            found = recorder.clock.seconds_of("checkpoint")
            self._measured = found.get("train", 0.0), found.get("validate", 0.0)
        return self._measured

    def _attempt(self, run: Trained, status: str) -> Attempt:
        """This attempt so far. Its times are those of a monotonic clock."""
        with self._looking:
            counters, validating = run.progress.stages["train"], run.stages.validating
            saving, within = map(sub, self._saving_seconds(run), self._saving_began)
            now = perf_counter()
            if counters.total_wct != self._trained:  # a batch has ended since the last look
                self._trained, self._saving_before = counters.total_wct, self._saving
                self._stalls, self._stalled = self._stalls + self._stalled, 0.0
                self._lasted.append(self._unfinished)
            self._saving = saving
            unfinished = current = 0.0
            if run.stage and status != FINISHED and self._waited is not None:
                unfinished = now - counters.mark - validating
                unfinished = max(unfinished - (0.0 if counters.batches else self._waited), 0.0)
                # Checkpoints are written before the first batch after them.
                current = min(saving - self._saving_before, unfinished)
                unfinished -= current
            self._unfinished = unfinished
            # Batches that all take over a minute are no stalls.
            if unfinished > max(STALLED, _LONGER * min(self._lasted)):
                self._stalled = max(self._stalled, unfinished)
            run.progress.paused_seconds = self._paused + saving - current + self._stalls
            validating += run.progress.validation_seconds - self._validated - within
            if self._waited is None:
                self._same["setup"] = self._since_start(now)
            return Attempt(
                **self._same, status=status, seen=self._wall + now,
                last=self._trained - run.progress.paused_seconds, unfinished=unfinished,
                stalls=self._stalls, validation=max(validating, 0.0),
                checkpoints=saving + within, saves=self._saves, saved=self._covered,
            )  # fmt: skip

    # -- on the thread that makes files -----------------------------------------------------------

    def beat(self, run: Trained) -> None:
        """Write the file, and schedule the next write."""
        if self._ended is not None:
            return
        began, own = perf_counter(), self._attempt(run, RUNNING)
        self._write(run, own)
        self._note(run, own, goodput([*self._earlier, own]))
        # On a slow file system, the file takes at most 1 % of the time.
        pause = INTERVAL * max(1.0, 20 * (perf_counter() - began))
        self._submit(self.beat, run, pause)

    def note(self, run: Trained) -> None:
        """Write the file for a checkpoint."""
        if self._ended is not None:
            return
        began, own = perf_counter(), self._attempt(run, RUNNING)
        self._write(run, own)
        now = perf_counter()
        # As for other signs of life.
        self._next_note, self._notes = now + max(FIRST, 100 * (now - began)), False
        if self._saves > own.saves:  # meanwhile
            self._note_soon(run)

    def _write(self, run: Trained, own: Attempt) -> None:
        if not run.leaves_files or self._ended not in (None, own):
            return
        # Profilers alone leave nothing before a recording.
        if not (run.windows.subscribed or self._run_folder.folder.exists()):
            return
        with suppress(OSError):  # that the run's files cannot be written is a warning already
            self._write_file(run, own)

    def _write_file(self, run: Trained, own: Attempt) -> None:
        if self._folder is None:
            self._folder = self._run_folder.claim() / ATTEMPTS
            self._same["folder"] = run.reporting.run_folder().folder.name
            self._note_job(run)
        if self._folder.is_symlink():  # it may point anywhere
            text = f"{self._folder} is a link: attempts are neither written nor read there."
            run.reporting.warnings_digest.once("attempts were not written", text)
            return
        path = self._folder / f"{own.name}.json"
        first = not path.exists()
        if first:
            prune(self._folder, own.job)
        content = asdict(own) | {
            "folder": self._same["folder"],
            "steps": [self._first_step, run.progress.stages["train"].step],
            "latest_checkpoints": [*self._saved],
            "labels": {key: printable(os.environ[key]) for key in _LABELS if key in os.environ},
        }
        with written_whole(path, durable=False) as file:
            file.write(json.dumps(content).encode())
        if first and own.status == RUNNING:  # the first report may come much later
            run.note_summary()


def _process_start() -> float:
    """When this process was started, in seconds since the epoch."""
    now = time.time()  # noqa: TID251
    try:
        found = started(os.getpid())
    except OSError:  # /proc is hidden
        return now
    boot = now - time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else 0.0
    return boot + found


def _call(job: Callable[[Trained], None], reference: weakref.ref[Trained]) -> None:
    if (run := reference()) is not None:
        job(run)


def _lives(attempt: Attempt) -> bool:
    """Whether the process of an attempt is another one of this machine, and still trains."""
    if attempt.status != RUNNING or attempt.pid == os.getpid():
        return False
    process = {"host": attempt.host, "pid": int(attempt.pid), "started": attempt.started or None}
    return bool(is_alive(process, attempt.seen))
