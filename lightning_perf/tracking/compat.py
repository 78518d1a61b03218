"""What we read of MLflow's and its logger's insides, each with a fallback."""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from lightning_perf.errors import without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlflow import MlflowClient


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
