"""PyTorch: traces of windows of batches."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.recordings import theirs_in
from helpers.small import Records, Small, left_in, ours, trainer
from helpers.torch_traces import steps, traces
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import (
    Always,
    At,
    ConfigError,
    Cyclic,
    Every,
    Moment,
    PerfWarning,
    PyTorch,
    Schedule,
    Stages,
    Timings,
)


def fit(folder: Path, profiler: PyTorch, **options: Any) -> dict[str, dict[str, Any]]:
    trainer(folder, profiler, logger=Records(), **options).fit(Small())
    return traces(folder / "records-version_0" / "torch_traces")


@pytest.mark.parametrize(
    ("schedule", "files"),
    [
        (None, {"rank0.5": [1, 2, 3, 4]}),
        (Cyclic(warmup=2, active=2, repeat=2), {"rank0.4": [2, 3], "rank0.8": [6, 7]}),
        (Every("20sp", lasting="1ba"), {"rank0.6": [5], "rank0.11": [10], "rank0.16": [15]}),
    ],
    ids=str,
)
def test_windows_become_files(tmp_path: Path, schedule: Any, files: dict[str, list[int]]) -> None:
    """Each window is one file with the steps of its batches."""
    found = fit(tmp_path, PyTorch(schedule=schedule))
    assert {name.removesuffix(".pt.trace.json.gz"): steps(t) for name, t in found.items()} == files


def test_a_trace_of_evaluation_has_one_step_per_batch(tmp_path: Path) -> None:
    """What follows the last batch belongs to its step."""
    profiler = PyTorch(schedule=Stages(["validate", "test", "predict"]))
    limits = {f"limit_{name}_batches": 3 for name in ("val", "test", "predict")}
    run = trainer(tmp_path, profiler, logger=Records(), val_check_interval=8, **limits)
    for stage in (run.fit, run.validate, run.test, run.predict):
        stage(Small())
    found = traces(tmp_path / "records-version_0" / "torch_traces")
    assert {name.removesuffix(".pt.trace.json.gz"): steps(t) for name, t in found.items()} == {
        "predict/rank0.3": [0, 1, 2],
        "test/rank0.3": [0, 1, 2],
        "validate/rank0.3": [0, 1, 2],
        "validate/rank0.6": [3, 4, 5],
        "validate/rank0.9": [6, 7, 8],
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"val_check_interval": 4}, [[2, 3], [4, 5, 6, 7], [8, 9]]),
        ({"limit_train_batches": 5, "max_epochs": 2}, [[2, 3, 4], [5, 6, 7, 8, 9]]),
        ({"limit_val_batches": 0}, [[*range(2, 10)]]),
        ({"check_val_every_n_epoch": 2}, [[*range(2, 10)]]),
    ],
    ids=str,
)
def test_a_trace_that_validation_ends_has_one_step_per_batch(
    tmp_path: Path, options: dict[str, Any], expected: list[list[int]]
) -> None:
    """No step begins between the last batch and validation."""
    profiler = PyTorch(schedule=Stages("train") & At("2ba", lasting="8ba"))
    trainer(tmp_path, profiler, **{"limit_val_batches": 2} | options).fit(Small())
    found = sorted(steps(trace) for trace in traces(tmp_path).values())
    assert found == expected


def test_a_trace_has_metadata(tmp_path: Path) -> None:
    """Rank, world size, stage and batch are in the trace, for tools that align ranks."""
    (trace,) = fit(tmp_path, PyTorch(schedule="first 2ba")).values()
    assert trace["rank"] == 0
    assert trace["world_size"] == 1
    assert trace["stage"] == "train"
    assert any("aten::addmm" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.parametrize("warmup", [0, 3])
def test_metadata_is_that_of_the_first_recorded_batch(tmp_path: Path, warmup: int) -> None:
    """Ranks whose warm-ups differ agree on the window, which `trace --combine` compares."""
    profiler = PyTorch(schedule=Cyclic(wait=18 - warmup, warmup=warmup, active=2))
    (trace,) = fit(tmp_path, profiler, max_epochs=2, accumulate_grad_batches=2).values()
    assert [trace[count] for count in ("epoch", "batch", "step")] == [1, 18, 9]
    assert steps(trace) == [18, 19]


def test_uncompressed_traces_keep_their_name(tmp_path: Path) -> None:
    """compress=False writes plain JSON without .gz."""
    profiler = PyTorch(schedule="first 2ba", compress=False)
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (path,) = left_in(tmp_path / "records-version_0" / "torch_traces")
    assert path.name == "rank0.2.pt.trace.json"
    assert json.loads(path.read_text())["traceEvents"]


def test_saved_traces_lists_the_latest_by_rank(tmp_path: Path) -> None:
    """It has at most num_traces_to_keep entries, the latest last, as does the disk."""
    profiler = PyTorch(schedule="every 4ba", num_traces_to_keep=2)
    found = fit(tmp_path, profiler)
    assert sorted(found) == ["rank0.13.pt.trace.json.gz", "rank0.9.pt.trace.json.gz"]
    saved = [(stamp.batch, [p.name for p in paths if p]) for stamp, paths in profiler.saved_traces]
    assert saved == [(9, ["rank0.9.pt.trace.json.gz"]), (13, ["rank0.13.pt.trace.json.gz"])]


def test_saved_traces_lists_those_of_earlier_runs(tmp_path: Path) -> None:
    """A test and a second fit add to it; the summary of a run has its own traces."""
    profiler = PyTorch(schedule="at 4ba", num_traces_to_keep=3)
    for folder, stages in (("one", "fit test"), ("two", "test fit")):
        run = trainer(tmp_path / folder, profiler, Timings(), logger=Records(), max_epochs=1)
        for stage in stages.split():
            getattr(run, stage)(Small())
    saved = [path.relative_to(tmp_path).parts for _, (path,) in profiler.saved_traces if path]
    assert [(folder, parent) for folder, *_, parent, _ in saved] == [
        ("one", "test"),
        ("two", "test"),
        ("two", "torch_traces"),
    ]
    summary = json.loads((tmp_path / "two/records-version_0/summary.json").read_text())
    assert [Path(each).parent.name for each in summary["traces"]] == ["torch_traces", "test"]


@pytest.mark.slow
def test_a_folder_of_a_later_run_is_refused_before_training(tmp_path: Path) -> None:
    """overwrite=False raises for a trace of a later batch, and overwrite=True replaces it."""
    fit(tmp_path, PyTorch(schedule="first 2ba"))
    run = trainer(tmp_path, PyTorch(schedule="first 2ba"), logger=Records())
    advice = r"overwrite=True.*another folder or filename.*resume.*ckpt_path"
    with pytest.raises(FileExistsError, match=advice):
        run.fit(Small())
    assert run.global_step == 0
    assert fit(tmp_path, PyTorch(schedule="first 2ba", overwrite=True))


@pytest.mark.parametrize("variable", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_restarted_job_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A job preempted before its first checkpoint restarts: one warning, no file is lost."""
    fit(tmp_path, PyTorch(schedule="first 2ba"))
    monkeypatch.setenv(variable, "1")
    with pytest.warns(PerfWarning, match=r"rank0\.2\.\S+ was written after") as caught:
        found = fit(tmp_path, PyTorch(schedule="first 2ba"))
    assert len(ours(caught)) == 1
    assert {"rank0.2.pt.trace.json.gz", "rank0-2.2.pt.trace.json.gz"} <= set(found)


