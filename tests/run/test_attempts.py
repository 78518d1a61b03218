"""Goodput of trainings that are killed and resumed, compared with counts by their own clocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.command import until
from helpers.faults import ForkServer
from helpers.small import RANKS, Records, Small, trainer
from helpers.versions import REPEATED
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor

from lightning_perf import PyTorch, SpeedMonitor, Timings, always_on
from lightning_perf.run import attempts, destination, summary
from lightning_perf.run.stages import Progress
from lightning_perf.tracking import attempts as files
from lightning_perf.tracking.fleet import in_folder
from lightning_perf.tracking.page import report_page
from lightning_perf.tracking.summary import read_summary, rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:(You're resuming|Checkpoint directory|The dirpath has)"
)
#: Steps between checkpoints, and seconds of a step.
EVERY, STEP = 6, 0.06


class Slow(Small):
    """Its steps take a known time at least."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP)
        return super().training_step(batch, batch_idx)


class Journal(L.Callback):
    """The count by hand: writes the time of each event to a file, and then ends the process."""

    def __init__(self, file: Path, at: int, end: Callable[[], object]) -> None:
        self.file, self.at, self.end = file, at, end

    def note(self, what: str, step: int = 0) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([os.getpid(), what, step, time.time()]) + "\n")

    def on_train_start(self, trainer: L.Trainer, _: Any) -> None:
        self.note("begin")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note("step", trainer.global_step)
        if trainer.global_step == self.at:
            time.sleep(0.5)  # the time of the last sign of life
            self.end()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)  # Lightning ends the training after the batch


def crash() -> None:
    raise RuntimeError("planted")


def attempt(folder: Path, at: int, end: Callable[[], object], *, resume: bool) -> None:
    """One process of a job: from its newest checkpoint, up to a step at which it is ended."""
    attempts.FIRST, attempts.INTERVAL = 0.05, 0.1
    journal = Journal(folder / "journal.jsonl", at, end)
    journal.note("start")
    saving = ModelCheckpoint(
        folder / "saved", "{step:03d}", every_n_train_steps=EVERY, save_top_k=-1
    )
    found = sorted((folder / "saved").glob("*.ckpt")) if resume else []
    run = trainer(
        folder, always_on(show_summary=False), journal, saving, enable_checkpointing=True,
        max_steps=32, max_epochs=-1, limit_val_batches=2, num_sanity_val_steps=0,
        log_every_n_steps=2,
    )  # fmt: skip
    run.fit(Slow(), ckpt_path=found[-1] if found else None)
    journal.note("end")


def by_hand(file: Path) -> dict[str, float]:
    """Kept and repeated seconds of steps, and all seconds, from the journal alone.

    Of each step, the last process that made it counts.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    taken: dict[int, list[float]] = {}
    for (process, _, _, before), (same, what, step, now) in pairwise(lines):
        if what == "step" and process == same:
            taken.setdefault(step, []).append(now - before)
    starts = [now for _, what, _, now in lines if what == "start"]
    return {
        "kept": sum(times[-1] for times in taken.values()),
        "repeated": sum(sum(times[:-1]) for times in taken.values()),
        "steps_repeated": sum(len(times) - 1 for times in taken.values()),
        "whole": lines[-1][3] - starts[0],
        "attempts": len(starts),
    }


def newest(folder: Path) -> dict[str, Any]:
    paths = folder.rglob("summary*.json")
    return dict(read_summary(max(paths, key=lambda path: path.stat().st_mtime)))


def test_goodput_of_a_run_that_was_killed_four_times(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Kills, a preemption and a crash: kept, repeated and all seconds are those counted by hand."""
    ends = [(9, kill), (10, kill), (15, preempt), (23, crash), (0, kill)]
    for number, (at, end) in enumerate(ends):
        ended = fork_server.run(tmp_path, attempt, tmp_path, at, end, resume=True)
        assert (ended.code == 0) == (number in (2, 4)), ended.stderr  # Lightning leaves with 0
        time.sleep(0.3)
    hand, found = by_hand(tmp_path / "journal.jsonl"), newest(tmp_path)["goodput"]
    assert hand["attempts"] == found["attempts"] == 5
    assert found["interruptions"] == 4
    # After steps 6, 6, 12 and 18: 9 - 6, 10 - 6, 15 - 12 and 23 - 18.
    assert hand["steps_repeated"] == 15
    assert found["seconds"] == pytest.approx(hand["whole"], rel=0.05)
    losses = found["losses"]
    # What the journal cannot separate: checkpoints and validation are between its events.
    kept = found["kept_seconds"] + losses["checkpoints"] + losses["validation"]
    assert kept == pytest.approx(hand["kept"], rel=0.1)
    assert found["share"] == pytest.approx(hand["kept"] / hand["whole"], rel=0.2)
    # And the half second before each end, which is no step in the journal.
    assert losses["repeated_steps"] == pytest.approx(hand["repeated"] + 4 * 0.5, rel=0.2)
    assert sum(losses.values()) + found["kept_seconds"] == pytest.approx(found["seconds"])
    assert losses["restarts"] > 4 * 0.3
    # All are in the folder of the first one, and the views show them.
    (folder,) = {path.parent for path in tmp_path.rglob("attempts/*.json")}
    assert len(list(folder.iterdir())) == 5
    statuses = [json.loads(path.read_text())["status"] for path in sorted(folder.iterdir())]
    assert statuses[:2] == ["running"] * 2
    assert statuses[3:] == ["stopped by an exception", "finished"]
    assert "in 5 attempts were steps that were kept" in dict(rows(newest(tmp_path))[0])["goodput"]
    assert "Goodput over all attempts" in report_page(newest(tmp_path))


