"""The waits at the end of a run, and their progress in the terminal."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.small import Small, left_in, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PerfWarning, PyTorch, SpeedMonitor
from lightning_perf.background import Worker, waiting
from lightning_perf.profilers.windows import Recorded
from lightning_perf.run import context, destination
from lightning_perf.tracking.mlflow import MlflowRun


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar advances as jobs are done, and is removed at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with waiting("uploading", 4, 30.0) as progress:
        assert progress is not None
        progress(3)
        progress(1)
    shown = terminal.getvalue()
    assert "lightning_perf: uploading: 4 left (at most 30 s)" in shown
    assert "uploading: 1 left" in shown
    assert "75%" in shown
    assert shown.endswith("\x1b[2K")


def test_a_log_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, one line is printed."""
    with waiting("uploading", 4, 30.0) as progress:
        assert progress is None
    printed = capsys.readouterr()
    assert printed.err == "lightning_perf: uploading: 4 left (at most 30 s)\n"
    assert printed.out == ""


@pytest.mark.parametrize(("patience", "lines"), [(0.0, 1), (60.0, 0)])
def test_only_a_long_wait_is_shown(
    tmp_path: Path,
    mlflow_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    patience: float,
    lines: int,
) -> None:
    """A wait for an upload is shown after `SILENT` seconds, and not before."""
    gate = threading.Event()

    def slow(*args: Any) -> None:
        gate.wait(60.0)

    def opened(what: str, jobs: int, timeout: float, waiting: Any = waiting) -> Any:
        gate.set()
        return waiting(what, jobs, timeout)

    monkeypatch.setattr(MlflowRun, "upload", slow)
    monkeypatch.setattr(destination, "waiting", opened)
    monkeypatch.setattr(destination, "SILENT", patience)
    if not lines:
        gate.set()
    logger = MLFlowLogger("waiting", tracking_uri=mlflow_database)
    trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
    assert capsys.readouterr().err.count("uploading") == lines


class Finishing(PyTorch):
    """Calls a function before a recording is finished."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(schedule="first 1ba")
        self.ask = ask

    def save(self, path: Path, timestamp: Any, stage: str, recorded: Any) -> None:
        def finish() -> None:
            self.ask()
            recorded.finish()

        super().save(path, timestamp, stage, Recorded(finish))


def test_a_file_that_is_being_made_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the timeout the file is still finished, and not reported as an upload."""
    abandoning, abandon = threading.Event(), Worker.abandon

    def abandoned(self: Worker, timeout: float) -> bool:
        abandoning.set()
        return abandon(self, timeout)

    monkeypatch.setattr(Worker, "abandon", abandoned)
    monkeypatch.setattr(destination, "SILENT", 0.0)
    monkeypatch.setitem(context.FILE_TIMEOUT, "teardown", 0.0)
    trainer(tmp_path, Finishing(lambda: bool(abandoning.wait(30)))).fit(Small())
    assert len(list(tmp_path.rglob("rank0.1.pt.trace.json.gz"))) == 1
    shown = capsys.readouterr().err
    assert re.search(r"finishing files: \d left \(at most", shown)
    assert "uploading" not in shown


def test_metrics_do_not_wait_for_files(tmp_path: Path, mlflow_database: str) -> None:
    """Metrics arrive in MLflow while a file is being made."""
    logger = MLFlowLogger("waiting", tracking_uri=mlflow_database)
    client, found = MlflowClient(mlflow_database), []

    def until_metrics_arrive() -> None:
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:
            time.sleep(0.1)
            found.extend(client.get_run(logger.run_id).data.metrics)

    callbacks = [Finishing(until_metrics_arrive), SpeedMonitor(window_size=2)]
    trainer(tmp_path, *callbacks, logger=logger).fit(Small())
    assert "throughput/batches_per_sec" in found
    sent = client.list_artifacts(logger.run_id)
    assert len(sent) == 1


def test_pages_that_were_not_begun_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run, waiting pages are dropped with a warning; recordings stay."""
    monkeypatch.setattr(destination, "SILENT", 0.0)
    monkeypatch.setitem(context.FILE_TIMEOUT, "teardown", 0.0)
    gate = threading.Event()
    abandon = Worker.abandon

    def abandoned(self: Worker, timeout: float) -> bool:
        left = abandon(self, 0.0)
        gate.set()
        return left

    class Held(PyTorch):
        def save(self, path: Path, timestamp: Any, stage: str, recorded: Any) -> None:
            assert self._context is not None
            self._context.file_worker.submit(lambda: gate.wait(30), "something else")
            super().save(path, timestamp, stage, recorded)

    monkeypatch.setattr(Worker, "abandon", abandoned)
    with pytest.warns(PerfWarning, match="was not made: the run ended first"):
        trainer(tmp_path, Held(schedule="first 1ba", key_averages=True)).fit(Small())
    assert [path.name for path in left_in(tmp_path)] == ["rank0.1.pt.trace.json.gz"]
