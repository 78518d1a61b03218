"""``lightning-perf try``: what it refuses, shows and writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import tried
from helpers.command import call
from helpers.processes import has_ended
from mlflow import MlflowClient

from lightning_perf import Verdict
from lightning_perf.trials.experiment import Candidate, Experiment, Row, Setting
from lightning_perf.trials.process import Outcome
from lightning_perf.trials.proof import speedup


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ([], 2, "there is no command"),
        (["--minutes", "0", "true"], 2, "--minutes 0.0 is not a positive number"),
        (["--seconds", "nan", "true"], 2, "--seconds nan is not a positive number"),
        (["--only", "inputs", "true"], 2, "is not a group of changes: do you mean input?"),
        (["--only", "mine", "true"], 1, "no Trainer was seen"),  # it may add the group
        (["no-such-program"], 127, "no-such-program is not a program"),
        (["python", "-m", "papermill", "train.ipynb"], 2, "notebooks cannot be tried"),
        (["true"], 1, "the training fails before any change: no Trainer was seen"),
        (["--keep", "r", "true"], 2, "there is no "),  # database, or no run in that of another test
    ],
)
def test_what_cannot_be_tried(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, why: str
) -> None:
    found, _, err = call(capsys, "try", *args)
    assert (found, why in err) == (code, True), err


def test_no_file_of_others_is_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    theirs = tmp_path / "base.yaml"
    theirs.write_text("trainer: {}")
    assert call(capsys, "try", "-o", str(theirs), "true")[0] == 2
    assert theirs.read_text() == "trainer: {}"


HEALTHY = [Verdict("healthy", "info").as_dict()]


@pytest.mark.parametrize(
    ("verdicts", "rows", "why"),
    [
        ([], [], "Note: the first run gave no diagnosis: it was too short, or Trainer(bare"),
        (HEALTHY, [], "Note: the verdicts suggest no change that can"),
        (HEALTHY, [Row(Setting())], "there was no time"),
        (HEALTHY, [Row(Setting(), speedup([0.7] * 2, 0.0))],
         "Note: there were too few rounds to be certain of as it is: raise --minutes."),
    ],
)  # fmt: skip
def test_why_there_is_no_answer(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verdicts: list[dict[str, object]],
    rows: list[Row],
    why: str,
) -> None:
    monkeypatch.setattr(Experiment, "results", lambda self: (rows, None))
    first = Outcome({"verdicts": verdicts, "notes": []}, None, 1.0, 0)
    monkeypatch.setattr(Experiment, "first", first, raising=False)
    code, out, _ = call(capsys, "try", "true")
    assert code == 0
    assert why in out
    assert "failed" not in out


def test_an_earlier_file_keeps_no_old_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing helps now; the file is still one for --config."""
    monkeypatch.setattr(Experiment, "results", lambda self: ([], None))
    nothing = Outcome({"verdicts": [], "notes": []}, None, 1.0, 0)
    monkeypatch.setattr(Experiment, "first", nothing, raising=False)
    target = tmp_path / "fast.yaml"
    target.write_text("# Written by lightning-perf try\ntrainer: {precision: bf16-mixed}\n")
    assert call(capsys, "try", "-o", str(target), "true")[0] == 0
    assert yaml.safe_load(target.read_text()) == {}


WORKERS = Candidate(
    "Workers", {}, "num_workers=2", "input", True, [], None, 1, {}, {"num_workers": 2}, "", []
)


