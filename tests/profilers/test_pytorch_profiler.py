"""PyTorch: windows of batches become trace files that their readers can open."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.recordings import theirs_in
from helpers.small import Records, Small, left_in, ours, trainer
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import (
    Always,
    ConfigError,
    Cyclic,
    Every,
    Fixed,
    Moment,
    Never,
    PerfWarning,
    PyTorch,
    Schedule,
    Stages,
)


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """All finished traces below a folder, by their path in it."""
    return {
        str(path.relative_to(folder)): json.loads(gzip.decompress(path.read_bytes()))
        for path in sorted(folder.rglob("*.pt.trace.json.gz"))
    }


def steps(trace: dict[str, Any]) -> list[int]:
    """The batches that a trace holds, by their number in the run."""
    names = {event.get("name", "") for event in trace["traceEvents"]}
    return sorted(int(n.split("#")[1]) for n in names if n.startswith("ProfilerStep#"))


def fit(folder: Path, profiler: PyTorch, **options: Any) -> dict[str, dict[str, Any]]:
    trainer(folder, profiler, logger=Records(), **options).fit(Small())
    return traces(folder / "records-version_0" / "torch_traces")


@pytest.mark.parametrize(
    ("schedule", "files"),
    [
        (None, {"rank0.5": [1, 2, 3, 4]}),
        (Cyclic(warmup=2, active=2, repeat=2), {"rank0.4": [2, 3], "rank0.8": [6, 7]}),
        (Fixed(warmup_steps=0, active_steps=2), {"rank0.2": [0, 1]}),
        (Fixed(warmup_steps=14, active_steps=5), {"rank0.16": [14, 15]}),
        ("every 6ba for 2ba", {"rank0.8": [6, 7], "rank0.14": [12, 13]}),
        (Every("20sp", lasting="1ba"), {"rank0.6": [5], "rank0.11": [10], "rank0.16": [15]}),
        (Never(), {}),
    ],
    ids=str,
)
def test_windows_become_files(tmp_path: Path, schedule: Any, files: dict[str, list[int]]) -> None:
    """Each window is one file, named by the batches done, with the steps of its batches inside."""
    found = fit(tmp_path, PyTorch(schedule=schedule))
    assert {name.removesuffix(".pt.trace.json.gz"): steps(t) for name, t in found.items()} == files


def test_a_trace_says_which_rank_and_which_part_of_the_run(tmp_path: Path) -> None:
    """Rank, world size, stage and batch stand in the trace, for tools that line ranks up."""
    (trace,) = fit(tmp_path, PyTorch(schedule="first 2ba")).values()
    assert trace["rank"] == 0
    assert trace["world_size"] == 1
    assert trace["stage"] == "train"
    assert any("aten::addmm" in event.get("name", "") for event in trace["traceEvents"])


def test_uncompressed_traces_keep_their_name(tmp_path: Path) -> None:
    """compress=False leaves plain JSON under the plain name."""
    profiler = PyTorch(schedule="first 2ba", compress=False)
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (path,) = left_in(tmp_path / "records-version_0" / "torch_traces")
    assert path.name == "rank0.2.pt.trace.json"
    assert json.loads(path.read_text())["traceEvents"]


def test_other_stages_have_folders_of_their_own(tmp_path: Path) -> None:
    """Validation inside of fit, test and predict do not collide with training."""
    profiler = PyTorch(schedule="first 2ba")
    run = trainer(tmp_path, profiler, logger=Records(), limit_val_batches=4)
    model = Small()
    run.fit(model)
    run.test(model, verbose=False)
    run.predict(model)
    found = traces(tmp_path / "records-version_0" / "torch_traces")
    assert sorted(found) == [
        f"{folder}rank0.2.pt.trace.json.gz" for folder in ("predict/", "", "test/", "validate/")
    ]
    assert {name: trace["stage"] for name, trace in found.items()} == {
        "rank0.2.pt.trace.json.gz": "train",
        "validate/rank0.2.pt.trace.json.gz": "validate",
        "test/rank0.2.pt.trace.json.gz": "test",
        "predict/rank0.2.pt.trace.json.gz": "predict",
    }


def test_saved_traces_lists_the_latest_by_rank(tmp_path: Path) -> None:
    """At most num_traces_to_keep entries stay, the latest last, and the same files on disk."""
    profiler = PyTorch(schedule="every 4ba", num_traces_to_keep=2)
    found = fit(tmp_path, profiler)
    assert sorted(found) == ["rank0.13.pt.trace.json.gz", "rank0.9.pt.trace.json.gz"]
    saved = [(stamp.batch, [p.name for p in paths if p]) for stamp, paths in profiler.saved_traces]
    assert saved == [(9, ["rank0.9.pt.trace.json.gz"]), (13, ["rank0.13.pt.trace.json.gz"])]


def test_a_folder_of_a_later_run_is_refused_before_training(tmp_path: Path) -> None:
    """overwrite=False raises for a trace from further on, and overwrite=True replaces it."""
    fit(tmp_path, PyTorch(schedule="first 2ba"))
    run = trainer(tmp_path, PyTorch(schedule="first 2ba"), logger=Records())
    advice = r"overwrite=True.*another folder or filename.*resume.*ckpt_path"
    with pytest.raises(FileExistsError, match=advice):
        run.fit(Small())
    assert run.global_step == 0
    assert fit(tmp_path, PyTorch(schedule="first 2ba", overwrite=True))


@pytest.mark.parametrize("variable", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_job_that_its_cluster_starts_again_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Preempted before its first checkpoint, it begins anew: one warning, and no file is lost."""
    fit(tmp_path, PyTorch(schedule="first 2ba"))
    monkeypatch.setenv(variable, "1")
    with pytest.warns(PerfWarning, match=r"rank0\.2\.\S+ was written after") as caught:
        found = fit(tmp_path, PyTorch(schedule="first 2ba"))
    assert len(ours(caught)) == 1
    assert {"rank0.2.pt.trace.json.gz", "rank0-2.2.pt.trace.json.gz"} <= set(found)


