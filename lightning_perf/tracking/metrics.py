"""Metrics and params to every logger of a trainer; to MLflow off the training thread."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import warn
from lightning_perf.trace.pending import describe, without_credentials
from lightning_perf.tracking.compat import MlflowRun, check_reachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlflow import MlflowClient

    from lightning_perf.trace.worker import Worker

#: MLflow takes at most this many metrics in one call.
_BATCH = 1000
_MOST_WAITING = 20_000
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /:]+")

Entry = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step


def clean_key(key: str) -> str:
    """A key that MLflow takes: one bad key would reject every metric sent with it."""
    return re.sub(r"/{2,}", "/", _REFUSED.sub("_", key)).strip("/")[:250]


def log_to_loggers(loggers: Sequence[Any], metrics: Mapping[str, float], step: int) -> None:
    """Write to loggers other than MLflow's, on the calling thread.

    Args:
        loggers: Lightning loggers.
        metrics: Finite numbers by key.
        step: The logger's step.
    """
    for logger in loggers:
        logger.log_metrics(dict(metrics), step=step)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those that no chart can show."""
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


class MlflowMetrics:
    """Sends metrics to one MLflow run from the worker thread, many in one call.

    A server that is gone costs training nothing: what it did not take waits in a bounded buffer,
    is tried again less and less often, and once more at the end.

    Args:
        run: Where to.
        worker: Whose thread does the sending.
    """

    def __init__(self, run: MlflowRun, worker: Worker) -> None:
        self._run, self._worker = run, worker
        self._waiting: deque[Entry] = deque(maxlen=_MOST_WAITING)
        self._client: MlflowClient | None = None
        self._retry = 0.0
        self._queued = self._warned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand metrics over; returns at once."""
        now = int(time.time() * 1000)
        prefix = self._run.prefix
        self._waiting.extend(
            (clean_key(prefix + key), value, now, step) for key, value in metrics.items()
        )
        self._enqueue()

    def log_params(self, params: Mapping[str, object]) -> None:
        """Hand params over; a param that stands there already keeps its value."""
        texts = {clean_key(key): str(value)[:500] for key, value in params.items()}
        self._worker.submit(lambda: self._send_params(texts), "params to MLflow")

    def _enqueue(self) -> None:
        if not self._queued:
            self._queued = self._worker.submit(self._send, "metrics to MLflow", delay=self._retry)

    def _send(self) -> None:
        self._queued = False
        while self._waiting:
            batch = list(self._waiting)[:_BATCH]
            try:
                self._connect().log_batch(self._run.run_id, metrics=_metrics(batch))
            except Exception as error:
                self._failed(error)
                return
            self._retry = 0.0
            for _ in batch:
                self._waiting.popleft()

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        try:
            self._connect().log_batch(
                self._run.run_id, params=[Param(key, value) for key, value in params.items()]
            )
        except Exception as error:
            self._warn(f"params were not logged ({describe(error)})")

    def _connect(self) -> MlflowClient:
        check_reachable(self._run.tracking_uri)
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(self._run.tracking_uri)
        return self._client

    def _failed(self, error: Exception) -> None:
        self._retry = min(max(2 * self._retry, _FIRST_RETRY), _LAST_RETRY)
        self._warn(f"metrics wait for the server ({describe(error)})")
        self._enqueue()

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            address = without_credentials(self._run.tracking_uri)
            warn(f"MLflow at {address}: {what}. Training goes on.")


def _metrics(entries: Sequence[Entry]) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(key, value, when, step) for key, value, when, step in entries]