def test_only_the_named_ranks_record(tmp_path: Path) -> None:
    """Other ranks leave no file; a rank beyond the world size gives a warning."""
    with pytest.warns(PerfWarning, match=r"ranks=\[1\].* the number of processes in the run is 1"):
        assert not fit(tmp_path, PyTorch(ranks=[1]))
    assert fit(tmp_path, PyTorch(ranks=0, schedule="first 1ba"))


@pytest.mark.parametrize("schedule", ["every 2ba", "always"])
def test_nothing_is_recorded_beside_lightning_s_profiler(tmp_path: Path, schedule: str) -> None:
    """Its trace is complete, also if it starts in one of our windows; one warning."""
    theirs = theirs_in(tmp_path / "theirs")
    profiler = PyTorch(schedule=schedule)
    with pytest.warns(
        PerfWarning, match=r"while Trainer\(profiler=PyTorchProfiler.*missing"
    ) as caught:
        trainer(tmp_path, profiler, logger=Records(), profiler=theirs).fit(Small())
    assert len(ours(caught)) == 1
    assert profiler.saved_traces == []
    (trace,) = (tmp_path / "theirs").rglob("*.pt.trace.json")
    assert trace.read_text().count('"name": "aten::addmm"') >= 3


@pytest.mark.parametrize("batches", [4, 16])
def test_lightning_s_profiler_with_a_schedule_continues(tmp_path: Path, batches: int) -> None:
    """Trainer(profiler="pytorch") behaves as without our callback."""
    profiler = PyTorch(schedule="first 9ba")
    run = trainer(tmp_path, profiler, profiler="pytorch", limit_train_batches=batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Small())
    assert run.global_step == batches
    assert len(ours(caught)) == 1
    assert run.profiler.function_events
    assert profiler.saved_traces == []


