"""Metrics and params to every logger of a trainer; to MLflow off the training thread."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn, without_credentials
from lightning_perf.tracking.mlflow import MlflowRun, check_reachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlflow import MlflowClient

    from lightning_perf.background.worker import Worker

#: MLflow takes at most this many metrics in one call.
_BATCH = 1000
#: So many are sent without a pause.
_HURRY = 2 * _BATCH
_MOST_WAITING = 20_000
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
#: Seconds between calls, and at least so many times what the last one took: each one holds Python's
#: lock for some 20 ms, more than many a step takes.
_PAUSE, _PAUSES, _LONGEST_PAUSE = 1.0, 20.0, 10.0
_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /:]+")

Entry = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step


def clean_key(key: str) -> str:
    """A key that MLflow takes: one bad key would reject every metric sent with it."""
    return re.sub(r"/{2,}", "/", _REFUSED.sub("_", key)).strip("/")[:250]


class OtherLoggers:
    """Loggers other than MLflow's, written to on the calling thread.

    One that fails is said once; the others get theirs, and it is tried again the next time.

    Args:
        loggers: Lightning loggers.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)
        self._said: set[int] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write finite numbers by key."""
        for logger in self._loggers:
            try:
                logger.log_metrics(dict(metrics), step=step)
            except Exception as error:
                if id(logger) not in self._said:
                    self._said.add(id(logger))
                    name = type(logger).__name__
                    warn(f"{name} took no metrics ({describe(error)}). Training goes on.")


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
        self._waiting: deque[Entry] = deque()
        self._client: MlflowClient | None = None
        self._retry = 0.0
        # When the next call may be made, on time.monotonic.
        self._due = 0.0
        self._lost = 0
        self._queued = self._hurried = False
        self._said: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand metrics over; returns at once."""
        now = int(time.time() * 1000)
        prefix = self._run.prefix
        for key, value in metrics.items():
            if len(self._waiting) >= _MOST_WAITING:
                self._lost += 1
            else:
                self._waiting.append((clean_key(prefix + key), value, now, step))
        self._enqueue()
        if len(self._waiting) >= _HURRY and not self._retry and not self._hurried:
            self._hurried = self._worker.submit(self._send, "metrics to MLflow")

    def log_params(self, params: Mapping[str, object]) -> None:
        """Hand params over; a param that stands there already keeps its value."""
        texts = {clean_key(key): str(value)[:500] for key, value in params.items()}
        self._worker.submit(lambda: self._send_params(texts), "params to MLflow")

    def flush(self) -> None:
        """Try once more to send what waits, now."""
        self._worker.submit(self._send, "metrics to MLflow")

    def tell_lost(self) -> None:
        """Say how many metrics did not arrive, once the worker has stopped."""
        lost = len(self._waiting) + self._lost
        if lost:
            address = without_credentials(self._run.tracking_uri)
            warn(f"{lost} metrics did not reach MLflow at {address} (run {self._run.run_id}).")

    def _enqueue(self) -> None:
        if self._queued:
            return
        self._queued = True  # before the job, which sets it back
        delay = max(self._retry, self._due - time.monotonic())
        if not self._worker.submit(self._send, "metrics to MLflow", delay=delay):
            self._queued = False

    def _send(self) -> None:
        self._queued = self._hurried = False
        # What comes meanwhile waits for the next time.
        for _ in range(0, len(self._waiting), _BATCH):
            began = time.monotonic()
            self._due = began + _PAUSE
            batch = list(islice(self._waiting, _BATCH))
            try:
                self._connect().log_batch(self._run.run_id, metrics=_metrics(batch))
            except Exception as error:
                self._retry = min(max(2 * self._retry, _FIRST_RETRY), _LAST_RETRY)
                self._say(f"metrics wait for the server ({describe(error)})")
                self._enqueue()
                return
            now = time.monotonic()
            self._retry = 0.0
            self._due = now + min(max(_PAUSE, _PAUSES * (now - began)), _LONGEST_PAUSE)
            for _ in batch:
                self._waiting.popleft()
        if self._waiting:
            self._enqueue()

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        try:
            client = self._connect()
            # MLflow refuses to change a param, and all that is sent with it.
            there = client.get_run(self._run.run_id).data.params
            new = [Param(key, value) for key, value in params.items() if key not in there]
            client.log_batch(self._run.run_id, params=new)
        except Exception as error:
            self._say(f"params were not logged ({describe(error)})")

    def _connect(self) -> MlflowClient:
        check_reachable(self._run.tracking_uri)
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(self._run.tracking_uri)
        return self._client

    def _say(self, what: str) -> None:
        kind = what.split()[0]
        if kind not in self._said:
            self._said.add(kind)
            address = without_credentials(self._run.tracking_uri)
            warn(f"MLflow at {address}: {what}. Training goes on.")


def _metrics(entries: Sequence[Entry]) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(key, value, when, step) for key, value, when, step in entries]