def test_a_run_that_is_preempted_between_checkpoints_repeats_its_steps(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Steps after the checkpoint are lost; a restart without a checkpoint loses all of them."""
    attempts.FIRST, attempts.INTERVAL = 0.05, 0.1
    for at, end in ((11, preempt), (0, kill)):
        assert fork_server.run(tmp_path, attempt, tmp_path, at, end, resume=True).code == 0
    hand, found = by_hand(tmp_path / "journal.jsonl"), newest(tmp_path)["goodput"]
    assert hand["steps_repeated"] == 5
    assert found["interruptions"] == 1
    own = found["losses"]["repeated_steps"]
    assert own == pytest.approx(hand["repeated"] + 0.6, rel=0.25)
    assert found["checkpoint_interval"] > 5 * STEP


def killed_between_signs(folder: Path) -> None:
    """An attempt that is killed before any sign of life but that of its checkpoint."""
    attempts.FIRST = attempts.INTERVAL = summary.REFRESH = 1000.0
    journal = Journal(folder / "journal.jsonl", EVERY + 2, kill)
    journal.note("start")
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=EVERY, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "logger": False}
    trainer(folder, Timings(), journal, saving, **options).fit(Slow())


def test_a_checkpoint_is_a_sign_of_life(fork_server: ForkServer, tmp_path: Path) -> None:
    """A process is killed some steps after it: the next one knows when it was, and counts it."""
    assert fork_server.run(tmp_path, killed_between_signs, tmp_path).code == -signal.SIGKILL
    ((killed,),) = recorded(tmp_path).values()
    assert killed["saves"] == 1
    assert fork_server.run(tmp_path, attempt, tmp_path, 0, kill, resume=True).code == 0
    hand, found = by_hand(tmp_path / "journal.jsonl"), newest(tmp_path)["goodput"]
    assert found["attempts"] == 2
    # The first attempt saved once, and the second one four times: 12, 18, 24 and 30.
    step = (hand["kept"] + hand["repeated"]) / (32 + hand["steps_repeated"])
    assert found["checkpoint_interval"] == pytest.approx(EVERY * step, rel=0.2)


def test_a_signal_that_ends_the_wait_for_traces_drops_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that fails is sent SIGTERM while a recording is made into a trace."""
    monkeypatch.setattr(destination, "hurried", lambda: True)
    with pytest.raises(RuntimeError, match="planted"):
        trainer(
            tmp_path, PyTorch("first 20ba"), always_on(),
            Journal(tmp_path / "journal", 8, crash), max_steps=20,
        ).fit(Small())  # fmt: skip
    (attempt,) = (json.loads(path.read_text()) for path in tmp_path.rglob("attempts/*.json"))
    assert (attempt["status"], attempt["steps"]) == ("stopped by an exception", [0, 8])


def test_the_wait_for_the_first_batch_is_set_up(tmp_path: Path) -> None:
    """As that for the start of workers, or for a cache."""

    class SlowStart(Small):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            time.sleep(0 if self.global_step else 1.0)
            return batch

    trainer(tmp_path, Timings(), logger=False).fit(SlowStart())
    found = newest(tmp_path)["goodput"]
    assert found["losses"]["setup"] > 1
    assert found["kept_seconds"] < 1 < found["seconds"]


def test_signs_of_life_of_checkpoints_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many checkpoints, the first one is written at once, and one job waits for the others."""
    monkeypatch.setattr(attempts, "FIRST", 1000.0)
    noted: list[int] = []
    note = attempts.AttemptLog.note

    def counted(log: attempts.AttemptLog, run: Any) -> None:
        note(log, run)
        noted.append(log._saves)

    class Waits(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                until(lambda: noted)

    monkeypatch.setattr(attempts.AttemptLog, "note", counted)
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "logger": False}
    trainer(tmp_path, Timings(), Waits(), saving, **options).fit(Small())
    ((own,),) = recorded(tmp_path).values()
    assert own["saves"] == 16
    assert own["saved"] <= own["last"]
    assert len(noted) == 2  # the second one is that of the end, which writes nothing more


# -- whose folder it is ---------------------------------------------------------------------------


def fit(folder: Path, *, checkpoint: Path | None = None, steps: int = 8, **options: Any) -> Path:
    """Train in this process, and return a checkpoint of the middle."""
    saving = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=4, save_top_k=-1)
    options = {"callback": SpeedMonitor(), "logger": False} | options
    run = trainer(
        folder, options.pop("callback"), saving, enable_checkpointing=True, max_steps=steps,
        max_epochs=-1, limit_val_batches=0, **options,
    )  # fmt: skip
    run.fit(Small(), ckpt_path=checkpoint)
    return folder / "saved" / "step=4.ckpt"


def recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The attempts in each folder of a run, in the order of their names."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("attempts/*.json")):
        found.setdefault(path.parents[1].name, []).append(json.loads(path.read_text()))
    return found


@pytest.fixture(autouse=True)
def _no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of this process names no run."""
    monkeypatch.delenv("LIGHTNING_PERF_RUN", raising=False)


def test_a_checkpoint_continues_the_job_below_its_own_root_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning in another folder is a new job, and does not write into the old one's."""
    said: list[str] = []
    monkeypatch.setattr(attempts.compat, "rank_zero_info", said.append)
    old, other = tmp_path / "old", tmp_path / "new"
    checkpoint = fit(old)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    fit(other, checkpoint=checkpoint, steps=12)
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    ((own,),) = recorded(other).values()
    assert own["job"] == own["name"]
    assert own["steps"] == [4, 12]
    assert said == []
    fit(old, checkpoint=checkpoint, steps=12)
    (folder,) = recorded(old)
    first, second = recorded(old)[folder]
    assert second["job"] == first["job"] == first["name"]
    assert said == [f"lightning_perf: this is attempt 2 of the run in {old / folder}."]
    # The first one finished 4 steps later, which are repeated, and is not interrupted.
    found = newest(old)["goodput"]
    assert (found["attempts"], found["interruptions"]) == (2, 0)
    assert found["losses"]["repeated_steps"] == pytest.approx(
        first["last"] - second["resumed"], abs=1e-6
    )


@pytest.mark.parametrize(
    "job",
    [
        {"folder": "../old", "job": "x"}, {"folder": "/tmp", "job": "x"}, {"folder": "", "job": ""},
        {"folder": ["a"], "job": {"b": 1}}, "text", None, {"folder": "x" * 10_000, "job": "\0"},
    ],
)  # fmt: skip
def test_a_hostile_checkpoint_names_no_folder(tmp_path: Path, job: Any) -> None:
    """What is read never decides where something is written: it is a new job."""
    checkpoint = fit(tmp_path / "old")
    content = torch.load(checkpoint, weights_only=True)
    for state in content["callbacks"].values():
        if "progress" in state:
            state["progress"]["job"] = job
    torch.save(content, tmp_path / "changed.ckpt")
    before = sorted((tmp_path / "old").rglob("*"))
    fit(tmp_path / "new", checkpoint=tmp_path / "changed.ckpt", steps=6)
    assert sorted((tmp_path / "old").rglob("*")) == before
    ((own,),) = recorded(tmp_path / "new").values()
    assert own["job"] == own["name"]
    assert own["resumed"] > 0


def test_a_name_of_the_user_is_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of one name are of one job, also without a checkpoint; another name begins one."""

    class Crash(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                raise RuntimeError("planted")

    monkeypatch.setenv("LIGHTNING_PERF_RUN", "night run/1")
    run = trainer(tmp_path, SpeedMonitor(), Crash(), logger=False)
    with pytest.raises(RuntimeError, match="planted"):
        run.fit(Small())
    checkpoint = fit(tmp_path)
    name = "night run_1"
    assert [each["status"] for each in recorded(tmp_path)[name]] == [
        "stopped by an exception",
        "finished",
    ]
    found = read_summary(tmp_path / name / "summary.json")["goodput"]
    assert found["interruptions"] == 1
    assert found["kept_seconds"] < recorded(tmp_path)[name][1]["last"] + 1e-6
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "another")
    fit(tmp_path, checkpoint=checkpoint)
    assert len(recorded(tmp_path)["another"]) == 1
    assert len(recorded(tmp_path)[name]) == 2


def test_a_second_training_from_the_start_is_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that finished, such as another fold of a cross-validation."""
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "folds")
    fit(tmp_path)
    fit(tmp_path, steps=4)
    first, second = recorded(tmp_path)["folds"]
    assert first["job"] != second["job"]
    folder = tmp_path / "folds"
    for name, steps in (("summary.json", 8), ("summary-2.json", 4)):
        found = read_summary(folder / name)
        assert found["goodput"]["attempts"] == 1
        assert found["stages"]["train"]["whole_run"]["batches"] == steps


