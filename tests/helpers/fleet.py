"""Many runs in MLflow, as lightning_perf leaves them."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from lightning_perf.tracking.mlflow import SUMMARY_TAG
from lightning_perf.tracking.summary import text_of

#: What `always_on()` logs of training, besides verdicts.
KEYS = [
    "throughput/batches_per_sec", "throughput/samples_per_sec", "throughput/device/flops_per_sec",
    "time/total", "time/val", "time/remaining_estimate", "mfu", "hfu", "batch_flops",
    "untracked_operations", "timings/dataloader_next", "timings/to_device", "timings/forward",
    "timings/backward", "timings/optimizer_step", "timings/step_lr_schedulers",
    "timings/from_device", "timings/reduce_metrics", "timings/callbacks", "timings/logging",
    "timings/checkpoint", "timings/validation", "timings/other", "memory/rss",
    "system/node_0/cpu_util_simple", "system/node_0/cpu_iowait", "system/node_0/free_memory",
    "system/node_0/process_cpu",
]  # fmt: skip


def summary_of(name: str, status: str = "finished", **sections: Any) -> dict[str, Any]:
    """A summary with the sections that are given, of a run of an hour."""
    window = {"first": 1, "last": 1000, "batches": 1000, "seconds": 3600.0}
    content: dict[str, Any] = {
        "version": 2, "run": name, "status": status, "setup": {"world_size": 8},
        "stages": {"train": {"whole_run": {**window, "throughput": {"mfu": 0.31}}}},
    }  # fmt: skip
    return content | sections


def add_run(
    client: MlflowClient,
    experiment: str,
    name: str,
    *,
    hours: float,
    ago: float = 0.0,
    shares: dict[str, float] | None = None,
    status: str = "FINISHED",
    summary: dict[str, Any] | None = None,
    folder: Path | None = None,
    metrics: dict[str, float] | None = None,
    job: dict[str, Any] | None = None,
) -> str:
    """Add a run with 8 devices; returns its id.

    Args:
        client: Of a server or a database.
        experiment: The id of the experiment.
        name: The run's name.
        hours: How long it took.
        ago: Hours since its end or its last metric.
        shares: The share of its time by verdict.
        status: Its state in MLflow.
        summary: What it has uploaded, if anything.
        folder: Where that is written first.
        metrics: Other values than 0.1.
        job: What its attempts have noted, if anything.
    """
    now = int((time.time() - ago * 3600) * 1000)
    run = client.create_run(experiment, now - int(hours * 3.6e6), run_name=name).info
    verdicts = {f"diagnosis/{code}": share for code, share in (shares or {}).items()}
    values = dict.fromkeys(KEYS, 0.1) | verdicts | (metrics or {})
    setup = {"device": "NVIDIA H100", "world_size": 8, "precision": "bf16-mixed"}
    client.log_batch(
        run.run_id,
        [Metric(key, value, now, 1000) for key, value in values.items()],
        [Param("lightning_perf", json.dumps(setup))],
        [
            *([RunTag(SUMMARY_TAG, "summary.json")] if summary else []),
            *([RunTag("lightning_perf_job", json.dumps(job))] if job else []),
        ],
    )
    if summary is not None:
        assert folder is not None
        (folder / "summary.json").write_text(text_of(summary))
        client.log_artifact(run.run_id, str(folder / "summary.json"))
    if status != "RUNNING":
        client.set_terminated(run.run_id, status, now)
    return str(run.run_id)


def copy_run(database: Path, run_id: str, count: int) -> None:
    """Copy a run in MLflow's database, each copy an hour shorter than the one before."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for table in ("runs", "latest_metrics", "params", "tags"):
            rows = connection.execute(f"SELECT * FROM {table} WHERE run_uuid = ?", (run_id,))
            names = [each[0] for each in rows.description]
            found = [dict(zip(names, row, strict=True)) for row in rows]
            for number in range(1, count + 1):
                for row in found:
                    new = row | {"run_uuid": f"{number:032x}"}
                    if table == "runs":
                        new["end_time"] -= number * 3_600_000
                        new["artifact_uri"] = row["artifact_uri"].replace(run_id, new["run_uuid"])
                    marks = ", ".join("?" * len(new))
                    connection.execute(f"INSERT INTO {table} VALUES ({marks})", [*new.values()])
