"""Where a run's results go: which MLflow runs, which other loggers, under what name."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import warn
from lightning_perf.tracking.artifacts import Upload, uploader
from lightning_perf.tracking.compat import MlflowRun, is_mlflow, mlflow_run, run_name
from lightning_perf.tracking.metrics import MlflowMetrics, finite, log_to_loggers
from lightning_perf.tracking.tags import TagReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import Trainer

    from lightning_perf.trace.worker import Worker

_NAME_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Destination:
    """What rank 0 tells all ranks, in one broadcast."""

    runs: tuple[MlflowRun, ...]
    run_name: str


class Reporting:
    """The ways out of a run. Constructing it takes all ranks together."""

    def __init__(self, trainer: Trainer, worker: Worker) -> None:
        self._worker = worker
        first = trainer.global_rank == 0
        destination = _destination(trainer, worker) if first else None
        if trainer.world_size > 1:
            destination = trainer.strategy.broadcast(destination, src=0)
        assert destination is not None  # rank 0 made it
        self.runs, self.run_name = destination.runs, destination.run_name
        self.upload: Upload | None = uploader(self.runs)
        self.tags = TagReader(next(iter(self.runs), None), worker)
        self._mlflow = [MlflowMetrics(run, worker) for run in self.runs] if first else []
        self._loggers = [x for x in trainer.loggers if not is_mlflow(x)] if first else []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics to all loggers; numbers that are not finite are left out."""
        metrics = finite(metrics)
        if not metrics:
            return
        for target in self._mlflow:
            target.log(metrics, step)
        log_to_loggers(self._loggers, metrics, step)

    def log_params(self, params: Mapping[str, object]) -> None:
        """The set-up of the run, to MLflow."""
        for target in self._mlflow:
            target.log_params(params)

    def close(self, timeout: float) -> None:
        """Wait a bounded time, with a word to the user if it is long, for what is on its way."""
        if self._worker.pending and sys.stderr.isatty():
            print("lightning_perf: sending what is left ...", file=sys.stderr)  # noqa: T201
        self._worker.close(timeout)


def _destination(trainer: Trainer, worker: Worker) -> Destination:
    runs = tuple(
        run for x in trainer.loggers if is_mlflow(x) for run in [mlflow_run(x)] if run is not None
    )
    return Destination(runs, _run_name(trainer, runs, worker))


def _run_name(trainer: Trainer, runs: tuple[MlflowRun, ...], worker: Worker) -> str:
    for run in runs:
        try:
            return worker.call(partial(run_name, run), timeout=_NAME_TIMEOUT)
        except Exception as error:
            warn(f"MLflow did not tell the name of run {run.run_id} ({error}): its id stands in.")
            return run.run_id
    for logger in trainer.loggers:
        if logger.version is not None:
            return f"{logger.name}-{_version(logger.version)}"
    return time.strftime("run-%Y%m%d-%H%M%S-") + os.urandom(2).hex()


def _version(version: Any) -> str:
    return f"version_{version}" if isinstance(version, int) else str(version)
