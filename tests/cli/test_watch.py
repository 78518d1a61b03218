"""Watching a running training by its process, its folder or its run in MLflow."""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.command import call, until
from helpers.small import Small, trainer
from helpers.users import process_of_another_user
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from rich.console import Console

from lightning_perf import Diagnosis, Flops, SpeedMonitor, Timings
from lightning_perf.cli import main, runs
from lightning_perf.run import summary as run_summary
from lightning_perf.system.process import this_process
from lightning_perf.tracking.runs import folders_of
from lightning_perf.tracking.summary import read_summary

BOUND = 60.0


def a_summary(**changes: Any) -> dict[str, Any]:
    """The summary of an unfinished run of this process."""
    window = {
        "first": 0, "last": 9, "batches": 10, "seconds": 1.0,
        "throughput": {"mfu": 0.25, "batches_per_sec": 10.0},
        "timings": {"forward": 0.6, "backward": 0.3, "other": 0.1},
    }  # fmt: skip
    verdict = {
        "code": "input-bound",
        "severity": "warning",
        "share": 0.2,
        "predicted_speedup": 1.25,
    }
    found = {
        "version": 1, "run": "owl", "status": "running",
        "stages": {"train": {"whole_run": window, "windows": {"last": [9]}}},
        "process": {"host": platform.node(), "pid": os.getpid()}, "verdicts": [verdict],
    }  # fmt: skip
    return found | changes


def left(folder: Path, **changes: Any) -> Path:
    """A folder with a summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(a_summary(**changes)))
    return folder


LINE = (
    "owl {}: step 9: MFU 25% \u00b7 10.00 batches/s; forward 60%, backward 30%, other 10%; "
    "input-bound (warning)\n"
)


class RunsDuringTraining(L.Callback):
    """Runs a function during training, like a command in another process."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.file = until(lambda: runs._file_of(os.getpid()))
        elif trainer.global_step == 12:
            # An earlier one may have no timed batch yet.
            until(lambda: "throughput" in self.look())

    def look(self) -> Any:
        assert self.file is not None
        self.seen = dict(read_summary(self.file))
        return self.seen["stages"]["train"]["whole_run"]