def test_only_the_named_ranks_record(tmp_path: Path) -> None:
    """A rank that is not named leaves no file, and a rank that is not there is refused."""
    with pytest.raises(ConfigError, match=r"ranks=\[1\].*beyond"):
        fit(tmp_path, PyTorch(ranks=[1]))
    assert fit(tmp_path, PyTorch(ranks=0, schedule="first 1ba"))


def test_windows_that_meet_lightning_s_own_profiler_are_left_out(tmp_path: Path) -> None:
    """Both traces are whole: ours before and after, theirs between, with one warning."""
    theirs = theirs_in(tmp_path / "theirs")
    profiler = PyTorch(schedule="every 2ba")
    with pytest.warns(
        PerfWarning, match=r"while Trainer\(profiler=PyTorchProfiler.*left"
    ) as caught:
        trainer(tmp_path, profiler, logger=Records(), profiler=theirs).fit(Small())
    assert len(ours(caught)) == 1
    assert [stamp.batch for stamp, _ in profiler.saved_traces] == [3, 9, 11, 13, 15]
    for _, (path,) in profiler.saved_traces:
        assert "aten::addmm" in gzip.decompress(path.read_bytes()).decode()
    (trace,) = (tmp_path / "theirs").rglob("*.pt.trace.json")
    assert trace.read_text().count('"name": "aten::addmm"') >= 3


@pytest.mark.parametrize("batches", [4, 16])
def test_lightning_s_own_profiler_with_its_own_schedule_goes_on(
    tmp_path: Path, batches: int
) -> None:
    """Trainer(profiler="pytorch") trains and reports as it does without us."""
    profiler = PyTorch(schedule="first 9ba")
    run = trainer(tmp_path, profiler, profiler="pytorch", limit_train_batches=batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Small())
    assert run.global_step == batches
    assert len(ours(caught)) == 1
    assert run.profiler.function_events
    assert [stamp.batch for stamp, _ in profiler.saved_traces] == ([] if batches == 4 else [9])


def test_a_window_ends_where_lightning_s_own_profiler_begins(tmp_path: Path) -> None:
    """What was recorded until then is kept, and the rest is recorded when it is over."""
    theirs = theirs_in(tmp_path / "theirs")
    profiler = PyTorch(schedule="always")
    with pytest.warns(PerfWarning, match="leaves out"):
        trainer(tmp_path, profiler, logger=Records(), profiler=theirs).fit(Small())
    assert [stamp.batch for stamp, _ in profiler.saved_traces] == [3, 16]
    assert list((tmp_path / "theirs").rglob("*.pt.trace.json"))


