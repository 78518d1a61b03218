"""Reading a run back from MLflow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow import MlflowClient

_LOCAL = Path("mlflow.db")


@dataclass(frozen=True, slots=True)
class Run:
    """One run as it stands in MLflow."""

    run_id: str
    name: str
    tracking_uri: str
    #: MLflow's word: ``RUNNING``, ``FINISHED``, ``FAILED``, ``KILLED`` or ``SCHEDULED``.
    status: str
    metrics: dict[str, float]
    params: dict[str, str]
    #: Paths of all files, below the artifact root.
    artifacts: tuple[str, ...]
    artifact_uri: str


def default_tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or the database that MLflow itself would make here."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_LOCAL}"


def read_run(run_id: str | None, tracking_uri: str) -> Run:
    """Read a run.

    Args:
        run_id: Which one; None for the latest of all experiments.
        tracking_uri: Where MLflow keeps it.

    Raises:
        LookupError: There is no such run.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if tracking_uri == f"sqlite:///{_LOCAL}" and not _LOCAL.exists():
        raise LookupError(f"there is no {_LOCAL} in {Path.cwd()}")  # and reading would make one
    client = MlflowClient(tracking_uri)
    try:
        run = client.get_run(run_id or _latest(client))
    except MlflowException as error:
        raise LookupError(str(error).splitlines()[0]) from error
    return Run(
        run.info.run_id,
        run.info.run_name or run.info.run_id,
        tracking_uri,
        run.info.status,
        dict(run.data.metrics),
        dict(run.data.params),
        tuple(sorted(_files(client, run.info.run_id))),
        run.info.artifact_uri or "",
    )


def _latest(client: MlflowClient) -> str:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    if not found:
        raise LookupError("there is no run yet")
    return str(found[0].info.run_id)


def _files(client: MlflowClient, run_id: str, folder: str | None = None) -> Iterator[str]:
    for entry in client.list_artifacts(run_id, folder):
        if entry.is_dir:
            yield from _files(client, run_id, entry.path)
        else:
            yield entry.path
