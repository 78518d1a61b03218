"""The outputs of a run: MLflow runs, other loggers, folders and stores."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_perf.errors import WarningDigest, describe, let_through, printable, warn
from lightning_perf.run import compat
from lightning_perf.run.termination import hurried
from lightning_perf.terminal import waiting
from lightning_perf.traces.names import TakenNames
from lightning_perf.traces.uploads import TraceRun
from lightning_perf.traces.writer import RunFolder, TraceOptions, TraceWriter, folder_of
from lightning_perf.tracking.installed import trackers_of
from lightning_perf.tracking.mlflow import (
    LONGEST_PARAM,
    MlflowMetrics,
    MlflowRun,
    TagReader,
    is_mlflow,
)
from lightning_perf.tracking.paced import PacedLogger
from lightning_perf.tracking.tracker import Root, root_of, store_target, trial_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from lightning.pytorch import Trainer

    from lightning_perf.background import Worker
    from lightning_perf.core.progress import Timestamp
    from lightning_perf.traces.uploads import Target
    from lightning_perf.tracking.tracker import Tracker

    #: What rank 0 broadcasts: runs, the run's name, and what distinguishes runs of one name.
    Destination = tuple[tuple[Tracker, ...], str, str]

#: Seconds for MLflow to return the run's name at set-up, and for the file that is being made when
#: all other waits are over.
_NAME_TIMEOUT, _LAST_FILE_TIMEOUT = 10.0, 300.0
#: Seconds that it waits for a file after a signal.
_INTERRUPTED_TIMEOUT = 10.0
#: Names a run that several processes continue, and without a run of MLflow its folder.
RUN_VARIABLE = "LIGHTNING_PERF_RUN"
#: Seconds before a wait at the end of the run is shown.
SILENT = 2.0


@dataclass
class Generated:
    """The name and the identity of runs of a Trainer whose loggers have none."""

    name: str
    identity: str
    #: Whether it was printed where its files are.
    announced: bool = False


#: The generated name of the last run of each Trainer.
_GENERATED: WeakKeyDictionary[Trainer, Generated] = WeakKeyDictionary()


def named_run() -> str:
    """The name that the user's environment gives to the run; empty if there is none."""
    return printable(os.environ.get(RUN_VARIABLE, "").strip())


def announce(trainer: Trainer) -> bool:
    """Whether to print where the files of a generated name are: once per name."""
    run = _GENERATED.get(trainer)
    first = run is None or not run.announced
    if run is not None:
        run.announced = True
    return first


def _json(setup: Mapping[str, object], callbacks: Mapping[str, object]) -> str:
    return json.dumps({**setup, "callbacks": callbacks}, default=str)


def _generate(trainer: Trainer) -> Generated:
    """A name for each fit; a test after it belongs to the same run, as do many predictions."""
    if trainer not in _GENERATED or trainer.state.fn == "fit":
        name = time.strftime("run-%Y%m%d-%H%M%S-") + os.urandom(2).hex()
        # Trainings that start together may get one name, so that it does not identify the run.
        _GENERATED[trainer] = Generated(name, os.urandom(16).hex())
    return _GENERATED[trainer]


