"""A client with mlflow-skinny only, and a server of another environment; ``nox -s skinny``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PyTorch, always_on
from lightning_perf.cli import main
from lightning_perf.flops import measure_peak


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    capsys.readouterr()  # earlier output
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0), capsys.readouterr().out


def test_it_is_the_small_package() -> None:
    """It contains neither a server nor a database."""
    assert not find_spec("sqlalchemy")
    assert not find_spec("flask")


def test_a_run_is_logged_described_and_read_back(
    tmp_path: Path, mlflow_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metrics, params, traces, pages and the description are logged; each command reads the run."""
    measure_peak("cpu", "float32")
    logger = MLFlowLogger("skinny", "skinny-run", tracking_uri=mlflow_server)
    callbacks = [always_on(show_summary=False), PyTorch(schedule="first 2ba")]
    options = {"max_epochs": 3, "log_every_n_steps": 8, "limit_val_batches": 2}
    trainer(tmp_path, *callbacks, logger=logger, **options).fit(Small())

    client, run_id = MlflowClient(mlflow_server), str(logger.run_id)
    data = client.get_run(run_id).data
    assert {"mfu", "timings/forward", "memory/rss", "throughput/samples_per_sec"} <= set(
        data.metrics
    )
    assert '"world_size": 1' in data.params["lightning_perf"]
    assert data.tags["mlflow.note.content"].startswith("**MFU ")
    folders = {entry.path for entry in client.list_artifacts(run_id, "skinny-run")}
    names = ("summary.json", "timings", "diagnosis", "torch_traces")
    assert folders >= {f"skinny-run/{name}" for name in names}

    where = ("--tracking-uri", mlflow_server)
    code, out = call(capsys, "report", "skinny-run", *where, "--json")
    assert (code, json.loads(out)["status"]) == (0, "finished")
    assert call(capsys, "watch", run_id, *where)[0] == 0
    assert call(capsys, "doctor")[0] == 0
    assert call(capsys, "upload", str(tmp_path))[0] == 0
