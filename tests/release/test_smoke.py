"""One short run of each way of use, for sessions with other versions of the dependencies."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from mlflow import MlflowClient

from lightning_perf import Memray, PyTorch, VizTracer, always_on

PROGRAM = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(96, 8)), 4)


if __name__ == "__main__":
    LightningCLI(Model, save_config_callback=None)
"""
OPTIONS = """
trainer:
  max_epochs: 1
  accelerator: cpu
  log_every_n_steps: 4
  enable_progress_bar: false
  enable_checkpointing: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs}
"""
SUITE = """
- class_path: lightning_perf.Suite
  init_args:
    callbacks:
      - class_path: lightning_perf.SpeedMonitor
        init_args: {window_size: 4}
      - class_path: lightning_perf.Flops
        init_args: {peak_flops: 1e12}
- class_path: lightning_perf.PyTorch
  init_args: {schedule: every 10ba for 2ba}
"""


def run(folder: Path, *options: str, **environment: str) -> None:
    """Train with LightningCLI; MFU is logged, and the summary is written without a warning."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "options.yaml").write_text(OPTIONS)
    done = subprocess.run(
        [sys.executable, "program.py", "fit", "--config", "options.yaml", *options],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PerfWarning" not in done.stderr
    (summary,) = folder.glob("**/summary.json")
    assert json.loads(summary.read_text())["status"] == "finished"
    (metrics,) = folder.glob("**/metrics.csv")
    assert any(float(row["mfu"] or 0) > 0 for row in csv.DictReader(metrics.read_text().split()))


def test_the_command_line_of_lightning(tmp_path: Path) -> None:
    """A YAML file configures the callbacks, and a trace is written."""
    indented = SUITE.replace("\n", "\n  ")
    (tmp_path / "perf.yaml").write_text(f"trainer:\n  callbacks:{indented.rstrip()}\n")
    run(tmp_path, "--config", "perf.yaml")
    (trace, *_) = tmp_path.glob("**/torch_traces/*.json.gz")
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))


@pytest.mark.parametrize("value", ["1", "perf.yaml"])
def test_the_environment_variable(tmp_path: Path, value: str) -> None:
    """It attaches the callbacks without a change of code."""
    (tmp_path / "perf.yaml").write_text(SUITE)
    run(tmp_path, LIGHTNING_PERF=value)


def test_everything_at_once(tmp_path: Path, mlflow_database: str) -> None:
    """All callbacks and profilers, with MLflow and a CSV file."""
    from helpers.small import Small, trainer
    from lightning.pytorch.loggers import MLFlowLogger

    server = MLFlowLogger("smoke", run_name="owl", tracking_uri=mlflow_database)
    profilers = (
        PyTorch(schedule="at 2ba for 2ba"),
        VizTracer(schedule="at 5ba for 2ba"),
        Memray(schedule="at 8ba for 2ba"),
    )
    files = CSVLogger(tmp_path / "logs")
    run = trainer(tmp_path, always_on(), *profilers, logger=[server, files], log_every_n_steps=4)
    run.fit(Small())
    client = MlflowClient(mlflow_database)
    found = client.get_run(str(server.run_id))
    assert found.info.status == "FINISHED"
    assert found.data.metrics["mfu"] > 0
    assert json.loads(found.data.params["lightning_perf"])["world_size"] == 1
    assert found.data.tags["mlflow.note.content"].startswith("**MFU ")
    folders = {file.path for file in client.list_artifacts(str(server.run_id), "owl")}
    names = ("summary.json", "report.html", "torch_traces", "viztracer", "memray")
    assert folders == {f"owl/{name}" for name in names}, version("mlflow")


def test_the_command(tmp_path: Path) -> None:
    """Each of its parts starts."""
    for words in (["--version"], ["doctor"], ["devices", "H100"], ["report", "--help"]):
        command = [sys.executable, "-m", "lightning_perf", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