class Reporting:
    """The outputs of a run. The constructor is a collective: all ranks call it."""

    def __init__(self, trainer: Trainer, worker: Worker, file_worker: Worker) -> None:
        self._worker, self._file_worker = worker, file_worker
        self._ranks = compat.ranks_of(trainer)
        #: Shared by trace writers: their warnings, and the names of their files.
        self.warnings_digest, self._taken_names = WarningDigest(), TakenNames()
        #: Called at the end of the run, after the workers have stopped.
        self.closing: list[Callable[[], None]] = []
        first = self._first = trainer.global_rank == 0
        destination = _destination(trainer, worker) if first else ((), "", "")
        if trainer.world_size > 1:
            destination = trainer.strategy.broadcast(destination, src=0)
        runs, *named = destination
        # A logger's folder may be no UTF-8.
        self.run_name, self.identity = map(printable, named)
        self._runs_as_targets = [run.target for run in runs]
        mlflow = [run for run in runs if isinstance(run, MlflowRun)]
        self.tags = TagReader(mlflow[0], worker) if mlflow else None
        self._own = [MlflowMetrics(run, worker) for run in mlflow]
        self._mlflow = self._own if first else []
        others = [each for each in trainer.loggers if not is_mlflow(each)] if first else []
        self._others = [*map(PacedLogger, others)]
        #: Entered for our calls of these, whose time is told from that of Lightning's.
        self.own_calls: AbstractContextManager[object] = nullcontext()
        #: Functions that get what is logged on this rank, besides the loggers.
        self.receivers: list[Callable[[Mapping[str, float], int], object]] = []
        #: Settings of callbacks by their names.
        self.settings: dict[str, dict[str, object]] = {}
        #: Keys of metrics that loggers do not get.
        self.left_out: set[str] = set()
        self._later: deque[tuple[dict[str, float], int]] = deque()
        self._default_root = str(trainer.default_root_dir)
        # The user's code may change the current folder during the run.
        self._start = Path()
        with suppress(OSError):  # it was deleted
            self._start = Path.cwd()
        self._trial = bool(getattr(trainer, "fast_dev_run", False))
        self._roots: dict[str | None, Root] = {}

    def root(self, prefix: str | None) -> Root:
        """Where files are written: below `prefix`, by default the trainer's ``default_root_dir``.

        With ``fast_dev_run``, files without a prefix are temporary.
        """
        if prefix not in self._roots:
            trial = self._trial and prefix is None
            self._roots[prefix] = (
                trial_root() if trial else root_of(prefix or self._default_root, self._start)
            )
        return self._roots[prefix]

    def targets(self, remote_file_name: str | None) -> Sequence[Target]:
        """The upload targets of a remote name: the store of a URL, else all tracked runs."""
        if self._trial:
            return ()
        store = None if remote_file_name is None else store_target(remote_file_name)
        return self._runs_as_targets if store is None else [store]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics to all loggers, without NaN and infinity, and without keys left out."""
        metrics = {key: value for key, value in metrics.items() if key not in self.left_out}
        if metrics := _finite(metrics):
            for receive in (*(target.log for target in self._mlflow), *self.receivers):
                receive(metrics, step)
            self._log_to_others(metrics, step)

    def log_from_worker(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one rank's metrics from the worker thread, to MLflow on every rank.

        Other loggers are not thread-safe: they get rank 0's metrics at the next `deliver`.
        """
        if metrics := _finite(metrics):
            for receive in (*(target.log for target in self._own), *self.receivers):
                receive(metrics, step)
            self._later.append((metrics, step))

    def deliver(self, *, last: bool = False) -> None:
        """Log the metrics of `log_from_worker` to other loggers, on the calling thread.

        At the ``last`` time of a stage or a run, slow loggers get all that waits.
        """
        while self._later:
            self._log_to_others(*self._later.popleft())
        if last:
            with self.own_calls:
                for logger in self._others:
                    logger.flush()

    def _log_to_others(self, metrics: dict[str, float], step: int) -> None:
        with self.own_calls:
            for logger in self._others:
                logger.log(metrics, step)

    def note_attempts(self, content: Mapping[str, Any]) -> None:
        """Note in MLflow what the attempts of the run took, for ``lightning-perf runs``."""
        for target in self._mlflow:
            target.note(content)

    def describe(self, setup: Mapping[str, object]) -> None:
        """Log to MLflow, as JSON in one param, what the run runs on and its callbacks' settings."""
        if not self._mlflow:
            return
        callbacks = dict(self.settings)
        text = _json(setup, callbacks)
        while callbacks and len(text) > LONGEST_PARAM:
            callbacks.pop(max(callbacks, key=lambda name: len(str(callbacks[name]))))
            text = _json(setup, callbacks)
        for target in self._mlflow:
            target.log_params({"lightning_perf": text})

    def close(self, file_timeout: float, timeout: float) -> None:
        """Wait for files and uploads up to their timeouts, in seconds; warn about metrics not sent.

        A signal ends the waiting.
        """
        for worker, what, seconds, last in (
            (self._file_worker, "finishing files", file_timeout, _LAST_FILE_TIMEOUT),
            (self._worker, "uploading", timeout, 0.0),
        ):
            for target in self._own:
                target.flush()
            if not worker.close(SILENT, until=hurried):
                shown = self._first and not hurried()
                with waiting(what, worker.pending, seconds, shown=shown) as show:
                    done = worker.close(seconds, partial(_hurried, worker, show))
                if not done:
                    worker.abandon(min(last, _INTERRUPTED_TIMEOUT) if hurried() else last)
        for target in self._own:
            target.warn_lost()
        self.deliver(last=True)

    def _trace_run(self, prefix: str | None) -> TraceRun:
        root = self.root(prefix)
        return TraceRun(
            worker=self._worker,
            file_worker=self._file_worker,
            root=root.path,
            ranks=self._ranks,
            run_name=self.run_name,
            identity=self.identity,
            mirror=root.mirror,
            digest=self.warnings_digest,
            taken=self._taken_names,
        )

    def run_folder(self, name: str = "") -> RunFolder:
        """The folder of the run, or of a name of the user's, below ``default_root_dir``."""
        run = self._trace_run(None)
        if name:
            run = replace(run, run_name=name, identity=_identity(name))
        return folder_of(run, "{run_name}")

    def new_writer(self, options: TraceOptions, prefix: str | None = None) -> TraceWriter:
        """A trace writer that is closed at the end of the run.

        Its folder is below ``prefix``, by default the trainer's ``default_root_dir``.
        """
        targets = self.targets(options.remote_file_name)
        writer = TraceWriter(options, self._trace_run(prefix), targets)
        # After the worker has stopped, the writer places files that were delayed by a slow server.
        self.closing.append(writer.close)
        return writer

    def write_files(
        self,
        folder: str,
        files: Mapping[str, Callable[[Path], None]],
        stage: str,
        stamp: Timestamp,
        *,
        remote: str | None = None,
        overwrite: bool = False,
        durable: bool = False,
    ) -> None:
        """Write files below the trainer's ``default_root_dir``, and to MLflow as artifacts.

        Each name has a function that writes the file, on the worker thread; ``folder`` is a format
        string, and ``stage`` and ``stamp`` what they describe, as for traces. ``remote`` is the
        name of the artifact if that differs. Only ``durable`` files wait for the disk, which takes
        milliseconds per file.
        """
        for name, write in files.items():
            options = TraceOptions(
                folder=folder,
                filename=name,
                remote_file_name=f"{folder}/{remote or name}",
                overwrite=overwrite,
                durable=durable,
            )
            writer = self.new_writer(options)
            spooled = writer.spool(stage)
            writer.write(spooled, stamp, stage, partial(write, spooled))

    def remove_temporary(self) -> None:
        """Remove temporary folders, after all files are moved or uploaded."""
        for root in self._roots.values():
            root.close()


