"""What people see while a run that is over waits for its uploads."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger
from small import Small, trainer

from lightning_perf import PyTorch
from lightning_perf.profilers.recording import Recorded
from lightning_perf.trace import Worker
from lightning_perf.trainer import driver, reporting
from lightning_perf.trainer.waiting import waiting


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills as jobs are done, and is gone at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with waiting(4, 30.0) as progress:
        assert progress is not None
        progress(3)
        progress(1)
    shown = terminal.getvalue()
    assert "uploads are on their way; waiting up to 30 s" in shown
    assert "75%" in shown
    assert shown.endswith("\x1b[2K")


def test_a_log_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no terminal is, nothing moves."""
    with waiting(4, 30.0) as progress:
        assert progress is None
    told = capsys.readouterr()
    assert told.err == (
        "lightning_perf: uploads are on their way; waiting up to 30 s for 4 of them\n"
    )
    assert told.out == ""


@pytest.mark.parametrize(("patience", "lines"), [(0.0, 1), (60.0, 0)])
def test_only_a_wait_that_takes_long_is_shown(
    tmp_path: Path,
    mlflow_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    patience: float,
    lines: int,
) -> None:
    """A run whose upload is still under way says so when its patience is over, and not before."""
    gate = threading.Event()

    def slow(*args: Any) -> None:
        gate.wait(60.0)

    def opened(jobs: int, timeout: float, waiting: Any = waiting) -> Any:
        gate.set()
        return waiting(jobs, timeout)

    monkeypatch.setattr("lightning_perf.tracking.artifacts._send", slow)
    monkeypatch.setattr(reporting, "waiting", opened)
    monkeypatch.setattr(reporting, "_PATIENCE", patience)
    if not lines:
        gate.set()
    logger = MLFlowLogger("waiting", tracking_uri=mlflow_database)
    trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
    assert capsys.readouterr().err.count("uploads are on their way") == lines


def test_a_file_that_is_being_made_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the wait for servers: what this machine is at work on is finished."""
    asked = threading.Event()

    class SlowToFinish(PyTorch):
        def save(self, path: Path, timestamp: Any, stage: str, recorded: Any) -> None:
            def finish() -> None:
                assert asked.wait(30)
                assert recorded.finish is not None
                recorded.finish()

            super().save(path, timestamp, stage, Recorded(finish))

    abandon = Worker.abandon

    def abandoned(self: Worker, timeout: float) -> bool:
        asked.set()
        return abandon(self, timeout)

    monkeypatch.setattr(Worker, "abandon", abandoned)
    monkeypatch.setattr(reporting, "_PATIENCE", 0.0)
    monkeypatch.setitem(driver.UPLOAD_TIMEOUT, "teardown", 0.0)
    trainer(tmp_path, SlowToFinish(schedule="first 1ba")).fit(Small())
    assert len(list(tmp_path.rglob("rank0.1.pt.trace.json.gz"))) == 1
