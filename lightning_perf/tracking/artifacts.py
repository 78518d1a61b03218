"""Files to MLflow: every rank sends its own, into the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.tracking.compat import MlflowRun, check_reachable

if TYPE_CHECKING:
    from mlflow import MlflowClient

Upload = Callable[[Path, str], None]


def uploader(runs: Sequence[MlflowRun]) -> Upload | None:
    """A function that sends a file under a remote name to all runs, or None without a run.

    It raises what MLflow raises; retrying is the trace writer's. Call it on a worker thread.
    """
    if not runs:
        return None
    clients: dict[str, MlflowClient] = {}

    def upload(path: Path, remote: str) -> None:
        for run in runs:
            check_reachable(run.tracking_uri)
            if run.tracking_uri not in clients:
                clients[run.tracking_uri] = _client(run.tracking_uri)
            _send(clients[run.tracking_uri], run.run_id, path, PurePosixPath(remote))

    return upload


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(uri)


def _send(client: MlflowClient, run_id: str, path: Path, remote: PurePosixPath) -> None:
    folder = str(remote.parent) if remote.parent != PurePosixPath() else None
    if path.name == remote.name:
        client.log_artifact(run_id, str(path), folder)
        return
    # MLflow names an artifact as the file is named, so another name takes another file.
    with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
        renamed = Path(scratch) / remote.name
        try:
            os.link(path, renamed)
        except OSError:
            shutil.copyfile(path, renamed)
        client.log_artifact(run_id, str(renamed), folder)
