"""The tags of an MLflow run as last heard, without waiting to hear."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lightning_perf.tracking.compat import MlflowRun, check_reachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlflow import MlflowClient

    from lightning_perf.trace.worker import Worker

#: Seconds between two questions to the server, however often the answer is asked for.
INTERVAL = 5.0


class TagReader:
    """Asks on the worker thread, and only if somebody reads.

    Args:
        run: Whose tags, or None for no run: there are no tags then.
        worker: Whose thread asks.
    """

    def __init__(self, run: MlflowRun | None, worker: Worker) -> None:
        self._run, self._worker = run, worker
        self._tags: Mapping[str, str] = {}
        self._due = 0.0
        self._asking = False
        self._client: MlflowClient | None = None

    def read(self) -> Mapping[str, str]:
        """The tags as last heard; a server that does not answer leaves none."""
        if self._run is not None and not self._asking and time.monotonic() >= self._due:
            self._asking = self._worker.submit(self._ask, "tags from MLflow")
        return self._tags

    def _ask(self) -> None:
        try:
            self._tags = self._fetch()
        except Exception:
            self._tags = {}
        finally:
            self._due = time.monotonic() + INTERVAL
            self._asking = False

    def _fetch(self) -> dict[str, str]:
        from mlflow import MlflowClient

        assert self._run is not None  # or nobody would have been asked
        check_reachable(self._run.tracking_uri)
        if self._client is None:
            self._client = MlflowClient(self._run.tracking_uri)
        return dict(self._client.get_run(self._run.run_id).data.tags)
