"""Files to MLflow: every rank sends its own, into the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.trace.targets import Target
from lightning_perf.tracking.compat import MlflowRun, artifacts_of, check_reachable

if TYPE_CHECKING:
    from lightning_perf.tracking.compat import Artifacts


def run_target(run: MlflowRun) -> Target:
    """A run as a place to send files to: they become its artifacts.

    Sending raises what MLflow raises; retrying is the trace writer's.

    Args:
        run: Which one.
    """
    artifacts: Artifacts | None = None

    def send(path: Path, remote: str) -> None:
        nonlocal artifacts
        check_reachable(run.tracking_uri)
        artifacts = artifacts or _artifacts(run)
        _send(artifacts, path, PurePosixPath(remote))

    return Target(send, run.as_dict())


def _artifacts(run: MlflowRun) -> Artifacts:
    from mlflow import MlflowClient

    return artifacts_of(MlflowClient(run.tracking_uri), run.run_id)


def _send(artifacts: Artifacts, path: Path, remote: PurePosixPath) -> None:
    folder = str(remote.parent) if remote.parent != PurePosixPath() else None
    if path.name == remote.name:
        artifacts.log(str(path), folder)
        return
    # MLflow names an artifact as the file is named, so another name takes another file.
    with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
        renamed = Path(scratch) / remote.name
        try:
            os.link(path, renamed)
        except OSError:
            shutil.copyfile(path, renamed)
        artifacts.log(str(renamed), folder)