def test_checkpoints_count_at_each_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be killed long before its first report, and they are no steps."""

    def found() -> list[dict[str, Any]]:
        return [own for each in recorded(tmp_path).values() for own in each]

    class SlowSave(L.Callback):
        def on_save_checkpoint(self, *_: Any) -> None:
            time.sleep(0.3)

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                until(lambda: any(own["checkpoints"] > 0.25 for own in found()))

    monkeypatch.setattr(attempts, "FIRST", 0.05)
    monkeypatch.setattr(attempts, "INTERVAL", 0.05)
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4)
    options: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 50}
    trainer(tmp_path, Timings(), SlowSave(), saving, logger=False, **options).fit(Small())


def trained(folder: Path) -> dict[str, int]:
    """The last step by summary."""
    paths = sorted(folder.glob("summary*.json"))
    return {x.name: read_summary(x)["stages"]["train"]["whole_run"]["last"] for x in paths}


def test_a_named_run_that_has_finished_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one of the name gets a number; a checkpoint continues its own job."""
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "job")
    said: list[str] = []
    monkeypatch.setattr("lightning_perf.run.summary.rank_zero_info", said.append)
    folder = tmp_path / "job"
    checkpoint = fit(tmp_path, callback=Timings())
    checkpoint = checkpoint.rename(tmp_path / "first.ckpt")
    page = (folder / "report.html").read_bytes()
    fit(tmp_path, callback=Timings(), steps=6)
    assert trained(folder) == {"summary-2.json": 5, "summary.json": 7}
    assert (folder / "report.html").read_bytes() == page
    assert (folder / "report-2.html").exists()
    assert any("summary.json is the summary of another run" in text for text in said)
    fit(tmp_path, callback=Timings(), steps=12, checkpoint=checkpoint)
    assert trained(folder) == {"summary-2.json": 5, "summary.json": 11 - REPEATED}
    first, second, third = recorded(tmp_path)["job"]
    assert first["job"] == third["job"] != second["job"]
    assert read_summary(folder / "summary.json")["goodput"]["attempts"] == 2
    trainer(tmp_path, SpeedMonitor(), logger=False).test(Small(), verbose=False)
    assert trained(folder).keys() == {"summary-2.json", "summary.json"}


