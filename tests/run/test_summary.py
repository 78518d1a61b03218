"""summary.json: written with any logger, read back, shown, and refused when damaged."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from helpers.command import call, until
from helpers.cuda_trace import cuda_trace
from helpers.faults import ForkServer
from helpers.small import (
    FLOPS_PER_SAMPLE,
    HIDDEN,
    RANKS,
    WIDTH,
    Records,
    Small,
    trainer,
)
from helpers.versions import REPEATED, interrupted
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from mlflow import MlflowClient
from torch import Tensor

from lightning_perf import (
    Diagnosis,
    Flops,
    Memray,
    PerfWarning,
    PyTorch,
    SpeedMonitor,
    Suite,
    Timings,
    always_on,
)
from lightning_perf.core.progress import Timestamp
from lightning_perf.core.window import Columns
from lightning_perf.flops.peaks import Peak, PeakResolver
from lightning_perf.run import summary as run_summary
from lightning_perf.run.window_log import MOST, Report, WindowLog, table
from lightning_perf.timing.totals import CATEGORIES, Action, Cost, Totals
from lightning_perf.traces.summary import summarize
from lightning_perf.tracking.fleet import in_folder
from lightning_perf.tracking.page import report_page
from lightning_perf.tracking.summary import SummaryError, description, read_summary, rows, schema

PEAK = 1e12
PLOTS = Action("train", "callbacks", "Plots.on_train_batch_end")
NAMES = ("timings/forward", "batch/samples", "batch/seconds", "batch/count", "memory/rss")
COLUMNS = Columns({name: position for position, name in enumerate(NAMES)})


def callbacks() -> list[Any]:
    return [SpeedMonitor(window_size=4), Flops(peak_flops=PEAK), Timings()]


def undescribed(value: object, form: Mapping[str, Any], place: str = "") -> list[str]:
    """The keys of a part of a summary that its schema does not describe."""
    form = form if "type" in form else schema()["$defs"][form["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        return [key for each in value for key in undescribed(each, form["items"], place)]
    if not isinstance(value, dict):
        return []
    known, others = form.get("properties", {}), form.get("additionalProperties")
    found = []
    for key, each in value.items():
        inner = known.get(key, others)
        found += undescribed(each, inner, f"{place}/{key}") if inner else [f"{place}/{key}"]
    return found


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of a real run, of which the schema describes each key."""
    (path,) = folder.rglob("summary.json")
    found = dict(read_summary(path))
    assert undescribed(found, schema()) == []
    return found


class Crashes(Small):
    """Fails, or is interrupted, at its tenth batch."""

    error: type[BaseException] = ValueError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 10:
            raise self.error("mine")
        return super().training_step(batch, batch_idx)


class Interrupted(Crashes):
    error = KeyboardInterrupt