def test_nothing_is_written_outside_of_the_folder(tmp_path: Path) -> None:
    """A hostile run name stays below the root, and no partial file is left."""

    class Hostile(Records):
        @property
        def name(self) -> str:
            return "../../up"

    root = tmp_path / "root"
    trainer(root, PyTorch(schedule="first 1ba"), logger=Hostile()).fit(Small())
    (trace,) = left_in(tmp_path)
    assert trace.name == "rank0.1.pt.trace.json.gz"
    assert all(path.is_relative_to(root) for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"schedule": 3}, "schedule"),
        ({"schedule": "0ba"}, "schedule"),
        ({"ranks": [-1]}, "ranks"),
        ({"ranks": []}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"ranks": "0"}, "ranks"),
        ({"folder": "{run}/traces"}, "folder"),
        ({"folder": "../traces"}, "folder"),
        ({"filename": "{rnk}.json"}, "filename"),
        ({"filename": "../rank{rank}.json"}, "filename"),
        ({"filename": "/rank{rank}.json"}, "filename"),
        ({"remote_file_name": "{oops}"}, "remote_file_name"),
        ({"num_traces_to_keep": -2}, "num_traces_to_keep"),
        ({"num_traces_to_keep": 1.5}, "num_traces_to_keep"),
        ({"num_traces_to_keep": True}, "num_traces_to_keep"),
        ({"batches_per_trace": 0}, "batches_per_trace"),
        ({"record_shape": True}, "record_shape"),
    ],
)
def test_bad_settings_are_refused_at_construction(options: dict[str, Any], field: str) -> None:
    """The message has the field, the value and a valid example."""
    with pytest.raises(ConfigError, match=f"{field}="):
        PyTorch(**options)


def test_runs_of_the_same_name_do_not_share_a_folder(tmp_path: Path) -> None:
    """Loggers of the same name and version have different folders."""
    for logs in ("a", "b", "c"):
        logger = CSVLogger(tmp_path / logs)
        trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
    found = traces(tmp_path)
    folders = sorted(path.split("/")[0] for path in found)
    assert folders[0] == "lightning_logs-version_0"
    assert len({folder.removeprefix(folders[0]) for folder in folders}) == 3
    for path, trace in found.items():
        assert trace["run_name"] == path.split("/")[0]  # a trace says which folder it is from


# Lightning before 2.5.1 writes hparams.yaml without hyperparameters, too, and then warns of it.
@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_runs_in_different_working_folders_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger's relative folder is another one in each; the same one is found again."""
    names = []
    for place in ("a", "b", "a"):
        (tmp_path / place).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        profiler = PyTorch(schedule="first 1ba", overwrite=True)
        logger = CSVLogger("logs", version=0)
        trainer(tmp_path / "root", profiler, logger=logger).fit(Small())
        names.append(profiler.saved_traces[-1][1][0].relative_to(tmp_path / "root").parts[0])
    assert names[0] == names[2] == "lightning_logs-version_0"
    assert names[1].startswith("lightning_logs-version_0-")


def test_mlflow_runs_of_the_same_name_do_not_share_a_folder(
    tmp_path: Path, mlflow_database: str
) -> None:
    """MLflow generates equal names for runs with equal seeds."""
    found, folders = [], []
    for _ in range(2):
        logger = MLFlowLogger("twice", tracking_uri=mlflow_database, run_name="owl-7")
        trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
        found += MlflowClient(mlflow_database).list_artifacts(logger.run_id)
        folders.append(f"owl-7-{logger.run_id[:8]}" if folders else "owl-7")
    assert [entry.path for entry in found] == ["owl-7", "owl-7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == folders


def test_a_profiler_without_recordings_writes_nothing(tmp_path: Path) -> None:
    """The run's folder does not exist before the first trace."""
    trainer(tmp_path, PyTorch(schedule="never"), logger=Records()).fit(Small())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resume_from_an_older_checkpoint(tmp_path: Path) -> None:
    """Later traces of the run are kept, with one warning, and new ones get numbers."""
    keep = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_top_k=-1)

    def run(*callbacks: Callback) -> Trainer:
        profiler = PyTorch(schedule="every 10ba")
        options = {"enable_checkpointing": bool(callbacks), "max_epochs": 2}
        return trainer(tmp_path, profiler, *callbacks, logger=Records(), **options)

    run(keep).fit(Small())
    with pytest.warns(PerfWarning, match=r"rank0\.21\.\S+ was written after") as caught:
        run().fit(Small(), ckpt_path=tmp_path / "kept" / "epoch=0.ckpt")
    assert len(ours(caught)) == 1
    names = [Path(name).name.removesuffix(".pt.trace.json.gz") for name in traces(tmp_path)]
    assert names == ["rank0-2.21", "rank0-2.31", "rank0.11", "rank0.21", "rank0.31"]
    with pytest.raises(FileExistsError, match="resume"):
        run().fit(Small())


