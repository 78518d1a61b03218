"""MLflow's client: run, artifacts and tags."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from lightning_perf.errors import without_credentials
from lightning_perf.traces.writer import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlflow import MlflowClient

    from lightning_perf.background.worker import Worker


@dataclass(frozen=True, slots=True)
class MlflowRun:
    """One MLflow run, as every rank needs it to write into it. Pickles."""

    #: Left out of what is printed: it may hold a password.
    tracking_uri: str = field(repr=False)
    run_id: str
    #: What the logger puts in front of metric keys, its joining character included.
    prefix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For files that tell later where an upload belongs, without user names and passwords."""
        return {"tracking_uri": without_credentials(self.tracking_uri), "run_id": self.run_id}


def is_mlflow(logger: Any) -> bool:
    """Whether a logger is Lightning's MLFlowLogger, of either of Lightning's two packages."""
    return any(kind.__name__ == "MLFlowLogger" for kind in type(logger).__mro__)


def mlflow_run(logger: Any) -> MlflowRun | None:
    """The run that an MLFlowLogger of rank 0 writes into.

    The logger has made it by then: Lightning asks for ``experiment`` before set-up.
    """
    run_id = logger.run_id
    if run_id is None:
        return None
    uri = getattr(logger, "_tracking_uri", None)
    if uri is None:
        import mlflow

        uri = mlflow.get_tracking_uri()
    prefix = getattr(logger, "_prefix", "") or ""
    joint = getattr(logger, "LOGGER_JOIN_CHAR", "-")
    return MlflowRun(str(uri), str(run_id), f"{prefix}{joint}" if prefix else "")


def run_name(run: MlflowRun) -> str:
    """The name that MLflow shows for a run. Asks the server."""
    from mlflow import MlflowClient

    check_reachable(run.tracking_uri)
    return str(MlflowClient(run.tracking_uri).get_run(run.run_id).info.run_name or run.run_id)


class Artifacts(NamedTuple):
    """What can be done with the artifacts of one run."""

    #: A local path, and the folder among the artifacts or None.
    log: Callable[[str, str | None], object]
    #: A folder, or None.
    list: Callable[[str | None], Any]
    #: A path among the artifacts, and a local folder; gives the local path.
    download: Callable[[str, str], str]


def artifacts_of(client: MlflowClient, run_id: str) -> Artifacts:
    """The artifacts of a run.

    Before MLflow 3.7 a client looks for those behind a server at the process's own tracking
    address instead of the client's.
    """
    uri = str(client.get_run(run_id).info.artifact_uri)
    if uri.startswith("mlflow-artifacts:"):
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        behind = get_artifact_repository(uri, client.tracking_uri)
        return Artifacts(behind.log_artifact, behind.list_artifacts, behind.download_artifacts)
    return Artifacts(
        partial(client.log_artifact, run_id),
        partial(client.list_artifacts, run_id),
        partial(client.download_artifacts, run_id),
    )


def check_reachable(tracking_uri: str, timeout: float = 3.0) -> None:
    """Find out in seconds that a server is gone, where MLflow's own retries take four minutes.

    Args:
        tracking_uri: Anything but ``http(s)`` passes, and so does what goes through a proxy.
        timeout: Seconds to wait for a connection.

    Raises:
        OSError: Nothing listens there.
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    proxied = urllib.request.getproxies().get(parts.scheme)
    if proxied and not urllib.request.proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), timeout=timeout).close()


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