def test_nothing_is_written_outside_of_the_named_folder(tmp_path: Path) -> None:
    """Folder, stage and a hostile run name stay below the root; no partial file is left."""

    class Hostile(Records):
        @property
        def name(self) -> str:
            return "../../up"

    root = tmp_path / "root"
    trainer(root, PyTorch(schedule="first 1ba"), logger=Hostile()).fit(Small())
    marker, trace = left_in(tmp_path)
    assert (marker.name, trace.name) == (".run", "rank0.1.pt.trace.json.gz")
    assert marker.is_relative_to(root)
    assert trace.is_relative_to(root)


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
        ({"batches_per_trace": 0}, "batches_per_trace"),
        ({"record_shape": True}, "record_shape"),
    ],
)
def test_bad_settings_are_refused_at_construction(options: dict[str, Any], field: str) -> None:
    """The message names the field, the value and an example that works."""
    with pytest.raises(ConfigError, match=f"{field}="):
        PyTorch(**options)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (
            "record_shape",
            "record_shape=True is not an option of PyTorch: did you mean record_shapes?",
        ),
        ("num_trace_to_keep", "did you mean num_traces_to_keep?"),
        ("acc_event", "did you mean acc_events?"),
        ("zzz", "zzz=True is not an option of PyTorch; torch.profiler has acc_events"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest(option: str, told: str) -> None:
    """Options of ours and of torch.profiler are suggested, and nothing else is."""
    with pytest.raises(ConfigError) as caught:
        PyTorch(**{option: True})
    assert told in str(caught.value)
    assert "Try" not in str(caught.value)


def test_runs_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    """Two loggers of the same name and version write their traces apart, and so does a third."""
    for logs in ("a", "b", "c"):
        logger = CSVLogger(tmp_path / logs)
        trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
    found = traces(tmp_path)
    folders = sorted(path.split("/")[0] for path in found)
    assert folders[0] == "lightning_logs-version_0"
    assert len({folder.removeprefix(folders[0]) for folder in folders}) == 3
    for path, trace in found.items():
        assert trace["run_name"] == path.split("/")[0]  # a trace says which folder it is from


def test_runs_of_one_name_are_told_apart_by_their_id(tmp_path: Path, mlflow_database: str) -> None:
    """MLflow draws equal names for runs of equal seeds; each is alone among its artifacts."""
    found, folders = [], []
    for _ in range(2):
        logger = MLFlowLogger("twice", tracking_uri=mlflow_database, run_name="owl-7")
        trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
        found += MlflowClient(mlflow_database).list_artifacts(logger.run_id)
        folders.append(f"owl-7-{logger.run_id[:8]}" if folders else "owl-7")
    assert [entry.path for entry in found] == ["owl-7", "owl-7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == folders


def test_a_profiler_that_records_nothing_writes_nothing(tmp_path: Path) -> None:
    """Neither the run's folder nor its marker is there before there is a trace."""
    trainer(tmp_path, PyTorch(schedule="never"), logger=Records()).fit(Small())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resume_from_an_older_checkpoint_goes_on(tmp_path: Path) -> None:
    """Later traces of the same run stay, with one warning, and new ones get numbers."""
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
def test_no_recorder_starts_where_no_batch_comes(tmp_path: Path, limits: dict[str, int]) -> None:
    """A window that reaches the end of training is closed there, and none is begun for nothing."""
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
def test_a_schedule_with_a_long_warm_up_idles(tmp_path: Path, schedule: Schedule) -> None:
    """Where no window can be near, no batch is looked at ahead."""
    asked = []

    class Counted(Cyclic):
        def window(self, moment: Moment) -> Any:
            asked.append(moment.timestamp.batch)
            return super().window(moment)

    counted = Counted(**schedule._arguments())
    with warnings.catch_warnings(record=True):  # of schedules that never fired
        warnings.simplefilter("always")
        fit(tmp_path, PyTorch(schedule=counted), max_epochs=2, limit_train_batches=16)
    # At the end the first window is looked for beyond the training's 32 batches.
    assert sum(batch < 32 for batch in asked) <= 16 * 2 + 100
