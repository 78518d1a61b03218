"""Where a run's results go: which MLflow runs, which other loggers, under what name."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from lightning_perf.background.waiting import waiting
from lightning_perf.errors import describe, warn
from lightning_perf.tracking.metrics import MlflowMetrics, OtherLoggers, finite
from lightning_perf.tracking.mlflow import (
    MlflowRun,
    TagReader,
    is_mlflow,
    mlflow_run,
    run_name,
    run_target,
)
from lightning_perf.tracking.roots import Root, root_of, trial_root
from lightning_perf.tracking.stores import store_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.background.worker import Worker
    from lightning_perf.traces.writer import Target

_NAME_TIMEOUT = 10.0
#: Seconds that one file may still take to be made when a run is over.
_LOCAL_PATIENCE = 300.0
#: Seconds to wait before saying that there is something to wait for.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Destination:
    """What rank 0 tells all ranks, in one broadcast."""

    runs: tuple[MlflowRun, ...]
    run_name: str
    #: What tells this run from others of its name.
    identity: str


class Reporting:
    """The ways out of a run. Constructing it takes all ranks together."""

    def __init__(self, trainer: Trainer, worker: Worker) -> None:
        self._worker = worker
        first = self._first = trainer.global_rank == 0
        destination = _destination(trainer, worker) if first else None
        if trainer.world_size > 1:
            destination = trainer.strategy.broadcast(destination, src=0)
        assert destination is not None  # rank 0 made it
        self.runs, self.run_name = destination.runs, destination.run_name
        self.identity = destination.identity
        self._runs_as_targets = [run_target(run) for run in self.runs]
        self.tags = TagReader(next(iter(self.runs), None), worker)
        self._own = [MlflowMetrics(run, worker) for run in self.runs]
        self._mlflow = self._own if first else []
        others = [x for x in trainer.loggers if not is_mlflow(x)] if first else []
        self._others = OtherLoggers(others)
        self._later: deque[tuple[dict[str, float], int]] = deque()
        self._default_root = str(trainer.default_root_dir)
        self._trial = bool(getattr(trainer, "fast_dev_run", False))
        self._roots: dict[str | None, Root] = {}

    def root(self, prefix: str | None) -> Root:
        """Where files are written: below a prefix, or below the trainer's ``default_root_dir``.

        Under ``fast_dev_run`` only a prefix is kept.
        """
        if prefix not in self._roots:
            trial = self._trial and prefix is None
            self._roots[prefix] = trial_root() if trial else root_of(prefix or self._default_root)
        return self._roots[prefix]

    def targets(self, remote_file_name: str | None) -> Sequence[Target]:
        """Where files of a remote name go: to the store of a URL, else to all MLflow runs."""
        if self._trial:
            return ()
        store = None if remote_file_name is None else store_target(remote_file_name)
        return self._runs_as_targets if store is None else [store]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics to all loggers; numbers that are not finite are left out."""
        metrics = finite(metrics)
        if not metrics:
            return
        for target in self._mlflow:
            target.log(metrics, step)
        self._others.log(metrics, step)

    def log_from_worker(self, metrics: Mapping[str, float], step: int) -> None:
        """One rank's metrics, on the worker thread: to MLflow from any rank.

        Other loggers, which are not safe there, get theirs from rank 0 at the next ``deliver``.
        """
        metrics = finite(metrics)
        for target in self._own:
            target.log(metrics, step)
        self._later.append((metrics, step))

    def deliver(self) -> None:
        """Hand what waits to the loggers of the calling thread."""
        while self._later:
            self._others.log(*self._later.popleft())

    def log_params(self, params: Mapping[str, object]) -> None:
        """The set-up of the run, to MLflow."""
        for target in self._mlflow:
            target.log_params(params)

    def flush(self) -> None:
        """The run is over: send the metrics that wait, while its last files are made."""
        for target in self._own:
            target.flush()

    def close(self, timeout: float) -> None:
        """Wait a bounded time for what is on its way, and say what did not arrive.

        Args:
            timeout: Seconds at most.
        """
        self.flush()
        self._let_go(self._worker, "uploading", timeout)
        for target in self._own:
            target.tell_lost()
        self.deliver()

    def tidy(self) -> None:
        """All files are where they belong: remove folders that were for the time being."""
        for root in self._roots.values():
            root.close()

    def finish(self, file_worker: Worker, timeout: float) -> None:
        """Wait a bounded time for files that are being made.

        Args:
            file_worker: Who makes them.
            timeout: Seconds at most; the one that is begun then may take some more.
        """
        self._let_go(file_worker, "finishing traces", timeout)

    def _let_go(self, worker: Worker, what: str, timeout: float) -> None:
        if worker.close(_PATIENCE):
            return
        # Each rank has its own, but one voice is enough for a thousand of them.
        shown = waiting(what, worker.pending, timeout) if self._first else nullcontext()
        with shown as progress:
            if not worker.close(timeout, progress):
                worker.abandon(_LOCAL_PATIENCE)


def _destination(trainer: Trainer, worker: Worker) -> Destination:
    """Rank 0's; whatever a logger raises, the other ranks wait for an answer."""
    made_up = time.strftime("run-%Y%m%d-%H%M%S-") + os.urandom(2).hex()
    try:
        found = [mlflow_run(logger) for logger in trainer.loggers if is_mlflow(logger)]
        runs = tuple(run for run in found if run is not None)
        if runs:
            return Destination(runs, _mlflow_name(runs[0], worker), runs[0].run_id)
        for logger in trainer.loggers:
            parts = (logger.name, None if logger.version is None else _version(logger.version))
            # Without a version, runs share the logger's name; DummyLogger has neither.
            if parts[1]:
                name = "-".join(part for part in parts if part)
                return Destination((), name, f"{logger.save_dir}/{name}")
    except Exception as error:
        warn(f"a logger does not tell its run ({describe(error)}), so files go to {made_up}.")
    return Destination((), made_up, made_up)


@cache
def _names() -> dict[str, str]:
    """Names of runs by id: one that was asked for is not asked for again, even in vain."""
    return {}


def _mlflow_name(run: MlflowRun, worker: Worker) -> str:
    names = _names()
    if run.run_id not in names:
        try:
            names[run.run_id] = worker.call(partial(run_name, run), timeout=_NAME_TIMEOUT)
        except Exception as error:
            names[run.run_id] = run.run_id
            why = describe(error)
            warn(f"MLflow did not tell the name of run {run.run_id} ({why}): its id stands in.")
    return names[run.run_id]


def _version(version: Any) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)