@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1"]])
@pytest.mark.parametrize("name", ["train.py", "{}/train.py", "../here/train.py", "../train.py"])
def test_the_printed_patch_applies(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    name: str,
) -> None:
    """All that is printed is given to it, in the folder that is named; the script ends empty."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    script = Path(name.format(here))
    script.write_text("DataLoader(x)\n\n")
    row = Row(Setting((WORKERS,)), speedup([0.5] * 3, 0.01), "equal")
    monkeypatch.setattr(Experiment, "results", lambda self: ([row], row))
    first = Outcome({"verdicts": HEALTHY, "notes": ["a note"]}, None, 1.0, 0)
    monkeypatch.setattr(Experiment, "first", first, raising=False)
    _, out, _ = call(capsys, "try", "--", "true", str(script))
    folder = re.search(r"patch -p1 in (.+), which", out)
    assert folder
    subprocess.run(command, cwd=folder[1], input=out.encode(), check=True)
    assert script.read_text() == "DataLoader(x, num_workers=2)\n\n"


def outcome(seconds: float) -> Outcome:
    """Of a trial whose batches take so long."""
    result = {
        "seconds": 20 * seconds, "timed": 20, "startup": 1.0, "losses": ["0.1"], "besides": {},
        "batches": ["a"], "samples": ["1"], "weights": ["a"], "starts": [],
        "drawn": {"batch": [], "validation": []}, "stays": False, "workers": 0, "prefetch": None,
        "order": {"first": [], "later": [], "end": [], "eager": False, "epochs": 2},
    }  # fmt: skip
    return Outcome(result, None, 1.0, 100)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (3, "Best: num_workers=2: 2.00 times as fast"),
        (2, "too few rounds to be certain of num_workers=2: let all trials end"),
    ],
)
def test_an_interrupt_shows_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rounds: int, expected: str
) -> None:
    """Without further trials; the exit code is that of Ctrl-C."""

    def results(self: Experiment) -> None:
        self._outcomes = [
            (number, setting, outcome(seconds))
            for number in range(rounds)
            for setting, seconds in ((Setting(), 2.0), (Setting((WORKERS,)), 1.0))
        ]
        raise KeyboardInterrupt

    monkeypatch.setattr(Experiment, "results", results)
    first = outcome(2.0)
    first.result.update(verdicts=[], notes=[], dataset="fixed")  # type: ignore[attr-defined]
    monkeypatch.setattr(Experiment, "first", first, raising=False)
    code, out, _ = call(capsys, "try", "true")
    assert code == 130
    assert expected in out


#: A training that does not end by itself.
ENDS = "import os, time; open(f'{os.getpid()}.pid', 'w'); time.sleep(1e6)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """No process, and no temporary folder."""
    temporary, here = tmp_path / "tmp", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    command = [sys.executable, "-m", "lightning_perf", "try", "--", sys.executable, "-c", ENDS]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while not list(here.glob("*.pid")) and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not list(temporary.iterdir())
    assert has_ended(here)


@pytest.mark.slow
def test_slow_items_get_workers(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mlflow_server: str,
) -> None:
    """The whole of it: the change is found, compared, written and kept in MLflow.

    The script is unchanged, and the server has no other run than before.
    """
    client = MlflowClient(mlflow_server)
    run = client.create_run("0", run_name="tried").info.run_id
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = Path(shutil.copy(tried.__file__, folder / "train.py"))
    before = script.read_bytes(), sorted(folder.rglob("*"))
    page, target = tmp_path / "page.html", tmp_path / "fast.yaml"
    code, out, err = call(
        capsys, "try", "--minutes", "6", "--seconds", "0.5", "--only", "input", "--json",
        "--html", str(page), "-o", str(target), "--keep", run, "--tracking-uri", mlflow_server,
        "--", sys.executable, "train.py", "slow",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    best = found["best"]
    assert best["setting"] == "num_workers=4, persistent_workers=True"
    assert best["speedup"]["low"] > 1.02
    assert best["same"] == "alike (another shuffle from the second epoch on)"
    assert found["lines"] == ["DataLoader(..., num_workers=4, persistent_workers=True)"]
    assert "num_workers=4" in target.read_text()
    assert "num_workers" in page.read_text()
    kept = Path(client.download_artifacts(run, "try", str(tmp_path)))
    assert json.loads((kept / "try.json").read_text()) == found
    assert (kept / "try.html").read_text() == page.read_text()
    assert [each.info.run_id for each in client.search_runs(["0"])][:1] == [run]
    assert (script.read_bytes(), sorted(folder.rglob("*"))) == before
