"""Reads a run back from MLflow."""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, without_credentials
from lightning_perf.tracking.mlflow import artifacts_of, check_reachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlflow import MlflowClient

    from lightning_perf.tracking.mlflow import Artifacts

_DATABASE = "sqlite:///"
#: The file that `Timings` writes at the end of training; a second one in the run gets a number.
_SUMMARY = re.compile(r"[^/]+/summary(-\d+)?\.json")


@dataclass(frozen=True, slots=True)
class Run:
    """One run as MLflow has it."""

    run_id: str
    name: str
    tracking_uri: str
    #: As in MLflow: ``RUNNING``, ``FINISHED``, ``FAILED``, ``KILLED`` or ``SCHEDULED``.
    status: str
    metrics: dict[str, float]
    params: dict[str, str]
    #: Paths of all files, below the artifact root.
    artifacts: tuple[str, ...]
    artifact_uri: str
    #: What `Timings` wrote at the end of the run; empty without it.
    summary: Mapping[str, Any] = field(default_factory=dict)
    #: The requested metrics as lists of step and value, in the order of steps.
    points: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


def default_tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or MLflow's default database in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{_DATABASE}mlflow.db"


def read_run(run_id: str | None, tracking_uri: str, keys: Sequence[str] = ()) -> Run:
    """Read a run.

    Args:
        run_id: The run; None for the latest of all experiments.
        tracking_uri: The tracking server or database.
        keys: The metrics whose points are read if the run has no summary.

    Raises:
        LookupError: The run does not exist, or MLflow cannot be read.
    """
    # Before the address is checked: where the package is missing, no address helps.
    from mlflow import MlflowClient

    _check_address(tracking_uri)
    try:
        client = MlflowClient(tracking_uri)
        run = client.get_run(run_id or _latest(client))
        files = artifacts_of(client, run.info.run_id)
        paths = tuple(sorted(_paths(files)))
    except LookupError:
        raise
    except Exception as error:  # MLflow, databases and networks raise many kinds
        raise LookupError(describe(error)) from error
    summary = _summary(files, paths)
    metrics = dict(run.data.metrics)
    wanted = () if summary else [key for key in keys if key in metrics]
    return Run(
        run.info.run_id,
        run.info.run_name or run.info.run_id,
        tracking_uri,
        run.info.status,
        metrics,
        dict(run.data.params),
        paths,
        run.info.artifact_uri or "",
        summary,
        {key: _points(client, run.info.run_id, key) for key in wanted},
    )


def _check_address(tracking_uri: str) -> None:
    database = tracking_uri.removeprefix(_DATABASE)
    if database != tracking_uri and not Path(database).exists():
        # MLflow would create it.
        raise LookupError(f"there is no {database} in {Path.cwd()}")
    try:
        check_reachable(tracking_uri)
    except OSError as error:
        address = without_credentials(tracking_uri)
        raise LookupError(f"{address} does not respond ({describe(error)})") from error


def _latest(client: MlflowClient) -> str:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    if not found:
        raise LookupError("there is no run yet")
    return str(found[0].info.run_id)


def _paths(files: Artifacts, folder: str | None = None) -> Iterator[str]:
    for entry in files.list(folder):
        if entry.is_dir:
            yield from _paths(files, entry.path)
        else:
            yield entry.path


def _summary(files: Artifacts, paths: Sequence[str]) -> dict[str, Any]:
    """The latest summary; empty if there is none or it cannot be read."""
    found = [path for path in paths if _SUMMARY.fullmatch(path)]
    with suppress(Exception), tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
        # Longer names have higher numbers.
        path = files.download(max(found, key=lambda path: (len(path), path)), scratch)
        summary = json.loads(Path(path).read_text(encoding="utf-8"))
        return summary if isinstance(summary, dict) else {}
    return {}


def _points(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    points = client.get_metric_history(run_id, key)
    # The last of several values at one step is used.
    return sorted({point.step: point.value for point in points}.items())
