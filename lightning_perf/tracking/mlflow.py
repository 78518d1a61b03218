"""MLflow: one run with its artifacts, metrics, params and tags."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import tempfile
import time
import urllib.request
from collections import deque
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from inspect import signature
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from typing_extensions import override

from lightning_perf.errors import DAMAGE, WarningDigest, describe, warn, without_credentials
from lightning_perf.files import parsed
from lightning_perf.tracking.summary import (
    FILE_NAME,
    SummaryError,
    description,
    is_ours,
    read_summary,
)
from lightning_perf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlflow import MlflowClient

    from lightning_perf.background import Worker
    from lightning_perf.tracking.summary import Summary

_CONNECT_SECONDS = 3.0
#: Schemes of artifacts that MLflow requests from a server, with the user's password.
_SERVERS = ("mlflow-artifacts", "http", "https", "dbfs", "databricks")
#: The tag that MLflow shows as the description of a run.
_DESCRIPTION = "mlflow.note.content"
#: The tag with the path of the summary among the artifacts: others may have files of this name.
SUMMARY_TAG = "lightning_perf_summary"
#: The tag with the seconds that the run's processes took, and those of steps that were kept.
_JOB_TAG = "lightning_perf_job"
#: Its numbers, at most, and seconds between two requests that carry it alone.
_NUMBERS, _MOST, _NOTE_INTERVAL = ("seen", "held_seconds", "kept_seconds", "goodput"), 1e11, 30.0
#: MLflow's status by that of a summary, if the run has ended.
_ENDS = {"finished": "FINISHED", "stopped by an exception": "FAILED"}


@dataclass(frozen=True)
class MlflowRun(Tracker):
    """One MLflow run.

    Methods may wait for the server: call them on the worker thread. They raise what MLflow raises,
    and `OSError` within seconds if the server is unreachable.
    """

    #: Not in the repr, since it may hold a password.
    tracking_uri: str = field(repr=False)
    run_id: str
    #: The logger's prefix of metric keys, with its joining character.
    prefix: str = ""

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

    def files_place(self, trusted: bool) -> str:
        """Where the run's files are sent as a URL, if that is not where its server decides.

        A run decides itself: whoever made it may have named any folder of this machine, or another
        server, which would get the credentials. Those of a database that is ``trusted`` may be in
        any folder; those of the default one are in the current folder.
        """
        from mlflow.utils.file_utils import local_file_uri_to_path

        place = str(self.client().get_run(self.run_id).info.artifact_uri or "")
        scheme = urlsplit(place).scheme
        if scheme in _SERVERS:
            return place if is_on_other_server(place, self.tracking_uri) else ""
        if scheme not in ("", "file"):
            return "" if trusted else place
        if trusted and urlsplit(self.tracking_uri).scheme not in ("http", "https"):
            return ""
        # As MLflow reads it: percent signs are decoded, also without a scheme.
        path: str = local_file_uri_to_path(place)  # type: ignore[no-untyped-call]
        return f"file://{Path(path).resolve()}"

    def client(self) -> MlflowClient:
        """MLflow's client, after a check that the server is reachable."""
        check_reachable(self.tracking_uri)
        return _client_of(self.tracking_uri)

    def name(self) -> str:
        """The run's name in MLflow; its id if it has none."""
        return str(self.client().get_run(self.run_id).info.run_name or self.run_id)

    def tags(self) -> dict[str, str]:
        """The run's tags."""
        return dict(self.client().get_run(self.run_id).data.tags)

    def _describe(self, text: str) -> None:
        """Make a text the run's description, unless the user wrote one."""
        before = self.tags().get(_DESCRIPTION, "")
        if not before or is_ours(before):
            self.client().set_tag(self.run_id, _DESCRIPTION, text)

    @override
    def upload(self, path: Path, remote: str) -> None:
        client = self.client()
        folder, _, name = remote.rpartition("/")
        if name.endswith(FILE_NAME) and (
            # That of a test does not replace that of a fit.
            name == FILE_NAME or PurePosixPath(self.tags().get(SUMMARY_TAG, "")).name != FILE_NAME
        ):  # together, so that the description waits and is sent later, too
            with suppress(SummaryError):  # another file of this name
                self._describe(description(read_summary(path)))
                client.set_tag(self.run_id, SUMMARY_TAG, remote)
        if path.name == name:
            client.log_artifact(self.run_id, str(path), folder or None)
            return
        # MLflow names an artifact after the local file.
        with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
            renamed = Path(scratch, name)
            try:
                os.link(path, renamed)
            except OSError:
                shutil.copyfile(path, renamed)
            client.log_artifact(self.run_id, str(renamed), folder or None)

    @override
    def upload_later(self, path: Path, remote: str) -> None:
        """Upload a file; the summary of a run that ended while the server was away ends the run."""
        use_for_artifacts(self.tracking_uri)
        self.upload(path, remote)
        if remote.endswith(FILE_NAME):
            with suppress(SummaryError):  # another file of this name
                summary = read_summary(path)
                self._end(summary)
                self._note_job(summary)

    def _end(self, summary: Summary) -> None:
        status, client = _ENDS.get(summary["status"]), self.client()
        if status and client.get_run(self.run_id).info.status == "RUNNING":
            ended = int(datetime.fromisoformat(summary["ended"]).timestamp() * 1000)
            with redirect_stdout(io.StringIO()):  # MLflow prints the address with its password
                client.set_terminated(self.run_id, status, ended)

    def _note_job(self, summary: Summary) -> None:
        """Set the tag of the run's time from a summary, unless the tag is later."""
        there = job_of(self.tags())
        with suppress(*DAMAGE):  # no training, or a file of others
            found = summary["goodput"]
            last = summary.get("ended") or summary["updated"]
            note = {
                "job": found["job"], "seen": datetime.fromisoformat(last).timestamp(),
                "held_seconds": found.get("run_held_seconds", found["held_seconds"]),
                "kept_seconds": found.get("run_kept_seconds", found["kept_seconds"]),
                "goodput": found["share"], "process": summary["process"],
            }  # fmt: skip
            text = _job_text(note, _before(there, note))
            if there.get("seen", 0.0) >= note["seen"]:
                return
        self.client().set_tag(self.run_id, _JOB_TAG, text)


