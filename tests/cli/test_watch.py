"""A running training, watched by its process, its folder or its run in MLflow."""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
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
from lightning_perf.cli import main, training
from lightning_perf.run import summary as run_summary
from lightning_perf.tracking.runs import latest_folder
from lightning_perf.tracking.summary import read_summary

BOUND = 60.0


def a_summary(**changes: Any) -> dict[str, Any]:
    """What a run leaves while it goes on, of this process."""
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
        "version": 1, "run": "owl", "status": "running", "stages": {"train": {"whole_run": window}},
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


class Looks(L.Callback):
    """In the middle of training, what a command in another process would find."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.folder = until(lambda: training._folder_of(os.getpid()))
        elif trainer.global_step == 12:
            until(lambda: self.look()["last"] > 0)

    def look(self) -> Any:
        assert self.folder is not None
        self.seen = dict(read_summary(self.folder / "summary.json"))
        return self.seen["stages"]["train"]["whole_run"]


@pytest.mark.usefixtures("no_hold")
@pytest.mark.parametrize("named", [True, False])
def test_a_run_leaves_its_figures_while_it_goes_on(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary is there before the end, and the process tells where."""
    monkeypatch.setattr(run_summary, "REFRESH", 0.0)
    monkeypatch.setattr(run_summary, "_MOST_TIME", float("inf"))
    looks = Looks()
    callbacks = [
        SpeedMonitor(window_size=2),
        Flops(peak_flops=1e12),
        Timings(),
        Diagnosis(terminal=False),
    ]
    logger = CSVLogger(tmp_path / "logs", "owl") if named else False
    trainer(tmp_path, *callbacks, looks, logger=logger, log_every_n_steps=2).fit(Small())
    seen, (folder,) = looks.seen, [path.parent for path in tmp_path.glob("*/summary.json")]
    assert looks.folder == folder
    assert seen["status"] == "running"
    assert seen["process"] == {"host": platform.node(), "pid": os.getpid()}
    whole = seen["stages"]["train"]["whole_run"]
    assert 0 < whole["last"] < 12
    assert whole["throughput"]["mfu"] > 0
    assert whole["timings"]["forward"] > 0
    final = read_summary(folder / "summary.json")
    assert final["status"] == "finished"
    assert final["stages"]["train"]["whole_run"]["batches"] == 16
    assert training._folder_of(os.getpid()) is None


def test_a_short_run_and_a_trial_are_not_refreshed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is made every two seconds at most, and none of a trial."""
    written: list[str] = []
    monkeypatch.setattr(run_summary, "written_whole", lambda *args, **_: written.append(args[0]))
    trainer(tmp_path, SpeedMonitor(window_size=2), max_steps=3).fit(Small())
    monkeypatch.setattr(run_summary, "REFRESH", 0.0)
    trainer(tmp_path, SpeedMonitor(window_size=2), fast_dev_run=True).fit(Small())
    assert written == []


@pytest.mark.parametrize("how", ["folder", "file", "above", "name", "latest"])
def test_a_finished_run_is_one_line(
    how: str, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its folder, its file, a folder above, its name, or as the latest below the present one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = left(in_tmp / "runs" / "owl", status="finished")
    args = {
        "folder": [str(folder)], "file": [str(folder / "summary.json")], "above": ["runs"],
        "name": ["owl"], "latest": [],
    }[how]  # fmt: skip
    code, out, err = call(capsys, "watch", *args)
    assert (code, out[9:], err) == (0, LINE.format("finished"), "")


def test_a_prediction_is_not_the_latest_run(tmp_path: Path) -> None:
    """Packages make one after a training; alone it is the latest, and while it runs."""
    folders = {}
    for age, (name, status) in enumerate([("train", "finished"), ("predict", "finished")]):
        folders[name] = left(tmp_path / name, status=status, stages={name: {}})
        os.utime(folders[name] / "summary.json", (age, age))
    assert latest_folder(tmp_path) == folders["train"]
    assert latest_folder(folders["predict"]) == folders["predict"]
    left(tmp_path / "predict", status="running", stages={"predict": {}})
    assert latest_folder(tmp_path) == folders["predict"]


def test_updates_are_lines_of_text_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each change, to the end of the run."""
    for json_lines in (False, True):
        folder = left(tmp_path / "owl")
        steps = iter([None, None, "finished"])

        def wait(_: float, folder: Path = folder, steps: Any = steps) -> None:
            if status := next(steps):
                left(folder, status=status)

        monkeypatch.setattr(training.time, "sleep", wait)
        code, out, _ = call(capsys, "watch", str(folder), *(["--json"] if json_lines else []))
        lines = out.splitlines(keepends=True)
        assert code == 0
        if json_lines:
            assert [json.loads(line)["status"] for line in lines] == ["running", "finished"]
        else:
            assert [line[9:] for line in lines] == [LINE.format("running"), LINE.format("finished")]


def test_a_killed_training_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its summary says that it runs, but its process is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left(tmp_path / "owl", process={"host": platform.node(), "pid": gone.pid})
    code, out, err = call(capsys, "watch", str(tmp_path / "owl"))
    assert (code, out[9:]) == (1, LINE.format("running"))
    assert err == "lightning-perf watch: the training was killed before its run ended.\n"


def test_a_process_without_a_run_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """It may report later; when it ends, that is an error."""
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
def test_what_cannot_be_watched_is_one_line(
    args: list[str], why: str, in_tmp: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Exit code 2, and the reason."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    code, out, err = call(capsys, "watch", *args)
    assert (code, out) == (2, "")
    assert err.startswith("lightning-perf watch: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["watch", "capture"])
def test_processes_of_others_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither watched nor signalled, not even by root."""
    with process_of_another_user() as pid, pytest.raises(SystemExit) as ended:
        main([command, str(pid)])
    assert ended.value.code
    assert f"process {pid} belongs to another user" in capsys.readouterr().err


def test_the_children_of_a_launcher_are_looked_at(tmp_path: Path) -> None:
    """As under torchrun, whose workers train: the folder that one of them holds open."""
    holds = "import os, sys, time; os.open(sys.argv[1], 0); print(flush=True); time.sleep(60)"
    starts = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}, sys.argv[1]])"
    )
    folder = left(tmp_path / "owl")
    command = [sys.executable, "-c", starts, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        try:
            assert training._folder_of(launcher.pid) == folder
            assert len(training.descendants(launcher.pid)) == 1
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


def test_a_run_in_mlflow(
    tmp_path: Path, mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its metrics are watched where there is no folder; a finished one is one line."""
    logger = MLFlowLogger("watched", "watched-run", tracking_uri=mlflow_database)
    monitor = SpeedMonitor(window_size=2)
    trainer(tmp_path, monitor, Flops(peak_flops=1e12), logger=logger).fit(Small())
    for run in ("watched-run", str(logger.run_id)):
        code, out, _ = call(capsys, "watch", run, "--tracking-uri", mlflow_database)
        assert code == 0
        assert "watched-run finished: step 15: MFU " in out


def test_the_view_of_a_terminal() -> None:
    """Figures, times and verdicts, and how old they are."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(training._view(training.Seen(a_summary(), time.time())))
    text = console.export_text()
    for part in ("owl: running, updated 0 s ago", "MFU", "25%", "forward", "input-bound (warning)"):
        assert part in text


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """Exit code 130."""
    command = [sys.executable, "-m", "lightning_perf", "watch", str(left(tmp_path / "owl"))]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert "step 9" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.wait(BOUND) == 130
        assert process.stderr.read() == ""
