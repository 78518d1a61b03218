"""Metrics and params to all loggers of a trainer; to MLflow from the worker thread."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn, without_credentials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.background.worker import Worker
    from lightning_perf.tracking.mlflow import MlflowRun

#: MLflow's limits: metrics of one call, and characters of a param.
_BATCH, _LONGEST_PARAM = 1000, 6000
#: The number of waiting metrics that are sent without a pause.
_URGENT = 2 * _BATCH
_MOST_WAITING = 20_000
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
#: Seconds between calls, and the pause as a multiple of the last call's duration: a call holds the
#: GIL for about 20 ms, which is longer than a step of small models.
_PAUSE, _PAUSE_FACTOR, _LONGEST_PAUSE = 1.0, 20.0, 10.0
_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /:]+")

Entry = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step


def clean_key(key: str) -> str:
    """A valid MLflow key: an invalid one makes MLflow reject all metrics of the call."""
    return re.sub(r"/{2,}", "/", _REFUSED.sub("_", key)).strip("/")[:250]


class OtherLoggers:
    """Loggers other than MLflow's, called on the calling thread.

    A logger that fails causes one warning, and is called again with the next metrics.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)
        self._warned: set[int] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log finite metrics."""
        for logger in self._loggers:
            try:
                logger.log_metrics(dict(metrics), step=step)
            except Exception as error:
                if id(logger) not in self._warned:
                    self._warned.add(id(logger))
                    name = type(logger).__name__
                    warn(f"{name} did not accept metrics ({describe(error)}). Training continues.")


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinity, as floats."""
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


class MlflowMetrics:
    """Sends metrics to one MLflow run from the worker thread, many in one call.

    While the server is unreachable, metrics wait in a bounded buffer and are retried with
    exponential backoff, and once more at the end of the run.

    Args:
        run: The run.
        worker: Runs the calls.
    """

    def __init__(self, run: MlflowRun, worker: Worker) -> None:
        self._run, self._worker = run, worker
        self._waiting: deque[Entry] = deque()
        self._retry = 0.0
        # The earliest time of the next call, on time.monotonic.
        self._due = 0.0
        self._lost = 0
        self._queued = self._urgent_queued = False
        self._warned: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue metrics without waiting."""
        now = int(time.time() * 1000)  # noqa: TID251 (MLflow's time axis)
        prefix = self._run.prefix
        for key, value in metrics.items():
            if len(self._waiting) >= _MOST_WAITING:
                self._lost += 1
            else:
                self._waiting.append((clean_key(prefix + key), value, now, step))
        self._enqueue()
        if len(self._waiting) >= _URGENT and not self._retry and not self._urgent_queued:
            self._urgent_queued = self._worker.submit(self._send, "metrics to MLflow")

    def log_params(self, params: Mapping[str, object]) -> None:
        """Queue params; a param that the run already has keeps its value."""
        texts = {clean_key(key): str(value)[:_LONGEST_PARAM] for key, value in params.items()}
        self._worker.submit(lambda: self._send_params(texts), "params to MLflow")

    def describe(self, text: str) -> None:
        """Queue the description of the run."""
        self._worker.submit(lambda: self._send_description(text), "description to MLflow")

    def flush(self) -> None:
        """Send the waiting metrics now."""
        self._worker.submit(self._send, "metrics to MLflow")

    def warn_lost(self) -> None:
        """Warn about metrics that were not sent. Call it after the worker has stopped."""
        lost = len(self._waiting) + self._lost
        if lost:
            address = without_credentials(self._run.tracking_uri)
            warn(f"{lost} metrics did not reach MLflow at {address} (run {self._run.run_id}).")

    def _enqueue(self) -> None:
        if self._queued:
            return
        self._queued = True  # before submitting the job, which resets it
        delay = max(self._retry, self._due - time.monotonic())
        if not self._worker.submit(self._send, "metrics to MLflow", delay=delay):
            self._queued = False

    def _send(self) -> None:
        self._queued = self._urgent_queued = False
        # Metrics logged in the meantime wait for the next job.
        for _ in range(0, len(self._waiting), _BATCH):
            began = time.monotonic()
            self._due = began + _PAUSE
            batch = list(islice(self._waiting, _BATCH))
            try:
                self._run.client().log_batch(self._run.run_id, metrics=_metrics(batch))
            except Exception as error:
                self._retry = min(max(2 * self._retry, _FIRST_RETRY), _LAST_RETRY)
                self._warn(f"metrics wait for the server ({describe(error)})")
                self._enqueue()
                return
            now = time.monotonic()
            self._retry = 0.0
            self._due = now + min(max(_PAUSE, _PAUSE_FACTOR * (now - began)), _LONGEST_PAUSE)
            for _ in batch:
                self._waiting.popleft()
        if self._waiting:
            self._enqueue()

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        try:
            client = self._run.client()
            # MLflow refuses the whole call if a param would change.
            there = client.get_run(self._run.run_id).data.params
            new = [Param(key, value) for key, value in params.items() if key not in there]
            client.log_batch(self._run.run_id, params=new)
        except Exception as error:
            self._warn(f"params were not logged ({describe(error)})")

    def _send_description(self, text: str) -> None:
        try:
            self._run.describe(text)
        except Exception as error:
            self._warn(f"the description was not written ({describe(error)})")

    def _warn(self, what: str) -> None:
        kind = what.split()[0]
        if kind not in self._warned:
            self._warned.add(kind)
            address = without_credentials(self._run.tracking_uri)
            warn(f"MLflow at {address}: {what}. Training continues.")


def _metrics(entries: Sequence[Entry]) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(key, value, when, step) for key, value, when, step in entries]
