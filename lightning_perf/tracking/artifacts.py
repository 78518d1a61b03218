"""Files to MLflow: every rank sends its own, into the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.trace.targets import Target
from lightning_perf.tracking.compat import MlflowRun, check_reachable

if TYPE_CHECKING:
    from mlflow import MlflowClient


def run_target(run: MlflowRun) -> Target:
    """A run as a place to send files to: they become its artifacts.

    Sending raises what MLflow raises; retrying is the trace writer's.

    Args:
        run: Which one.
    """
    client: MlflowClient | None = None

    def send(path: Path, remote: str) -> None:
        nonlocal client
        check_reachable(run.tracking_uri)
        client = client or _client(run.tracking_uri)
        _send(client, run.run_id, path, PurePosixPath(remote))

    return Target(send, run.as_dict())


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