@pytest.mark.parametrize("limits", [{}, {"max_steps": 6}])
def test_no_recording_starts_at_the_end_of_training(tmp_path: Path, limits: dict[str, int]) -> None:
    """A window is closed at the end of training, and no other one begins."""
    begun = []

    class Noting(PyTorch):
        def record(self, path: Path, context: Any, warmup: int) -> Any:
            begun.append(context.timestamp.batch)
            return super().record(path, context, warmup)

    schedule = Always() & Stages("train")
    fit(tmp_path, Noting(schedule=schedule, batches_per_trace=3), **limits)
    assert begun == list(range(0, limits.get("max_steps", 16), 3))


@pytest.mark.parametrize(
    "schedule",
    [Cyclic(warmup=100, active=1), Cyclic(warmup=100, per_epoch=True), Cyclic(wait=50, warmup=9)],
    ids=str,
)
def test_no_look_ahead_while_no_window_is_near(tmp_path: Path, schedule: Schedule) -> None:
    """A long warm-up does not cost a search in every batch."""
    looked_at = []

    class Counted(Cyclic):
        def window(self, moment: Moment) -> Any:
            looked_at.append(moment.timestamp.batch)
            return super().window(moment)

    counted = Counted(**schedule._arguments())
    with warnings.catch_warnings(record=True):  # for schedules that were never true
        warnings.simplefilter("always")
        fit(tmp_path, PyTorch(schedule=counted), max_epochs=2, limit_train_batches=16)
    # At the end the first window is searched for beyond the 32 batches.
    assert sum(batch < 32 for batch in looked_at) <= 16 * 2 + 100


# Each collection lets other threads run: on this thread while torch starts or stops, on the others
# at any time.
COLLECTING = """
import gc, os, sys, threading, time
from pathlib import Path
from helpers.small import Small, trainer
from torch.profiler import profile
from lightning_perf import PyTorch

def deep(depth):
    if depth:
        return deep(depth - 1)
    time.sleep(0.0005)

def churn():
    while True:
        thread = threading.Thread(target=deep, args=(40,), daemon=True)
        thread.start()
        thread.join()

def fit(windows):
    profiler = PyTorch(schedule="every 2ba for 1ba", with_stack=True)
    trainer(Path(sys.argv[1], windows), profiler, max_epochs=1, limit_val_batches=0).fit(Small())
    return len(profiler.saved_traces)

def switch(phase, info):
    if within or threading.current_thread() is not threading.main_thread():
        time.sleep(0.001)

def patched(original):
    def call(self):
        within.append(1)
        original(self)
        within.clear()
    return call

within = []
windows = fit("imports")
for name in ("start_trace", "stop_trace"):
    setattr(profile, name, patched(getattr(profile, name)))
gc.collect()
gc.freeze()
gc.callbacks.append(switch)
for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
gc.set_threshold(20, 10, 10)
# Not the interpreter's own end: daemon threads may crash it.
os._exit(fit("collecting") != windows)
"""


@pytest.mark.parametrize("schedule", ["at 2ba for 2ba", Always()], ids=str)
def test_parameters_can_be_swapped_once_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: Schedule | str
) -> None:
    """What was recorded is released without a collection: Lightning moves the module at the end."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    gc.disable()
    try:
        assert fit(tmp_path, PyTorch(schedule=schedule))
    finally:
        gc.enable()


@pytest.mark.slow
def test_garbage_collection_crashes_neither_start_nor_stop(tmp_path: Path) -> None:
    """With stacks torch hooks all threads; collections would free frames and hooks in use."""
    command = [sys.executable, "-X", "faulthandler", "-c", COLLECTING, str(tmp_path)]
    tests = str(Path(__file__).parents[1])
    # Freed memory is overwritten at once, so that reading it crashes.
    env = os.environ | {"PYTHONMALLOC": "debug", "PYTHONPATH": tests}
    subprocess.run(command, env=env, check=True, timeout=240)