def _hurried(worker: Worker, show: Callable[[int], None]) -> bool:
    show(worker.pending)
    return hurried()


def _destination(trainer: Trainer, worker: Worker) -> Destination:
    """Rank 0's destination. It never raises, since the other ranks wait for the broadcast."""
    runs: tuple[Tracker, ...] = ()
    failure: Exception | None = None
    try:
        runs = tuple(trackers_of(trainer.loggers))
        if runs and isinstance(runs[0], MlflowRun):
            return runs, _mlflow_name(runs[0], worker), runs[0].run_id
        if name := named_run():
            return runs, name, _identity(name)
        for logger in trainer.loggers:
            version = logger.version
            if isinstance(version, int):
                version = f"version_{version}"
            # Without a version, all runs have the logger's name. DummyLogger has neither.
            if version:
                name = "-".join(str(part) for part in (logger.name, version) if part)
                folder: Any = logger.save_dir
                if folder and "://" not in str(folder):
                    # Runs in different working folders may have one relative folder.
                    folder = Path(folder).absolute()
                return runs, name, f"{folder}/{name}"
    except Exception as error:
        let_through(error)
        failure = error
    generated = _generate(trainer)
    if failure is not None:
        warn(
            f"a logger's run is unknown ({describe(failure)}): files are written to "
            f"{generated.name}."
        )
    return runs, generated.name, generated.identity


def _identity(name: str) -> str:
    return f"{RUN_VARIABLE} {name}"


#: Names of MLflow runs by id: each is requested once per process, even if that fails.
_NAMES: dict[str, str] = {}


def _mlflow_name(run: MlflowRun, worker: Worker) -> str:
    if run.run_id not in _NAMES:
        _NAMES[run.run_id] = run.run_id
        try:
            _NAMES[run.run_id] = worker.call(run.name, _NAME_TIMEOUT)
        except Exception as error:
            why = describe(error)
            warn(f"MLflow did not return the name of run {run.run_id} ({why}); its id is used.")
    return _NAMES[run.run_id]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinity, as floats."""
    numbers = dict(zip(metrics, map(float, metrics.values()), strict=True))
    if not all(map(isfinite, numbers.values())):
        numbers = {key: value for key, value in numbers.items() if isfinite(value)}
    return numbers


def saved_by(callbacks: Iterable[object]) -> list[Path]:
    """The traces that these callbacks have written on this rank in this run."""
    return [path for each in callbacks for path in getattr(each, "saved_in_run", ())]