def job_of(tags: Mapping[str, str]) -> dict[str, Any]:
    """What the processes of a run have noted with `MlflowMetrics.note`; empty without that."""
    with suppress(*DAMAGE):  # others may have written it
        found: dict[str, Any] = parsed(tags[_JOB_TAG])
        numbers = [found[key] for key in _NUMBERS]
        if all(type(each) in (int, float) and 0 <= each <= _MOST for each in numbers):
            return found | {"process": dict(found["process"])}
    return {}


def _before(there: Mapping[str, Any], note: Mapping[str, Any]) -> Sequence[float]:
    """Seconds of a run, and those that were kept, of jobs before that of a note.

    Another machine that does not see the files of this one begins a job of its own.
    """
    if there and there.get("job") != note["job"]:
        return there["held_seconds"], there["kept_seconds"]
    found: Sequence[float] = there.get("before", (0.0, 0.0))
    return found


def _job_text(note: Mapping[str, Any], before: Sequence[float]) -> str:
    held, kept = before
    sums = {
        "held_seconds": held + note["held_seconds"], "kept_seconds": kept + note["kept_seconds"],
    }  # fmt: skip
    return json.dumps({**note, **sums, "before": before})


@cache
def _client_of(tracking_uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def use_for_artifacts(tracking_uri: str) -> None:
    """Set the address at which MLflow 2 looks for the files of a server, whatever its client's is.

    Only for commands: it is a global setting of MLflow.
    """
    import mlflow
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if "tracking_uri" not in signature(get_artifact_repository).parameters:
        mlflow.set_tracking_uri(tracking_uri)


def is_on_other_server(artifact_uri: str, tracking_uri: str) -> bool:
    """Whether a run's files are on another server than its own, which would get the credentials."""
    place, server = urlsplit(artifact_uri), urlsplit(tracking_uri)
    if place.scheme not in _SERVERS or not place.netloc:
        return False
    return (place.hostname, place.port) != (server.hostname, server.port)


def is_default_database(tracking_uri: str) -> bool:
    """Whether this is MLflow's default database, in the current folder."""
    found = re.fullmatch(r"sqlite:///([^?]+)", tracking_uri)
    return found is not None and Path(found[1]).resolve() == Path.cwd() / "mlflow.db"


def is_mlflow(logger: Any) -> bool:
    """Whether a logger is Lightning's MLFlowLogger, of either of Lightning's two packages."""
    return any(kind.__name__ == "MLFlowLogger" for kind in type(logger).__mro__)


def tracking_problem(tracking_uri: str, remedy: str = "") -> str | None:
    """Why MLflow cannot be read at an address, found within seconds; None if nothing is known."""
    database = re.match(r"sqlite:///([^?]+)", tracking_uri)
    if database and not Path(database[1]).exists():  # MLflow would create it
        return f"there is no {database[1]} in {Path.cwd()}{remedy}"
    try:
        check_reachable(tracking_uri)
    except OSError as error:
        return f"{without_credentials(tracking_uri)} does not respond ({describe(error)})"
    except ValueError:  # of the port or the host name
        return f"{without_credentials(tracking_uri)} is not a valid address"
    return None


def check_reachable(tracking_uri: str) -> None:
    """Raise `OSError` in seconds if a server does not accept connections.

    MLflow's own retries take four minutes. Addresses behind a proxy are not checked.

    Raises:
        ValueError: The address names no host, or no valid port.
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # whose message may have a part of the password
        raise ValueError(f"{without_credentials(tracking_uri)} has no valid port") from None
    if not parts.hostname:
        raise ValueError(f"{without_credentials(tracking_uri)} names no host")
    proxied = urllib.request.getproxies().get(parts.scheme)
    if proxied and not urllib.request.proxy_bypass(parts.hostname):
        return
    socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()


#: MLflow's limits: metrics of one call, and characters of a param.
_BATCH = 1000
#: Characters of a param's value at most.
LONGEST_PARAM = 6000
_MOST_WAITING = 20_000
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0
#: Seconds between calls, and the pause as a multiple of the last call's duration: a call holds the
#: GIL for about 20 ms, which is longer than a step of small models.
_PAUSE, _PAUSE_FACTOR, _LONGEST_PAUSE = 1.0, 20.0, 10.0
_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /:]+")


#: MLflow's codes of an error that another attempt does not mend.
_INVALID = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def clean_key(key: str) -> str:
    """A valid key: MLflow rejects all metrics of a call if one key is invalid.

    A key must be a normal path, which has no empty part and no parts ``.`` and ``..``.
    """
    parts = _REFUSED.sub("_", key)[:250].split("/")
    clean = "/".join(part for part in parts if part not in ("", ".", ".."))
    return re.sub(r"^\.{2,}", "_", clean) or "_"


class MlflowMetrics:
    """Sends metrics to one MLflow run from the worker thread, many in one call.

    While the server is unreachable, metrics wait in a bounded buffer and are retried with
    exponential backoff, and once more at the end of the run.
    """

    def __init__(self, run: MlflowRun, worker: Worker) -> None:
        self._run, self._worker = run, worker
        # Key, value, milliseconds since the epoch, and step: the arguments of MLflow's Metric.
        self._waiting: deque[tuple[str, float, int, int]] = deque()
        self._retry = 0.0
        # The earliest time of the next call, on time.monotonic.
        self._due = 0.0
        self._lost = 0
        self._queued = False
        # What `note` got and was not sent; when it is sent without metrics; and the seconds of
        # other jobs of this run, once they are known.
        self._note: dict[str, Any] = {}
        self._note_due = 0.0
        self._before: Sequence[float] | None = None
        # Keys that the server does not take.
        self._refused: set[str] = set()
        self._digest = WarningDigest()

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

    def note(self, content: Mapping[str, Any]) -> None:
        """Set the tag of this run's time with the next metrics, or within half a minute.

        ``content`` has the numbers of `_NUMBERS`, up to the latest attempt of a ``job``, and its
        ``process``.
        """
        self._note = dict(content)
        if time.monotonic() >= self._note_due:
            self._enqueue()

    def log_params(self, params: Mapping[str, object]) -> None:
        """Queue params; a param that the run already has keeps its value."""
        texts = {clean_key(key): str(value)[:LONGEST_PARAM] for key, value in params.items()}
        self._worker.submit(partial(self._send_params, texts), "params to MLflow")

    def flush(self) -> None:
        """Send the waiting metrics now."""
        self._worker.submit(self._send, "metrics to MLflow")

    def warn_lost(self) -> None:
        """Warn about metrics that were not sent. Call it after the worker has stopped."""
        lost = len(self._waiting) + self._lost
        if lost:
            address = self._run.address["tracking_uri"]
            warn(f"{lost} metrics did not reach MLflow at {address} (run {self._run.run_id}).")

    def _enqueue(self) -> None:
        if self._queued:
            return
        self._queued = True  # before submitting the job, which resets it
        delay = max(self._retry, self._due - time.monotonic())
        if not self._worker.submit(self._send, "metrics to MLflow", delay=delay):
            self._queued = False

    def _send(self) -> None:
        self._queued = False
        # Metrics logged in the meantime wait for the next job.
        for _ in range(0, max(len(self._waiting), bool(self._note)), _BATCH):
            began = time.monotonic()
            self._due = began + _PAUSE
            batch = list(islice(self._waiting, _BATCH))
            try:
                self._deliver(batch)
            except Exception as error:
                self._retry = min(max(2 * self._retry, _FIRST_RETRY), _LAST_RETRY)
                self._warn("metrics", f"metrics wait for the server ({describe(error)})")
                self._enqueue()
                return
            now = time.monotonic()
            self._retry = 0.0
            self._due = now + min(max(_PAUSE, _PAUSE_FACTOR * (now - began)), _LONGEST_PAUSE)
            for _ in batch:
                self._waiting.popleft()
        if self._waiting:
            self._enqueue()

    def _deliver(self, batch: Sequence[tuple[str, float, int, int]]) -> None:
        """Send metrics in one call; those that the server calls invalid are dropped alone."""
        from mlflow import MlflowException
        from mlflow.entities import Metric, RunTag

        client, run_id = self._run.client(), self._run.run_id
        batch = [entry for entry in batch if entry[0] not in self._refused]
        tags = [RunTag(_JOB_TAG, self._job_text(note))] if (note := self._note) else []
        try:
            if batch or tags:
                metrics = [Metric(*entry) for entry in batch]
                client.log_batch(run_id, metrics=metrics, tags=tags)
            self._note_due = time.monotonic() + _NOTE_INTERVAL
            if self._note is note:
                self._note = {}
        except MlflowException as error:
            active = client.get_run(run_id).info.lifecycle_stage == "active"
            if error.error_code not in _INVALID or not (active and batch):
                raise
            if len(keys := sorted({entry[0] for entry in batch})) > 1:
                half = set(keys[: len(keys) // 2])
                for side in (True, False):
                    self._deliver([entry for entry in batch if (entry[0] in half) is side])
                return
            self._refused.update(keys)
            self._warn("key", f"the metric {keys[0]!r} is refused and left out ({describe(error)})")

    def _job_text(self, note: Mapping[str, Any]) -> str:
        if self._before is None:
            self._before = _before(job_of(self._run.tags()), note)
        return _job_text(note, self._before)

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        try:
            client = self._run.client()
            # MLflow refuses the whole call if a param would change.
            there = client.get_run(self._run.run_id).data.params
            new = [Param(key, value) for key, value in params.items() if key not in there]
            client.log_batch(self._run.run_id, params=new)
        except Exception as error:
            self._warn("params", f"the params did not arrive ({describe(error)})")

    def _warn(self, kind: str, problem: str) -> None:
        address = self._run.address["tracking_uri"]
        self._digest.once(kind, f"MLflow at {address}: {problem}. Training continues.")


#: Seconds between two requests for tags, however often they are read.
INTERVAL = 5.0


class TagReader:
    """Fetches the tags of a run on the worker thread while they are read."""

    def __init__(self, run: MlflowRun, worker: Worker) -> None:
        self._run, self._worker = run, worker
        self._tags: Mapping[str, str] = {}
        self._due = 0.0
        self._fetching = False

    def read(self) -> Mapping[str, str]:
        """The tags of the last request; empty if the server did not respond."""
        if not self._fetching and time.monotonic() >= self._due:
            self._fetching = self._worker.submit(self._fetch, "tags from MLflow")
        return self._tags

    def _fetch(self) -> None:
        try:
            self._tags = self._run.tags()
        except Exception:
            self._tags = {}
        finally:
            self._due = time.monotonic() + INTERVAL
            self._fetching = False