@pytest.mark.parametrize("named", [True, False])
def test_a_run_leaves_its_figures_during_training(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary exists before the end, and the process is mapped to its folder."""
    monkeypatch.setattr(run_summary, "REFRESH", 0.0)
    monkeypatch.setattr(run_summary, "MOST_TIME", float("inf"))
    looks = RunsDuringTraining()
    callbacks = [
        SpeedMonitor(window_size=2),
        Flops(peak_flops=1e12),
        Timings(),
        Diagnosis(terminal=False),
    ]
    logger = CSVLogger(tmp_path / "logs", "owl") if named else False
    trainer(tmp_path, *callbacks, looks, logger=logger, log_every_n_steps=2).fit(Small())
    seen, (folder,) = looks.seen, [path.parent for path in tmp_path.glob("*/summary.json")]
    assert looks.file == folder / "summary.json"
    assert seen["status"] == "running"
    assert seen["process"] == this_process()
    assert this_process().items() > {"host": platform.node(), "pid": os.getpid()}.items()
    whole = seen["stages"]["train"]["whole_run"]
    assert 0 < whole["last"] < 12
    assert whole["throughput"]["mfu"] > 0
    assert whole["timings"]["forward"] > 0
    final = read_summary(folder / "summary.json")
    assert final["status"] == "finished"
    assert final["stages"]["train"]["whole_run"]["batches"] == 16
    assert runs._file_of(os.getpid()) is None


def test_the_summary_is_not_refreshed_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is written at most every two seconds, and none for a trial run."""
    written: list[str] = []
    monkeypatch.setattr(run_summary.LiveSummary, "_write", lambda *_: written.append("so far"))
    trainer(tmp_path, SpeedMonitor(window_size=2), max_steps=3).fit(Small())
    monkeypatch.setattr(run_summary, "REFRESH", 0.0)
    trainer(tmp_path, SpeedMonitor(window_size=2), fast_dev_run=True).fit(Small())
    assert written == []


@pytest.mark.parametrize("how", ["folder", "file", "above", "name", "latest"])
def test_a_finished_run_gives_one_line(
    how: str, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found by folder, file, parent folder or name, or as the latest run below the cwd."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = left(in_tmp / "runs" / "owl", status="finished")
    args = {
        "folder": [str(folder)], "file": [str(folder / "summary.json")], "above": ["runs"],
        "name": ["owl"], "latest": [],
    }[how]  # fmt: skip
    code, out, err = call(capsys, "watch", *args)
    assert (code, out[9:], err) == (0, LINE.format("finished"), "")


def test_a_prediction_is_not_the_latest_run(tmp_path: Path) -> None:
    """Packages predict after a training. A prediction is found if it is alone, or while it runs."""
    folders = {}
    for age, (name, status) in enumerate([("train", "finished"), ("predict", "finished")]):
        folders[name] = left(tmp_path / name, status=status, stages={name: {}})
        os.utime(folders[name] / "summary.json", (age, age))
    assert folders_of(tmp_path)[-1] == folders["train"]
    assert folders_of(folders["predict"])[-1] == folders["predict"]
    left(tmp_path / "predict", status="running", stages={"predict": {}})
    assert folders_of(tmp_path)[-1] == folders["predict"]


def test_updates_are_printed_as_text_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one line per change, up to the end of the run."""
    for json_lines in (False, True):
        folder = left(tmp_path / "owl")
        steps = iter([None, None, "finished"])

        def wait(_: float, folder: Path = folder, steps: Any = steps) -> None:
            if status := next(steps):
                left(folder, status=status)

        monkeypatch.setattr(runs.time, "sleep", wait)
        code, out, _ = call(capsys, "watch", str(folder), *(["--json"] if json_lines else []))
        lines = out.splitlines(keepends=True)
        assert code == 0
        if json_lines:
            updates = [json.loads(line) for line in lines]
            assert [each["status"] for each in updates] == ["running", "finished"]
            # The history, which grows with each update, is in the file alone.
            assert not any(
                "windows" in stage for each in updates for stage in each["stages"].values()
            )
            assert updates[-1]["stages"]["train"]["whole_run"]
        else:
            assert [line[9:] for line in lines] == [LINE.format("running"), LINE.format("finished")]


def test_a_line_says_that_the_training_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it does: a hang that has ended is no news."""
    hang = {"text": "rank 1 has been in forward for 12 s", "seconds": 12.0, "began": "now"}
    folder = left(tmp_path / "owl", hangs=[hang])
    ends = partial(left, folder, status="finished", hangs=[hang | {"ended": "later"}])
    monkeypatch.setattr(runs.time, "sleep", lambda _: ends())
    _, out, _ = call(capsys, "watch", str(folder))
    first, second = out.splitlines(keepends=True)
    assert first[9:] == f"owl running: hangs: {hang['text']}\n"
    assert second[9:] == LINE.format("finished")


@pytest.mark.slow
def test_a_killed_training_gives_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its summary says that it runs, but its process does not exist."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left(tmp_path / "owl", process={"host": platform.node(), "pid": gone.pid})
    code, out, err = call(capsys, "watch", str(tmp_path / "owl"))
    assert (code, out[9:]) == (1, LINE.format("running"))
    assert err == "lightning-perf watch: the run was killed before it ended.\n"


@pytest.mark.slow
def test_a_process_without_a_run_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """It may report later; if it ends without a report, that is an error."""
    process = subprocess.Popen(["sleep", "0.3"])
    reaper = subprocess.Popen.wait
    code, out, err = call(capsys, "watch", str(process.pid))
    reaper(process)
    assert (code, out) == (1, "")
    assert "before its first report" in err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["999999999"], "there is no process 999999999 on this machine."),
        (["99999999999999999999999"], "there is no process"),
        (["."], "there is no summary.json below"),
        ([], "there is no summary.json below"),
        (["no-such-run"], "there is no summary.json in a folder no-such-run below"),
        (["no-such-run", "--tracking-uri", "sqlite:///none.db"], "there is no none.db"),
    ],
)
def test_an_invalid_target_gives_a_one_line_error(
    args: list[str], why: str, in_tmp: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The exit code is 2, and the line has the reason."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, out, err = call(capsys, "watch", *args)
    assert (code, out) == (2, "")
    assert err.startswith("lightning-perf watch: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["watch", "capture"])
def test_processes_of_other_users_are_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are neither watched nor signalled, not even by root."""
    with process_of_another_user() as pid, pytest.raises(SystemExit) as ended:
        main([command, str(pid)])
    assert ended.value.code
    assert f"process {pid} belongs to another user" in capsys.readouterr().err


def test_children_of_other_users_are_left_alone() -> None:
    """As root, --children signals and searches this user's processes only."""
    own = subprocess.Popen(["sleep", "60"])
    try:
        with process_of_another_user() as pid:
            below = runs.descendants(os.getpid())
            assert own.pid in below
            assert pid not in below
    finally:
        own.kill()
        own.wait()


def test_the_children_of_a_launcher_are_searched(tmp_path: Path) -> None:
    """As under torchrun, whose workers train, the folder that a child holds open is found.

    What was written before the child started is of another process, which may have had its id.
    """
    holds = "import os, sys, time; os.open(sys.argv[1], 0); print(flush=True); time.sleep(60)"
    starts = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}, sys.argv[1]])"
    )
    folder = left(tmp_path / "owl")
    os.utime(folder / "summary.json", (1e9, 1e9))
    command = [sys.executable, "-c", starts, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        try:
            assert runs._file_of(launcher.pid) is None
            os.utime(folder / "summary.json")
            assert runs._file_of(launcher.pid) == folder / "summary.json"
            assert len(runs.descendants(launcher.pid)) == 1
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


def test_the_latest_of_two_summaries_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two trainings of one name in a folder; a line says that there are two."""
    folder = left(tmp_path / "owl", status="finished", stages={})
    later = (folder / "summary.json").rename(folder / "summary-2.json")
    os.utime(later, (2e9, 2e9))
    left(folder, status="stopped by an exception", stages={})
    code, out, err = call(capsys, "watch", str(folder))
    assert (code, err) == (0, f"2 runs left a summary there: {later} is the latest one\n")
    assert "finished" in out
    _, out, _ = call(capsys, "report", str(folder))
    assert "2 runs left a summary there: this is the latest one." in out


def test_a_run_in_mlflow(
    tmp_path: Path, mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its metrics are watched if there is no folder; a finished run gives one line."""
    logger = MLFlowLogger("watched", "watched-run", tracking_uri=mlflow_database)
    monitor = SpeedMonitor(window_size=2)
    trainer(tmp_path, monitor, Flops(peak_flops=1e12), logger=logger).fit(Small())
    for run in ("watched-run", str(logger.run_id)):
        code, out, _ = call(capsys, "watch", run, "--tracking-uri", mlflow_database)
        assert code == 0
        assert "watched-run finished: step 15: MFU " in out


def test_the_terminal_view_shows_the_figures() -> None:
    """It shows metrics, times and verdicts, and their age."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(runs._view(runs.Seen(a_summary(), time.time())))
    text = console.export_text()
    for part in ("owl: running, updated 0 s ago", "MFU", "25%", "forward", "input-bound (warning)"):
        assert part in text


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """The exit code is 130."""
    command = [sys.executable, "-m", "lightning_perf", "watch", str(left(tmp_path / "owl"))]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert "step 9" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.wait(BOUND) == 130
        assert process.stderr.read() == ""
