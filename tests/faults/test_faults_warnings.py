"""Warnings as errors stop no training and lose no file.

| cause of our warning | cases |
|---|---|
| nothing, a folder that cannot be created, a quota | 3 |
| a logger without a run name, an unreachable server | 2 |
| two recorders at once | 1 |
"""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.faults import (
    DONE,
    ForkServer,
    Planted,
    Setting,
    await_files,
    files,
    fit,
    profilers,
    whole,
)
from helpers.servers import free_port
from helpers.small import Records
from lightning.pytorch.loggers import MLFlowLogger

from lightning_perf import Always, PerfWarning, PyTorch
from lightning_perf.profilers.base import Profiler

pytestmark = pytest.mark.slow
Make = Callable[[Path], Setting]
ALL = DONE | files("PyTorch", 12, 14)


def strict(make: Make, folder: Path) -> Setting:
    warnings.filterwarnings("error", category=PerfWarning)
    return make(folder)


def nothing(folder: Path) -> Setting:
    return Setting()


def occupied(folder: Path) -> Setting:
    folder.mkdir()
    (folder / "records-version_0").write_text("not a folder")
    return Setting()


def bounded(folder: Path) -> Setting:
    def bound() -> None:
        if folder.parent.name == "ours":  # no trace may be in compression
            await_files(folder, DONE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    return Setting(before=[Planted("on_train_batch_start", bound, 8)])


class Secretive(Records):
    @property
    def version(self) -> int:
        raise RuntimeError("no version")


def secretive(folder: Path) -> Setting:
    return Setting(logger=Secretive())


class Elsewhere(MLFlowLogger):
    """Logs to a database, and gives us an address at which nothing listens."""

    def __init__(self, folder: Path) -> None:
        # Otherwise one call takes minutes to fail, of which we wait for half a minute.
        os.environ |= {
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        }
        database = f"sqlite:///{folder.parents[1]}/mlflow.db"
        super().__init__("elsewhere", tracking_uri=database, run_name="gone")
        _ = self.experiment
        self._tracking_uri = f"http://127.0.0.1:{free_port()}"


def gone(folder: Path) -> Setting:
    return Setting(logger=Elsewhere(folder))


@pytest.mark.parametrize(
    ("make", "ours", "left"),
    [
        (nothing, profilers("PyTorch"), ALL),
        (occupied, profilers("PyTorch"), None),
        (bounded, profilers("VizTracer"), DONE),
        (secretive, profilers("PyTorch"), ALL),
        (gone, profilers("PyTorch"), ALL | {"pending_uploads.jsonl"}),
        (
            nothing,
            [PyTorch(schedule=Always()), PyTorch(schedule=Always(), folder="second")],
            files("PyTorch", 16),
        ),
    ],
    ids=["nothing", "folder", "quota", "logger", "server", "overrides"],
)
def test_our_warnings_as_errors_do_not_stop_training(
    fork_server: ForkServer, tmp_path: Path, mlflow_tables: Path, make: Make, ours: list[Profiler],
    left: set[str] | None,
) -> None:  # fmt: skip
    """Training ends as without us, recordings are complete, and the warning is logged."""
    shutil.copy(mlflow_tables, tmp_path)
    ended, without = (
        fork_server.run(folder, fit, folder / "out", strict, make, folder / "out", ours=mine)
        for folder, mine in ((tmp_path / "ours", ours), (tmp_path / "without", []))
    )
    assert ended.ended == without.ended, ended.stderr
    assert ended.code == 0
    assert "Traceback" not in ended.stderr
    assert bool(ended.said) == (make is not nothing or len(ours) == 2)
    if left is not None:
        assert whole(tmp_path / "ours" / "out") == left, ended.stderr
