"""Metrics in every logger that works offline, alone and together; ``nox -s loggers``."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.small import Small, trainer
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lightning_perf import Flops, SpeedMonitor, Timings

KEYS = {"mfu", "batch_flops", "throughput/samples_per_sec", "timings/forward", "time/total"}


def comet(folder: Path) -> Any:
    """Offline by COMET_START_ONLINE=0, because Lightning disables Comet with `online=False`."""
    return CometLogger(project="offline", offline_directory=str(folder))


def comet_keys(folder: Path, logger: Any) -> set[str]:
    """The keys in the archive for `comet upload`."""
    logger.experiment.end()
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        lines = files.read("messages.json").decode().splitlines()
    payloads = [json.loads(line).get("payload", {}) for line in lines]
    return {each["metric"]["metricName"] for each in payloads if each.get("metric")}


def neptune(folder: Path) -> Any:
    return lightning_loggers.NeptuneLogger(mode="offline", log_model_checkpoints=False)


def neptune_keys(folder: Path, logger: Any) -> set[str]:
    """The keys in the queue that `neptune sync` sends."""
    logger.run.stop()
    text = "".join(path.read_text() for path in Path(".neptune").rglob("data-*.log"))
    return {
        key
        for key in KEYS
        if f'"{"training"}", "{key.replace("/", chr(34) + ", " + chr(34))}"' in text
    }


def tensorboard(folder: Path) -> Any:
    return TensorBoardLogger(folder)


def tensorboard_keys(folder: Path, logger: Any) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return set(events.Tags()["scalars"])


def csv_keys(folder: Path, logger: Any) -> set[str]:
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return set(csv.DictReader(file).fieldnames or ())


def wandb(folder: Path) -> Any:
    return WandbLogger(save_dir=folder, mode="offline")


def wandb_keys(folder: Path, logger: Any) -> set[str]:
    return set(logger.experiment.summary.keys())


def mlflow(folder: Path) -> Any:
    return MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db")


def mlflow_keys(folder: Path, logger: Any) -> set[str]:
    return set(logger.experiment.get_run(logger.run_id).data.metrics)


LOGGERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Any], set[str]]]] = {
    "comet": (comet, comet_keys),
    "neptune": (neptune, neptune_keys),
    "tensorboard": (tensorboard, tensorboard_keys),
    "csv": (CSVLogger, csv_keys),
    "wandb": (wandb, wandb_keys),
    "mlflow": (mlflow, mlflow_keys),
}
if not hasattr(lightning_loggers, "NeptuneLogger"):  # Lightning 2.6.5 has removed it
    del LOGGERS["neptune"]


@pytest.mark.filterwarnings("default", "error::lightning_perf.PerfWarning")
@pytest.mark.parametrize("names", [*([name] for name in LOGGERS), [*LOGGERS]], ids="+".join)
def test_metrics_arrive(tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have their keys in each logger."""
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    loggers = [LOGGERS[name][0](tmp_path) for name in names]
    callbacks = [SpeedMonitor(window_size=4), Flops(peak_flops=1e12), Timings()]
    trainer(tmp_path, *callbacks, logger=loggers, log_every_n_steps=4).fit(Small())
    for name, logger in zip(names, loggers, strict=True):
        assert LOGGERS[name][1](tmp_path, logger) >= KEYS, name