def test_the_end_of_a_run_calls_fsync_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the file with all metrics is synced: on a busy disk each sync takes milliseconds."""
    synced, sync = set[int](), os.fsync

    def noted(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    trainer(tmp_path, Timings(), Diagnosis(terminal=False)).fit(Small())
    files = {path.name: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}
    assert {"summary.json", "report.html"} <= files.keys()
    assert synced == {files["summary.json"]}


def test_the_shown_peak_is_the_one_of_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in two dtypes have one peak, between those of both."""

    class Mixed(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                self.net(batch[0])
            return super().training_step(batch, batch_idx)

    peaks = {"float32": 1e12, "bfloat16": 4e12}
    monkeypatch.setattr(PeakResolver, "get", lambda self, dtype: Peak(peaks[dtype], "given"))
    trainer(tmp_path, *callbacks(), log_every_n_steps=4).fit(Mixed())
    facts, _ = rows(summary_of(tmp_path))
    forward = 2 * (WIDTH * HIDDEN + HIDDEN)
    flops = FLOPS_PER_SAMPLE + forward
    peak = flops / (FLOPS_PER_SAMPLE / 1e12 + forward / 4e12)
    assert f"{peak / 1e12:.3g} TFLOP/s per device (given)" == dict(facts)["peak"]


@pytest.mark.parametrize("kind", ["none", "csv"])
def test_a_run_leaves_its_metrics(tmp_path: Path, kind: str) -> None:
    """With any logger, the summary has the whole run and the last window, both with their steps."""
    logger = CSVLogger(tmp_path) if kind == "csv" else False
    run = trainer(tmp_path, *callbacks(), logger=logger, log_every_n_steps=4)
    run.fit(Small())
    found = summary_of(tmp_path)
    assert (found["version"], found["status"]) == (2, "finished")
    assert found["setup"]["peak_flops"] == PEAK
    assert found["stages"]["train"]["whole_run"]["peak_flops"] == PEAK
    assert {"lightning_perf", "lightning", "torch", "python"} <= set(found["setup"]["versions"])
    whole, last = (found["stages"]["train"][name] for name in ("whole_run", "last_window"))
    assert (whole["first"], whole["last"], whole["batches"]) == (0, 15, 16)
    assert (last["first"], last["last"], last["batches"]) == (12, 15, 4)
    for window in (whole, last):
        rates = window["throughput"]
        assert window["flops_per_batch"] == 4 * FLOPS_PER_SAMPLE
        assert rates["mfu"] == pytest.approx(rates["flops_per_sec"] / PEAK)
        assert rates["samples_per_sec"] == pytest.approx(4 * rates["batches_per_sec"])
        assert sum(window["timings"].values()) > 0
    assert found["culprits"][0]["share"] >= found["overhead"]["share"] / 100


def test_what_loggers_take_for_our_reports_is_our_overhead(tmp_path: Path) -> None:
    """The share that the advice on reports is about includes the calls that they cause."""

    class Slow(CSVLogger):
        calls = 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if any("/" in key for key in metrics):  # not Lightning's
                self.calls += 1
                time.sleep(0.02)

    logger = Slow(tmp_path)
    trainer(tmp_path, *callbacks(), logger=logger, log_every_n_steps=4).fit(Small())
    found = summary_of(tmp_path)
    assert logger.calls >= 4
    assert found["overhead"]["seconds"] >= 0.02 * logger.calls
    wall = found["culprits"][0]["seconds"] / found["culprits"][0]["share"]
    assert found["overhead"]["share"] == pytest.approx(found["overhead"]["seconds"] / wall, 1e-3)


@pytest.mark.parametrize("model", [Crashes, Interrupted])
def test_a_run_that_stops_early_leaves_what_it_measured(tmp_path: Path, model: type[Small]) -> None:
    """After an exception or Ctrl-C before the first report, it covers all finished batches."""
    run = trainer(tmp_path, *callbacks(), log_every_n_steps=50)
    with interrupted() if model is Interrupted else pytest.raises(ValueError, match="mine"):
        run.fit(model())
    found = summary_of(tmp_path)
    assert found["status"] == "stopped by an exception"
    whole = found["stages"]["train"]["whole_run"]
    assert (whole["first"], whole["batches"]) == (0, 10)
    assert whole["throughput"]["batches_per_sec"] > 0
    assert whole["timings"]["forward"] > 0


def test_all_ranks_are_in_the_summary(tmp_path: Path) -> None:
    """Samples are summed over ranks, and one rank writes the file."""
    trainer(tmp_path, *callbacks(), log_every_n_steps=4, **RANKS).fit(Small())
    found = summary_of(tmp_path)
    assert found["setup"]["world_size"] == 2
    whole = found["stages"]["train"]["whole_run"]
    rates = whole["throughput"]
    assert rates["samples_per_sec"] == pytest.approx(2 * 4 * rates["batches_per_sec"])
    assert whole["flops_per_batch"] == 2 * 4 * FLOPS_PER_SAMPLE
    windows = found["stages"]["train"]["windows"]
    assert (windows["last"], windows["batches"], windows["samples"]) == (
        [3, 7], [4, 4], [24.0, 32.0],  # without the first batch
    )  # fmt: skip


def test_a_test_after_fit_adds_its_stage(tmp_path: Path) -> None:
    """A test after fit is added to the one file; a second fit has another one."""
    run = trainer(tmp_path, *callbacks(), logger=CSVLogger(tmp_path))
    model = Small()
    run.fit(model)
    run.test(model, verbose=False)
    found = summary_of(tmp_path)
    assert set(found["stages"]) == {"train", "test"}
    assert found["stages"]["test"]["whole_run"]["batches"] == 16
    assert found["culprits"]
    assert run.fit_loop.max_epochs is not None
    run.fit_loop.max_epochs *= 2
    run.fit(model)
    run.test(model, verbose=False)
    assert summary_of(tmp_path) == found
    (path,) = tmp_path.rglob("summary-2.json")
    again = read_summary(path)
    assert set(again["stages"]) == {"train", "test"}
    whole = again["stages"]["train"]["whole_run"]
    assert (whole["first"], whole["last"], whole["batches"]) == (16, 31, 16)
    assert Path(again["report"]).name == "report-2.html"


def test_further_tests_of_a_run_keep_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one Trainer and of later ones: the latest is `test`; the first and the last ones stay."""
    monkeypatch.setattr(run_summary, "_MOST_EVALUATIONS", 4)
    options: Any = {"logger": Records(), "limit_val_batches": 2}
    run = trainer(tmp_path, *callbacks(), **options)
    run.fit(Small())
    path = tmp_path / "records-version_0" / "summary.json"
    for batches in (1, 2, 3):
        run.limit_test_batches = batches
        run.test(Small(), verbose=False)
    assert batches_of_tests(path) == {"test": 3, "test_1": 1, "test_2": 2}
    later: L.Trainer = trainer(tmp_path, *callbacks(), limit_test_batches=4, **options)
    later.test(Small(), verbose=False)
    assert batches_of_tests(path) == {"test": 4, "test_1": 1, "test_2": 2, "test_3": 3}
    for batches in (5, 6):
        later.limit_test_batches = batches
        later.test(Small(), verbose=False)
    assert batches_of_tests(path) == {"test": 6, "test_1": 1, "test_4": 4, "test_5": 5}
    for each in (run, later):
        each.validate(Small(), verbose=False)
    stages = summary_of(tmp_path)["stages"]
    assert stages["validate_alone_1"]["whole_run"]["batches"] == 2
    assert {"train", "validate", "validate_alone"} < stages.keys()
    assert stages["test_1"]["began"] < stages["test_4"]["began"] < stages["test"]["began"]


def test_tests_on_several_machines_at_once_are_in_their_file_once() -> None:
    """Each reports again and again, in turns."""
    stages: dict[str, Any] = {"train": {}}
    for report in range(20):
        for began in ("2026-11-28T10:00:00", "2026-11-28T10:00:01"):
            stages = run_summary._joined(stages, {"test": {"began": began, "report": report}})
    assert set(stages) == {"train", "test", "test_1"}
    assert stages["test_1"] == {"began": "2026-11-28T10:00:00", "report": 19}


def test_a_test_that_fails_after_a_fit_says_so(tmp_path: Path) -> None:
    """The fit has finished, and the test has not."""

    class CrashesInTest(Small):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch_idx == 3:
                raise ValueError("mine")

    run = trainer(tmp_path, *callbacks(), logger=Records())
    run.fit(Small())
    with pytest.raises(ValueError, match="mine"):
        run.test(CrashesInTest(), verbose=False)
    found = summary_of(tmp_path)
    assert (found["status"], found["stages"]["test"]["status"]) == (
        "finished",
        "stopped by an exception",
    )


def test_a_fit_after_a_failed_one_has_a_summary_of_its_own(tmp_path: Path) -> None:
    """The failed one stays, and none of its stages is in the other one; `runs` shows both."""
    options: Any = {"logger": CSVLogger(tmp_path), "limit_val_batches": 3}
    run = trainer(tmp_path, *callbacks(), **options)
    run.validate(Small(), verbose=False)
    with pytest.raises(ValueError, match="mine"):
        run.fit(Crashes())
    run.test(Small(), verbose=False)
    failed = summary_of(tmp_path)
    assert (failed["status"], "updated" in failed) == ("stopped by an exception", False)
    assert set(failed["stages"]) == {"train", "validate_alone", "test"}
    run.fit(Small())
    assert summary_of(tmp_path) == failed
    (path,) = tmp_path.rglob("summary-2.json")
    again = read_summary(path)
    assert (again["status"], set(again["stages"])) == ("finished", {"train", "validate"})
    found = in_folder(tmp_path, 0.0, [])
    assert sorted(each.state for each in found) == ["failed", "finished"]
    seconds = sum(each["goodput"]["held_seconds"] for each in (failed, again))
    assert 3600 * sum(each.device_hours for each in found) == pytest.approx(seconds, rel=0.05)


def test_a_test_elsewhere_keeps_away_from_the_fit_s_files_in_mlflow(
    tmp_path: Path, mlflow_database: str
) -> None:
    """A test of the run in another folder adds files; those of the fit and its description stay."""
    logger = MLFlowLogger("tested", run_name="tested", tracking_uri=mlflow_database)
    trainer(tmp_path / "a", *callbacks(), logger=logger).fit(Small())
    described, client = note(mlflow_database, logger), MlflowClient(mlflow_database)
    again = MLFlowLogger("tested", tracking_uri=mlflow_database, run_id=str(logger.run_id))
    trainer(tmp_path / "b", *callbacks(), logger=again).test(Small(), verbose=False)
    local = Path(client.download_artifacts(str(logger.run_id), "tested"))
    assert list(read_summary(local / "summary.json")["stages"]) == ["train"]
    (tested,) = local.glob("test-*-summary.json")
    assert list(read_summary(tested)["stages"]) == ["test"]
    assert (local / tested.name.replace("summary.json", "report.html")).exists()
    assert note(mlflow_database, logger) == described
    tags = client.get_run(str(logger.run_id)).data.tags
    assert tags["lightning_perf_summary"] == "tested/summary.json"


def batches_of_tests(path: Path) -> dict[str, int]:
    """The batches of each test in a file."""
    stages = read_summary(path)["stages"].items()
    return {name: each["whole_run"]["batches"] for name, each in stages if "test" in name}


def test_jobs_that_test_one_run_of_mlflow_keep_each_other_s_results(
    tmp_path: Path, mlflow_database: str
) -> None:
    """Each folder has a file of its own there, which grows with later tests of that folder."""
    logger = MLFlowLogger("tested", run_name="tested", tracking_uri=mlflow_database)
    client, run_id = MlflowClient(mlflow_database), str(logger.run_id)
    for machine, batches in (("a", 2), ("b", 3), ("a", 4)):
        again = MLFlowLogger("tested", tracking_uri=mlflow_database, run_id=run_id)
        run: L.Trainer = trainer(
            tmp_path / machine, *callbacks(), logger=again, limit_test_batches=batches
        )
        run.test(Small(), verbose=False)
        run.validate(Small(), verbose=False)
    local = Path(client.download_artifacts(run_id, "tested"))
    names = sorted(path.name for path in local.glob("test-*-summary.json"))
    found = [batches_of_tests(local / name) for name in names]
    assert found == [{"test": 4, "test_1": 2}, {"test": 3}]
    assert {name.replace("summary.json", "report.html") for name in names} == {
        path.name for path in local.glob("*-report.html")
    }
    # The latest one is shown.
    tags = client.get_run(run_id).data.tags
    assert tags["lightning_perf_summary"] == f"tested/{names[0]}"


def test_steps_continue_after_a_resume(tmp_path: Path) -> None:
    """The first step of a resumed run is the one after its checkpoint."""
    first = trainer(tmp_path / "first")
    first.fit(Small())
    first.save_checkpoint(tmp_path / "16.ckpt")
    second = trainer(tmp_path / "second", *callbacks(), max_epochs=2)
    second.fit(Small(), ckpt_path=tmp_path / "16.ckpt")
    whole = summary_of(tmp_path)["stages"]["train"]["whole_run"]
    assert (whole["first"], whole["last"], whole["batches"]) == (16, 31, 16)


@pytest.mark.filterwarnings("ignore")  # Lightning's, about resuming
@pytest.mark.parametrize("batches", [5, 16, 21])
def test_a_resume_begins_after_the_checkpoint_of_a_batch(tmp_path: Path, batches: int) -> None:
    """ModelCheckpoint saves a step that Lightning corrects only after training has started."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=batches, save_top_k=-1)
    first = trainer(tmp_path / "first", saves, enable_checkpointing=True, max_epochs=2)
    first.fit(Small())
    path = next(tmp_path.glob(f"*step={batches}.ckpt"))
    second = trainer(tmp_path / "second", *callbacks(), max_epochs=2)
    second.fit(Small(), ckpt_path=path)
    whole = summary_of(tmp_path)["stages"]["train"]["whole_run"]
    first_step = batches - REPEATED
    assert (whole["first"], whole["last"], whole["batches"]) == (first_step, 31, 32 - first_step)


def test_traces_and_pages_are_listed(tmp_path: Path) -> None:
    """Paths are relative to `default_root_dir`; a profiler alone leaves a summary, too."""
    trainer(tmp_path, PyTorch(schedule="first 1ba")).fit(Small())
    found = summary_of(tmp_path)
    assert [Path(name).name for name in found["traces"]] == ["rank0.1.pt.trace.json.gz"]
    assert (tmp_path / found["traces"][0]).is_file()
    assert found["stages"] == {}


def test_the_terminal_shows_it_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is plain text if it is not a terminal; nothing is shown by default."""
    trainer(tmp_path, Suite(callbacks())).fit(Small())
    assert capsys.readouterr().out == ""
    trainer(tmp_path, Suite(callbacks(), show_summary=True), log_every_n_steps=4).fit(Small())
    printed = capsys.readouterr().out
    for part in ("MFU", "samples/s", "whole run", "steps 0 to 15", "last window", "per batch"):
        assert part in printed
    assert "\x1b" not in printed
    assert printed.rstrip().endswith("/summary.json")


UNREAD = """
import os, stat, sys
from pathlib import Path
from helpers.small import Small, trainer
from lightning_perf import always_on

class Broken:
    def write(self, text):
        raise BrokenPipeError("planted")
    flush = write

for stdout in (sys.stdout, Broken()):
    sys.stdout = stdout
    run = trainer(Path("."), always_on(show_summary=True))
    run.fit(Small())
    assert run.state.status == "finished"
sys.stdout = sys.__stdout__
assert stat.S_ISFIFO(os.fstat(1).st_mode)
assert os.path.realpath(os.devnull) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())
print("saved", file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_stdout_without_reader_does_not_end_the_training(tmp_path: Path) -> None:
    """As with `python train.py | head`: the lines after fit run, and the exit code is 0."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNREAD],
        stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "saved"), done.stderr


def note(uri: str, logger: MLFlowLogger) -> str:
    tags = MlflowClient(uri).get_run(str(logger.run_id)).data.tags
    return str(tags.get("mlflow.note.content", ""))


@pytest.mark.slow
def test_the_description_begins_with_mfu(tmp_path: Path, mlflow_database: str) -> None:
    """MLflow shows the summary; a later stage of the same run updates it."""
    logger = MLFlowLogger("described", tracking_uri=mlflow_database)
    run = trainer(tmp_path, *callbacks(), logger=logger)
    model = Small()
    run.fit(model)
    text = note(mlflow_database, logger)
    assert text.splitlines()[0].startswith("**MFU ")
    assert "samples/s" in text
    assert any(f"| {name} |" in text for name in CATEGORIES)
    run.fit_loop.epoch_progress.reset()
    run.fit(model)
    assert note(mlflow_database, logger) != text


def test_a_description_of_the_user_stays(tmp_path: Path, mlflow_database: str) -> None:
    """What the user wrote is not replaced."""
    logger = MLFlowLogger("mine", tracking_uri=mlflow_database, tags={"mlflow.note.content": "my"})
    trainer(tmp_path, *callbacks(), logger=logger).fit(Small())
    assert note(mlflow_database, logger) == "my"


# -- whose file it is -----------------------------------------------------------------------------


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    """A summary.json of another program stays, and the run's own gets a number."""
    folder = tmp_path / "records-version_0"
    folder.mkdir()
    theirs = folder / "summary.json"
    theirs.write_text('{"my": "precious"}')
    trainer(tmp_path, *callbacks(), logger=Records()).fit(Small())
    assert theirs.read_text() == '{"my": "precious"}'
    assert list(read_summary(folder / "summary-2.json")["stages"]) == ["train"]


@contextmanager
def numbered_summary() -> Iterator[list[str]]:
    """One message says that the summary of another run is kept."""
    ours: list[str] = []
    with patch("lightning_perf.run.summary.rank_zero_info") as info:
        yield ours
    texts = (str(each.args[0]) for each in info.call_args_list)
    ours += (text for text in texts if "another run of this name and is kept" in text)
    assert len(ours) == 1


def batches_in(folder: Path) -> dict[str, int]:
    """Trained batches by file."""
    return {
        path.name: read_summary(path)["stages"]["train"]["whole_run"]["batches"]
        for path in sorted((folder / "records-version_0").glob("summary*.json"))
    }


def test_a_second_training_of_a_name_keeps_the_first(tmp_path: Path) -> None:
    """Its summary and its page get a number; a resume and tests continue the latest one."""

    def run(**options: Any) -> L.Trainer:
        return trainer(tmp_path, Timings(), logger=Records(), **options)

    run().fit(Small())
    page = (tmp_path / "records-version_0" / "report.html").read_bytes()
    with numbered_summary() as messages:
        (second := run(limit_train_batches=8)).fit(Small())
    assert "summary-2.json" in messages[0]
    assert batches_in(tmp_path) == {"summary-2.json": 8, "summary.json": 16}
    assert (tmp_path / "records-version_0" / "report.html").read_bytes() == page
    assert (tmp_path / "records-version_0" / "report-2.html").exists()
    second.save_checkpoint(tmp_path / "8.ckpt")
    run(limit_train_batches=8, max_epochs=3).fit(Small(), ckpt_path=tmp_path / "8.ckpt")
    assert batches_in(tmp_path) == {"summary-2.json": 16, "summary.json": 16}
    run().test(Small(), verbose=False)
    assert list(read_summary(tmp_path / "records-version_0" / "summary-2.json")["stages"]) == [
        "train",
        "test",
    ]
    second.validate(Small(), verbose=False)
    names = {path.name for path in (tmp_path / "records-version_0").glob("[!.]*")}
    files = {"summary.json", "summary-2.json", "report.html", "report-2.html"}
    assert names == files | {"attempts"}


def test_no_process_writes_to_the_summary_of_another_live_one(tmp_path: Path) -> None:
    """A test of a checkpoint gets a number while the training runs, and is added afterwards."""
    (folder := tmp_path / "records-version_0").mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = {"host": platform.node(), "pid": other.pid}
        held = {
            "version": 2,
            "run": "records-version_0",
            "status": "running",
            "stages": {},
            "process": process,
        }
        (folder / "summary.json").write_text(text := json.dumps(held))
        with numbered_summary():
            trainer(tmp_path, *callbacks(), logger=Records()).test(Small(), verbose=False)
        assert (folder / "summary.json").read_text() == text
        other.kill()
    trainer(tmp_path, *callbacks(), logger=Records()).test(Small(), verbose=False)
    assert list(read_summary(folder / "summary.json")["stages"]) == ["test"]


def _train(folder: Path, batches: int) -> None:
    trainer(folder, Timings(), logger=Records(), limit_train_batches=batches).fit(Small())


def test_two_trainings_at_once_leave_two_summaries(fork_server: ForkServer, tmp_path: Path) -> None:
    """Processes that start together: none replaces what the other one writes."""
    both = [fork_server.start(tmp_path / f"{n} batches", _train, tmp_path, n) for n in (16, 8)]
    assert [each.wait().code for each in both] == [0, 0]
    assert sorted(batches_in(tmp_path).values()) == [8, 16]
    assert len([*(tmp_path / "records-version_0").glob("report*.html")]) == 2


def everything() -> list[Any]:
    return [
        PyTorch(schedule="first 2ba"),
        Memray(schedule="at 3ba for 2ba", flamegraph=True),
        always_on(),
    ]


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_no_file_is_replaced(tmp_path: Path) -> None:
    """Every name of a run is taken by a file of the user, and then by an earlier run: all stay."""
    trainer(tmp_path / "model", *everything(), logger=Records()).fit(Small())
    names = [path.relative_to(tmp_path / "model") for path in files_in(tmp_path / "model")]
    for name in names:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {name}")
    for callbacks, taken in ((everything(), nullcontext()), ([always_on()], numbered_summary())):
        earlier = {path: path.read_bytes() for path in files_in(tmp_path / "mine")}
        with taken:
            trainer(tmp_path / "mine", *callbacks, logger=Records()).fit(Small())
        assert all(path.read_bytes() == content for path, content in earlier.items())
        assert len(files_in(tmp_path / "mine")) > len(earlier)


class FailsToStart(Small):
    """Fails before the first batch."""

    def on_fit_start(self) -> None:
        raise ValueError("mine")


def test_a_failed_start_changes_nothing_of_an_earlier_run(
    tmp_path: Path, mlflow_database: str
) -> None:
    """The summary, the description and the artifacts of the finished run stay as they are."""

    def run(model: Small) -> MLFlowLogger:
        logger = MLFlowLogger("restarts", tracking_uri=mlflow_database, run_id=known)
        trainer(tmp_path, *callbacks(), Diagnosis(terminal=False), logger=logger).fit(model)
        return logger

    known: str | None = None
    logger = run(Small())
    known = str(logger.run_id)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    described = note(mlflow_database, logger)
    with pytest.raises(ValueError, match="mine"):
        run(FailsToStart())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert note(mlflow_database, logger) == described


def test_a_later_test_of_the_run_adds_its_stage(tmp_path: Path, mlflow_database: str) -> None:
    """Another Trainer with the run's id keeps what the training left, also in MLflow."""
    logger = MLFlowLogger("tested", run_name="tested", tracking_uri=mlflow_database)
    trainer(tmp_path, *callbacks(), logger=logger).fit(Small())
    trained, described = summary_of(tmp_path), note(mlflow_database, logger)
    again = MLFlowLogger("tested", tracking_uri=mlflow_database, run_id=str(logger.run_id))
    tester = trainer(tmp_path, *callbacks(), logger=again, limit_test_batches=3)
    tester.test(Small(), verbose=False)
    both = summary_of(tmp_path)
    assert list(both["stages"]) == ["train", "test"]
    assert both["stages"]["train"] == trained["stages"]["train"]
    assert both["ended"] == trained["ended"]
    assert note(mlflow_database, logger).splitlines()[0] == described.splitlines()[0]
    local = MlflowClient(mlflow_database).download_artifacts(str(logger.run_id), "tested")
    assert list(read_summary(Path(local, "summary.json"))["stages"]) == ["train", "test"]


class WaitsDuringTest(L.Callback):
    """Waits in an evaluation until the summary has it, and keeps what that says."""

    def __init__(self, root: Path) -> None:
        self.root, self.seen = root, dict[str, Any]()

    def _wait(self, *args: Any) -> None:
        def has_it() -> bool:
            self.seen = summary_of(self.root)
            return any(each.get("status") == "running" for each in self.seen["stages"].values())

        if args[3] == 8 and args[0].state.fn != "fit":
            until(has_it)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start = _wait


@pytest.mark.parametrize("function", ["test", "validate", "predict"])
@pytest.mark.parametrize("status", ["finished", "stopped by an exception"])
def test_a_long_evaluation_keeps_how_the_fit_ended(
    status: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the stage is running: the run keeps its fit's status and time, and what follows them."""
    monkeypatch.setattr(run_summary, "REFRESH", 0.0)
    monkeypatch.setattr(run_summary, "MOST_TIME", float("inf"))
    waits = WaitsDuringTest(tmp_path)
    options: Any = {"logger": Records(), "log_every_n_steps": 2, "limit_val_batches": 16}
    run: L.Trainer = trainer(tmp_path, *callbacks(), waits, **options)
    with nullcontext() if status == "finished" else pytest.raises(ValueError, match="mine"):
        run.fit(Small() if status == "finished" else Crashes())
    trained = summary_of(tmp_path)
    assert trained["status"] == status
    getattr(run, function)(Small())
    stage = "validate_alone" if function == "validate" else function
    for found, its in ((waits.seen, "running"), (summary_of(tmp_path), "finished")):
        assert found["stages"].pop(stage)["status"] == its
        assert {key: each for key, each in trained.items() if found[key] != each} == {}


def _fit_killed(folder: Path) -> None:
    class Killed(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 10:
                until(lambda: [*folder.rglob("summary.json")])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, batch_idx)

    run_summary.REFRESH = 0.0
    trainer(folder, *callbacks(), logger=Records(), log_every_n_steps=2).fit(Killed())


def _test_killed(folder: Path) -> None:
    class Killed(Small):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch_idx == 10:
                until(lambda: "test" in summary_of(folder)["stages"])
                os.kill(os.getpid(), signal.SIGKILL)

    run_summary.REFRESH, run_summary.MOST_TIME = 0.0, float("inf")
    run = trainer(folder, *callbacks(), logger=Records(), log_every_n_steps=2)
    run.fit(Small())
    run.test(Killed(), verbose=False)


def test_a_finished_training_stays_so_if_its_test_is_killed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """In `runs`, too; also after a further test, of another process."""
    fork_server.start(tmp_path / "log", _test_killed, tmp_path / "run").wait()
    for tests in (1, 2):
        found = summary_of(tmp_path / "run")
        assert (found["status"], "updated" in found) == ("finished", False)
        assert found["stages"]["test" if tests == 1 else "test_1"]["status"] == "running"
        assert [each.state for each in in_folder(tmp_path / "run", 0.0, [])] == ["finished"]
        trainer(tmp_path / "run", *callbacks(), logger=Records()).test(Small(), verbose=False)


def test_a_killed_training_stays_so_if_its_checkpoint_is_tested(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The test of another process has ended, and the fit has not."""
    fork_server.start(tmp_path / "log", _fit_killed, tmp_path / "run").wait()
    killed = summary_of(tmp_path / "run")
    assert killed["status"] == "running"
    trainer(tmp_path / "run", *callbacks(), logger=Records()).test(Small(), verbose=False)
    found = summary_of(tmp_path / "run")
    assert found["stages"]["test"]["status"] == "finished"
    assert (found["status"], found["updated"]) == ("running", killed["updated"])
    assert "ended" not in found
    assert [each.state for each in in_folder(tmp_path / "run", 0.0, [])] == ["killed"]


def test_hangs_of_an_evaluation_are_added_to_those_of_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was reported, and has ended since, says so."""
    run = trainer(tmp_path, *callbacks(), logger=Records())
    run.fit(Small())
    (path,) = tmp_path.rglob("summary.json")
    hangs = [{"began": f"2026-11-25T10:0{n}:00+0000", "seconds": 9.0, "text": "x"} for n in (1, 2)]
    path.write_text(json.dumps({**read_summary(path), "hangs": hangs}))
    ended = {**hangs[1], "ended": "2026-11-25T10:08:00+0000"}
    timings = Timings()
    monkeypatch.setattr(timings, "summary_sections", lambda: {"hangs": [ended]})
    trainer(tmp_path, timings, logger=Records()).test(Small(), verbose=False)
    assert summary_of(tmp_path)["hangs"] == [hangs[0], ended]


def test_validation_of_its_own_does_not_replace_that_of_the_fit(tmp_path: Path) -> None:
    """Before or after a fit it has stages of its own."""
    run = trainer(tmp_path, *callbacks(), logger=Records(), max_epochs=2, limit_val_batches=5)
    run.validate(Small(), verbose=False)
    assert list(summary_of(tmp_path)["stages"]) == ["validate_alone"]
    run.fit(Small())
    fitted = summary_of(tmp_path)
    assert sorted(fitted["stages"]) == ["train", "validate", "validate_alone"]
    assert fitted["stages"]["validate"]["whole_run"]["batches"] == 10
    assert fitted["stages"]["validate_alone"]["whole_run"]["batches"] == 5
    run.limit_val_batches = 3
    run.validate(Small(), verbose=False)
    found = summary_of(tmp_path)
    assert found["stages"]["validate"] == fitted["stages"]["validate"]
    alone = found["stages"]["validate_alone"]["whole_run"]
    assert (alone["batches"], alone["last"] - alone["first"]) == (3, 2)
    assert found["stages"]["validate_alone_1"] == fitted["stages"]["validate_alone"]


def test_short_predictions_leave_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Packages call `predict` a thousand times: no file, and one line about missing loggers."""
    run = trainer(tmp_path, *callbacks(), Diagnosis(terminal=False), limit_predict_batches=2)
    model = Small()
    for _ in range(3):
        run.predict(model)
    assert list(tmp_path.iterdir()) == []
    run.fit(model)
    (folder,) = tmp_path.iterdir()
    run.predict(model)
    run.test(model, verbose=False)
    assert list(tmp_path.iterdir()) == [folder]
    assert summary_of(tmp_path)["status"] == "finished"


def test_runs_that_start_in_the_same_second_have_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if their generated names are equal."""
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: b"ab" if size == 2 else urandom(size))
    monkeypatch.setattr(time, "strftime", lambda *_: "run-20260101-000000-")
    for _ in range(2):
        trainer(tmp_path, SpeedMonitor(window_size=4)).fit(Small())
    folders = sorted(path.parent for path in tmp_path.rglob("summary.json"))
    assert len(set(folders)) == 2


def test_a_summary_that_cannot_be_written_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the folder cannot be made, the terminal has the whole summary."""
    (tmp_path / "records-version_0").write_text("a file in place of the folder")
    with pytest.warns(PerfWarning):
        trainer(tmp_path, always_on(), logger=Records()).fit(Small())
    shown = capsys.readouterr().out
    assert "whole run" in shown
    assert "MFU" in shown


# -- reading --------------------------------------------------------------------------------------


@pytest.fixture
def trained(in_tmp: Path) -> Path:
    """The folder of a finished run below the working directory."""
    run = trainer(in_tmp / "logs", *callbacks(), logger=CSVLogger(in_tmp / "logs", "mine"))
    run.fit(Small())
    return in_tmp / "logs" / "mine-version_0"


def test_a_run_without_mlflow_can_be_reported(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found as the latest run, by folder, file, name or parent folder; also as JSON."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = trained / "summary.json"
    for what in ([], [str(trained)], [str(file)], [trained.name], [str(trained.parent)]):
        code, out, err = call(capsys, "report", *what)
        assert (code, err) == (0, "")
        assert out.startswith("mine-version_0 (")
        for part in ("MFU", "batches/s", "1 TFLOP/s per device (given)"):
            assert part in out
        assert "status" not in out
        assert str(trained / "report.html") in out
        assert "mlflow" not in out.lower()
    code, out, _ = call(capsys, "report", str(trained), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["stages"] == read_summary(file)["stages"]
    assert str(file) in found["files"]


DAMAGED = {
    "cut short": ('{"version": 1, "ru', "is cut short"),
    "empty": ("", "is cut short"),
    "a list": ("[]", "is not a summary"),
    "no version": ("{}", "is not a summary"),
    "newer": ('{"version": 99}', "newer"),
    "partial": ('{"version": 1, "run": "x"}', "is damaged"),
    "wrong types": ('{"version": 1, "run": "x", "status": "finished", "stages": 3}', "is damaged"),
    "binary": ("\x80\udc80", "is cut short"),
    "infinite": (
        '{"version": 1, "run": "x", "status": "finished", "stages": {"train": {"whole_run": '
        '{"first": 0, "last": 1, "batches": 2, "timings": {"forward": Infinity}}}}}',
        "is damaged",
    ),
    "no rate in the last window": (
        '{"version": 1, "run": "x", "status": "running", "stages": {"train": {"whole_run": '
        '{"first": 0, "last": 1, "batches": 2}, "last_window": {"first": 0, "last": 1, "batches": '
        '2, "throughput": {"mfu": null}}}}}',
        "is damaged",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_summary_gives_a_one_line_error(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncated, foreign and newer files are refused with the reason and the path."""
    text, why = DAMAGED[kind]
    path = tmp_path / "summary.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SummaryError, match=why):
        read_summary(path)
    code, out, err = call(capsys, "report", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err


def test_a_callback_adds_a_section(tmp_path: Path) -> None:
    """The result of `summary_sections` is in the file; an error costs only that section."""

    class Notes(SpeedMonitor):
        def summary_sections(self) -> dict[str, Any]:
            return {"notes": [{"kind": "mine"}]}

    trainer(tmp_path, Notes()).fit(Small())
    (path,) = tmp_path.rglob("summary.json")
    found = read_summary(path)
    assert found["notes"] == [{"kind": "mine"}]
    assert undescribed(found, schema()) == ["/notes"]


def test_the_schema_describes_a_captured_trace(tmp_path: Path) -> None:
    """With kernels of a device and calls that wait for it."""
    (tmp_path / "trace.json").write_text(json.dumps(cuda_trace()))
    capture = summarize(tmp_path / "trace.json").as_dict()
    assert undescribed(capture, schema()["$defs"]["capture"]) == []
    whole = {"version": 2, "run": "a", "status": "finished", "stages": {}, "capture": capture}
    (tmp_path / "summary.json").write_text(json.dumps(whole))
    assert read_summary(tmp_path / "summary.json")["capture"]["device"]["devices"] == 1


def test_verdicts_are_in_the_summary_and_its_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal and the report show them; after a short run both say why there are none."""
    trainer(tmp_path, Diagnosis(), max_epochs=4).fit(Small())
    found = summary_of(tmp_path)
    code = found["verdicts"][0]["code"]
    assert code in capsys.readouterr().out
    assert code in call(capsys, "report", str(tmp_path))[1]
    trainer(tmp_path / "short", Diagnosis(), limit_train_batches=5).fit(Small())
    assert summary_of(tmp_path / "short")["abstained"]
    # As written by a later version, with more fields per verdict.
    more = {**found, "verdicts": [{**each, "more": 1} for each in found["verdicts"]]}
    (tmp_path / "summary.json").write_text(json.dumps(more))
    assert code in call(capsys, "report", str(tmp_path / "summary.json"))[1]


def test_a_summary_of_validation_alone(tmp_path: Path) -> None:
    """A run of another stage has a summary of that stage."""
    run: L.Trainer = trainer(tmp_path, *callbacks(), logger=Records(), limit_val_batches=5)
    run.validate(Small(), verbose=False)
    found = summary_of(tmp_path)
    assert list(found["stages"]) == ["validate_alone"]
    assert found["stages"]["validate_alone"]["whole_run"]["batches"] == 5


# Its windows: differences of totals, in bounded memory


def log_of(reports: int, every: int = 1, ranks: int = 1) -> WindowLog:
    """1 s, 4 samples and 0.5 s of a callback per batch and rank."""
    found = WindowLog(report(0), COLUMNS, MOST)
    for batch in range(every, reports * every + 1, every):
        found.add(report(batch, ranks))
    return found


def report(batch: int, ranks: int = 1, at_end: bool = False) -> Report:
    row = [batch * each for each in (1.0, 4.0, 1.0, 1.0, 7.0)]
    head = "train", batch - 1, Timestamp(batch=batch), at_end, 0
    return Report(*head, 1, (), costs(batch), [row] * ranks if batch else ())


def costs(batch: int) -> Totals:
    return Totals({PLOTS: Cost(batch / 2, batch)})


def test_windows_are_those_between_reports(tmp_path: Path) -> None:
    """A report that more callbacks share leaves out none of the next ones."""
    flops = Flops(schedule="every 4ba", peak_flops=1e9)
    run = trainer(tmp_path, flops, SpeedMonitor(window_size=2), Timings(), log_every_n_steps=2)
    run.fit(Small())
    found = summary_of(tmp_path)["stages"]["train"]
    assert found["windows"]["last"] == [*range(1, 16, 2)]
    assert (found["last_window"]["first"], found["last_window"]["last"]) == (14, 15)


def test_windows_are_differences_of_totals() -> None:
    """Seconds are means over ranks and samples are sums; other columns are left out."""
    found = table(log_of(reports=2, every=10, ranks=2))
    assert found == {
        "warm_up": 1,
        "last": [9, 19],
        "batches": [10, 10],
        "timed_batches": [10.0, 10.0],
        "timed_seconds": [10.0, 10.0],
        "samples": [80.0, 80.0],
        "timings": {"forward": [10.0, 10.0]},
        "culprits": {"Plots.on_train_batch_end": [5.0, 5.0]},
    }


def test_windows_have_no_samples_if_some_could_not_be_counted() -> None:
    """Their sum would be too small; the other columns remain."""
    columns = {**COLUMNS, "batch/uncounted_samples": 4}
    log = WindowLog(report(0), columns, MOST)
    for batch in (1, 2):
        log.add(report(batch))
    found = table(log)
    assert "samples" not in found
    assert found["timed_batches"] == [1.0, 1.0]


def test_memory_is_bounded_without_losing_totals() -> None:
    """100,000 reports become a few dozen windows of equal length that sum to the totals."""
    found = table(log_of(reports=100_000))
    batches = found["batches"]
    assert 40 <= len(batches) <= 100
    assert batches[0] == 1  # the warm-up
    assert max(batches) <= 4 * min(batches[1:-1])
    assert sum(batches) == found["last"][-1] + 1
    assert sum(found["timings"]["forward"]) == sum(batches)


def test_the_end_of_a_stage_is_kept_if_it_has_new_batches() -> None:
    """A short last window counts; a report without new batches is left out."""
    found = log_of(reports=100_000)
    kept = table(found)["last"]
    last = kept[-1] + 1
    for batch, at_end in ((last, True), (last + 1, False)):
        found.add(report(batch, at_end=at_end))
        assert table(found)["last"] == kept
    found.add(report(last + 1, at_end=True))
    assert table(found)["last"][-1] == last


def test_no_logger_gets_an_empty_row(tmp_path: Path) -> None:
    """A diagnosis of too few batches, or without a share of the time, logs nothing."""
    for batches in (5, 64):
        records = Records()
        options = {"limit_train_batches": min(batches, 16), "max_epochs": -(-batches // 16)}
        folder = tmp_path / str(batches)
        trainer(folder, Diagnosis(terminal=False), logger=records, **options).fit(Small())
        assert all(row for _, row in records.rows)


@pytest.mark.parametrize(
    ("share", "recording", "advised"), [(0.14, 0, 1), (0.14, 0.13, 0), (0.01, 0, 0)]
)
def test_costly_reports_are_named(share: float, recording: float, advised: bool) -> None:
    """With log_every_n_steps=1 our callbacks may take 14 % of the time: the summary says so."""
    overhead = {"seconds": 1.0, "share": share, "recording": recording}
    text = description({"run": "r", "status": "finished", "stages": {}, "overhead": overhead})
    assert f"lightning_perf: {share:.1%} of the time" in text
    assert ("for reports: raise Trainer(log_every_n_steps)" in text) == advised
    assert ("; 13.0% for recording: record fewer batches" in text) == (recording == 0.13)


def test_a_name_of_two_lines_is_one_in_markdown() -> None:
    """MLflow shows the label that the terminal wraps as one phrase."""
    window = {"first": 0, "last": 9, "batches": 10, "seconds": 1.0, "timings": {"forward": 0.5}}
    text = description(
        {"run": "r", "status": "finished", "stages": {"train": {"whole_run": window}}}
    )
    assert "| all time, with start and end | 50.0 ms per batch |" in text
    assert "whole run, steps 0 to 9 |" in text


def test_names_in_a_description_are_no_markup() -> None:
    """What a stranger named a callback is shown as text; names with underscores read well."""
    verdict = {
        "code": "callback-bound",
        "severity": "warning",
        "share": 0.2,
        "predicted_speedup": 1.25,
        "culprit": "<img src=x onerror=y>.on_fit|`[a](b)",
    }
    cost = {
        "share": 0.2,
        "seconds": 1.0,
        "calls": 1,
        "name": "*a* &lt; \x1b _b_ A.on_train_batch_end",
    }
    text = description(
        {
            "run": "r", "status": "a\n# b | c", "stages": {}, "verdicts": [verdict],
            "culprits": [cost],
        }
    )  # fmt: skip
    assert r"&lt;img src=x onerror=y>.on_fit\|\`\[a\](b)" in text
    assert r"\*a\* &amp;lt; \\x1b \_b\_ A.on_train_batch_end" in text
    assert r"- status: a, # b \| c" in text


def test_a_run_has_one_page_and_leaves_the_user_s_alone(tmp_path: Path) -> None:
    """Predictions renew the page, another fit has its own; one that the user wrote stays."""
    (user := tmp_path / "records-version_0").mkdir(parents=True)
    (user / "report.html").write_text("the user's")
    run = trainer(tmp_path, Timings(), logger=Records())
    model = Small()
    expected = {"report.html"}
    for fit, summary in ((1, "summary.json"), (2, "summary-2.json")):
        run.fit_loop.max_epochs = fit
        run.fit(model)
        for _ in range(3):
            run.predict(model)
        own = f"report-{fit + 1}.html"
        expected |= {summary, own}
        files = {path.name for path in user.glob("*.*") if not path.name.startswith(".")}
        assert files == expected
        page = (user / own).read_text()
        assert "Where the time of a batch went, predict" in page
        assert f"steps {16 * (fit - 1)} to {16 * fit - 1}" in page
        found = read_summary(user / summary)
        assert found["report"] == f"records-version_0/{own}"
        assert report_page(found) == page
    assert (user / "report.html").read_text() == "the user's"
