"""MLflow: one run with its client, artifacts and tags."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from typing_extensions import override

from lightning_perf.errors import describe, without_credentials
from lightning_perf.tracking.summary import is_ours
from lightning_perf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlflow import MlflowClient

    from lightning_perf.background.worker import Worker


#: The tag that MLflow shows as the description of a run.
_DESCRIPTION = "mlflow.note.content"


@dataclass(frozen=True)
class MlflowRun(Tracker):
    """One MLflow run, and the connection of this process to it. Pickles without the connection.

    Methods may wait for the server: call them on the worker thread. They raise what MLflow raises,
    and `OSError` within seconds if the server is unreachable.
    """

    #: Not in the repr, since it may hold a password.
    tracking_uri: str = field(repr=False)
    run_id: str
    #: The logger's prefix of metric keys, with its joining character.
    prefix: str = ""

    def __reduce__(self) -> tuple[type[MlflowRun], tuple[str, str, str]]:
        return MlflowRun, (self.tracking_uri, self.run_id, self.prefix)

    @classmethod
    @override
    def of(cls, logger: Any) -> Self | None:
        if not is_mlflow(logger) or logger.run_id is None:
            return None
        uri = getattr(logger, "_tracking_uri", None)
        if uri is None:
            import mlflow

            uri = mlflow.get_tracking_uri()
        prefix = getattr(logger, "_prefix", "") or ""
        joint = getattr(logger, "LOGGER_JOIN_CHAR", "-")
        return cls(str(uri), str(logger.run_id), f"{prefix}{joint}" if prefix else "")

    @classmethod
    @override
    def at(cls, address: Mapping[str, str]) -> Self | None:
        if not {"tracking_uri", "run_id"} <= set(address):
            return None
        return cls(address["tracking_uri"], address["run_id"])

    @property
    @override
    def address(self) -> dict[str, str]:
        return {"tracking_uri": without_credentials(self.tracking_uri), "run_id": self.run_id}

    @override
    def problem(self) -> str | None:
        return tracking_problem(self.tracking_uri, "; try --tracking-uri")

    def client(self) -> MlflowClient:
        """MLflow's client, after a check that the server is reachable."""
        check_reachable(self.tracking_uri)
        return self._client

    def name(self) -> str:
        """The run's name in MLflow; its id if it has none."""
        return str(self.client().get_run(self.run_id).info.run_name or self.run_id)

    def tags(self) -> dict[str, str]:
        """The run's tags."""
        return dict(self.client().get_run(self.run_id).data.tags)

    def describe(self, text: str) -> None:
        """Make a text the run's description, unless the user wrote one."""
        before = self.tags().get(_DESCRIPTION, "")
        if not before or is_ours(before):
            self._client.set_tag(self.run_id, _DESCRIPTION, text)

    @override
    def upload(self, path: Path, remote: str) -> None:
        self.client()
        folder, _, name = remote.rpartition("/")
        if path.name == name:
            self._artifacts.log(str(path), folder or None)
            return
        # MLflow names an artifact after the local file.
        with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
            renamed = Path(scratch, name)
            try:
                os.link(path, renamed)
            except OSError:
                shutil.copyfile(path, renamed)
            self._artifacts.log(str(renamed), folder or None)

    @cached_property
    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    @cached_property
    def _artifacts(self) -> Artifacts:
        return artifacts_of(self._client, self.run_id)


def is_mlflow(logger: Any) -> bool:
    """Whether a logger is Lightning's MLFlowLogger, of either of Lightning's two packages."""
    return any(kind.__name__ == "MLFlowLogger" for kind in type(logger).__mro__)


class Artifacts(NamedTuple):
    """Operations on the artifacts of one run."""

    #: Uploads a local path to an artifact folder, or None for the root.
    log: Callable[[str, str | None], object]
    #: Lists an artifact folder, or None for the root.
    list: Callable[[str | None], Any]
    #: Downloads an artifact into a local folder; returns the local path.
    download: Callable[[str, str], str]


def artifacts_of(client: MlflowClient, run_id: str) -> Artifacts:
    """The artifacts of a run.

    Before MLflow 3.7, a client sends those behind a server to the process's default tracking
    address instead of its own.
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


def tracking_problem(tracking_uri: str, remedy: str = "") -> str | None:
    """Why MLflow cannot be read at an address, found within seconds; None if nothing is known.

    Args:
        tracking_uri: The tracking server or database.
        remedy: What to do about a database that does not exist; it follows the message.
    """
    database = tracking_uri.removeprefix("sqlite:///")
    if database != tracking_uri and not Path(database).exists():  # MLflow would create it
        return f"there is no {database} in {Path.cwd()}{remedy}"
    try:
        check_reachable(tracking_uri)
    except OSError as error:
        return f"{without_credentials(tracking_uri)} does not respond ({describe(error)})"
    return None


def check_reachable(tracking_uri: str, timeout: float = 3.0) -> None:
    """Detect an unreachable server in seconds; MLflow's own retries take four minutes.

    Args:
        tracking_uri: Only ``http(s)`` without a proxy is checked.
        timeout: Seconds to wait for a connection.

    Raises:
        OSError: The server does not accept connections.
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    proxied = urllib.request.getproxies().get(parts.scheme)
    if proxied and not urllib.request.proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), timeout=timeout).close()


#: Seconds between two requests for tags, however often they are read.
INTERVAL = 5.0


class TagReader:
    """Fetches the tags of a run on the worker thread, and only while they are read.

    Args:
        run: None for no run, which has no tags.
        worker: Runs the requests.
    """

    def __init__(self, run: MlflowRun | None, worker: Worker) -> None:
        self._run, self._worker = run, worker
        self._tags: Mapping[str, str] = {}
        self._due = 0.0
        self._fetching = False

    def read(self) -> Mapping[str, str]:
        """The tags of the last request; empty if the server did not respond."""
        if (run := self._run) is not None and not self._fetching and time.monotonic() >= self._due:
            self._fetching = self._worker.submit(partial(self._fetch, run), "tags from MLflow")
        return self._tags

    def _fetch(self, run: MlflowRun) -> None:
        try:
            self._tags = run.tags()
        except Exception:
            self._tags = {}
        finally:
            self._due = time.monotonic() + INTERVAL
            self._fetching = False