def killed_job(folder: Path) -> None:
    os.environ["LIGHTNING_PERF_RUN"] = "job"
    summary.REFRESH = 0.0  # a summary is there before the kill
    attempt(folder, 5, kill, resume=False)


def test_a_named_run_that_was_killed_is_continued(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint it starts from the beginning, and is still the same run."""
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "job")
    assert fork_server.run(tmp_path, killed_job, tmp_path).code
    assert read_summary(tmp_path / "job" / "summary.json")["status"] == "running"
    fit(tmp_path)
    assert trained(tmp_path / "job") == {"summary.json": 7}
    assert read_summary(tmp_path / "job" / "summary.json")["goodput"]["interruptions"] == 1


def hours(folder: Path) -> dict[str, Any]:
    """Device hours and wasted ones of the runs below a folder."""
    found = in_folder(folder, 0.0, [])
    return {
        Path(each.place).name: pytest.approx((each.device_hours, each.wasted_hours), rel=0.01)
        for each in found
    }


@pytest.mark.parametrize("killed", [True, False])
def test_a_summary_without_attempts_has_the_hours_of_its_run(
    killed: bool, tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As among MLflow's artifacts: of killed attempts, too, and not of other runs of its job."""
    runs, copies = tmp_path / "runs", tmp_path / "copies"
    if killed:
        monkeypatch.setenv("LIGHTNING_PERF_RUN", "job")
        fork_server.run(tmp_path, killed_job, runs)
        fit(runs)
    else:
        checkpoint = fit(runs)
        fit(runs, checkpoint=checkpoint, steps=12)
    for path in runs.rglob("summary.json"):
        (copies / path.parent.name).mkdir(parents=True)
        shutil.copy(path, copies / path.parent.name)
    found = {run: each.expected for run, each in hours(runs).items()}
    assert len(found) == 1 + (not killed)
    assert found == hours(copies)


def test_a_run_of_mlflow_is_one_job(tmp_path: Path, mlflow_database: str) -> None:
    """The same run id continues it, also without a checkpoint; another run does not."""
    logger = MLFlowLogger("goodput", tracking_uri=mlflow_database)

    class Crash(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                raise RuntimeError("planted")

    run = trainer(tmp_path, SpeedMonitor(), Crash(), logger=logger)
    with pytest.raises(RuntimeError, match="planted"):
        run.fit(Small())
    again = MLFlowLogger("goodput", tracking_uri=mlflow_database, run_id=logger.run_id)
    fit(tmp_path, logger=again)
    fit(tmp_path, logger=MLFlowLogger("goodput", tracking_uri=mlflow_database))
    assert sorted(len(each) for each in recorded(tmp_path).values()) == [1, 2]


def test_a_live_attempt_is_not_continued(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training of the name, while the first one trains, is another job."""
    child = fork_server.start(tmp_path, waits, tmp_path)
    until = time.monotonic() + 60
    while not recorded(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "shared")
    fit(tmp_path)
    (tmp_path / "go").touch()
    assert child.wait().code == 0
    jobs = [each["job"] for each in recorded(tmp_path)["shared"]]
    assert len(jobs) == len(set(jobs)) == 2


def waits(folder: Path) -> None:
    """Train until a file appears."""
    os.environ["LIGHTNING_PERF_RUN"] = "shared"
    attempts.FIRST = attempts.INTERVAL = 0.05

    class Waits(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            while trainer.global_step == 4 and not (folder / "go").exists():
                time.sleep(0.02)

    trainer(folder, SpeedMonitor(), Waits(), logger=False).fit(Small())


# -- bounds -------------------------------------------------------------------------------------


def test_the_number_of_attempts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one and the latest ones stay, and the steps of those between count as kept."""
    monkeypatch.setattr(files, "MOST", 5)
    checkpoint = fit(tmp_path)
    (folder,) = (path.parent for path in tmp_path.rglob("attempts/*.json"))
    (path,) = folder.iterdir()
    killed = {"status": "running", "pid": 7, "host": "other"}
    first = json.loads(path.read_text()) | killed
    path.write_text(json.dumps(first))
    for number in range(1, 12):  # each of them kept a second of steps, and was killed
        own = first | {
            "name": f"20990101-0000{number:02d}.000-7",
            "began": first["began"] + 3 * number, "seen": first["began"] + 3 * number + 2,
            "resumed": number, "first": number, "last": number + 1.0, "setup": 0.5,
        }  # fmt: skip
        (folder / f"{own['name']}.json").write_text(json.dumps(own))
    content = torch.load(checkpoint, weights_only=True)
    for state in content["callbacks"].values():
        if "progress" in state:
            state["progress"]["stages"]["train"]["total_wct"] = 12.0
    torch.save(content, checkpoint)
    clock = time.time
    monkeypatch.setattr(attempts.time, "time", lambda: max(clock(), first["began"] + 40))
    fit(tmp_path, checkpoint=checkpoint, steps=8)
    names = sorted(each.name for each in folder.iterdir())
    assert len(names) == 5
    assert {f"{first['name']}.json", "20990101-000011.000-7.json"} <= {*names}
    found = newest(tmp_path)["goodput"]
    assert found["kept_seconds"] == pytest.approx(12.0, abs=2.0)


@pytest.mark.filterwarnings("ignore:lightning_perf. . more attempts were not written")
def test_attempts_are_not_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are old ones read or removed there; one warning says so."""
    monkeypatch.setenv("LIGHTNING_PERF_RUN", "job")
    monkeypatch.setattr(files, "MOST", 2)
    (outside := tmp_path / "outside").mkdir()
    for number in range(4):
        (outside / f"20260101-00000{number}.000-1.json").write_text("theirs")
    before = {path: path.read_text() for path in outside.iterdir()}
    (tmp_path / "runs" / "job").mkdir(parents=True)
    (tmp_path / "runs" / "job" / "attempts").symlink_to(outside)
    with pytest.warns(match="attempts is a link: attempts are neither written nor read"):
        fit(tmp_path / "runs")
    assert {path: path.read_text() for path in outside.iterdir()} == before
    assert newest(tmp_path / "runs")["goodput"]["attempts"] == 1


def test_checkpoints_hold_two_names_more(tmp_path: Path) -> None:
    """The state of a callback is small and plain: it loads with ``weights_only=True``."""
    checkpoint = fit(tmp_path, callback=always_on(show_summary=False))
    content = torch.load(checkpoint, weights_only=True)
    (state,) = (state for key, state in content["callbacks"].items() if "Suite" in key)
    (folder,) = recorded(tmp_path)
    (own,) = recorded(tmp_path)[folder]
    assert state["progress"]["job"] == {"folder": folder, "job": own["name"]}
    assert len(json.dumps(state)) < 20_000
    plain = Progress()
    plain.load_state_dict(state["progress"])
    assert plain.saved_job == state["progress"]["job"]


def test_a_resumed_training_is_the_same_with_and_without_us(tmp_path: Path) -> None:
    """Attempts change no weight and no random number, bit for bit."""
    ends = []
    for number, callback in enumerate((SpeedMonitor(), L.Callback())):
        L.seed_everything(7)
        folder = tmp_path / str(number)
        checkpoint = fit(folder, callback=callback)
        L.seed_everything(8)
        fit(folder, checkpoint=checkpoint, steps=16, callback=callback)
        last = torch.load(folder / "saved" / "step=16.ckpt", weights_only=True)
        weights = [value.tolist() for value in last["state_dict"].values()]
        ends.append((weights, torch.rand(2).tolist(), last["loops"]["fit_loop"]["state_dict"]))
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_rank_0_alone_writes(tmp_path: Path) -> None:
    """Two ranks leave one file per attempt, and the second attempt continues the first."""
    checkpoint = fit(tmp_path, callback=Timings(), **RANKS)
    fit(tmp_path, checkpoint=checkpoint, steps=12, callback=Timings(), **RANKS)
    ((first, second),) = recorded(tmp_path).values()
    assert second["job"] == first["name"]
    assert second["steps"] == [4, 12]
    assert newest(tmp_path)["cost"]["device"] == "core"


def test_trials_leave_no_attempt(tmp_path: Path) -> None:
    """Neither ``fast_dev_run`` nor a test without a fit."""
    trainer(tmp_path, SpeedMonitor(), logger=Records(), fast_dev_run=True).fit(Small())
    trainer(tmp_path, SpeedMonitor(), logger=Records()).test(Small(), verbose=False)
    assert recorded(tmp_path) == {}
