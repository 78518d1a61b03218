"""Memray: captures, flame graphs and summaries of windows of batches."""

from __future__ import annotations

import gzip
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import memray
import pytest
import torch
from helpers.data_workers import Loading, Work
from helpers.small import Records, Small, left_in, ours, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from torch.utils.data import DataLoader

from lightning_perf import ConfigError, Cyclic, Every, Fixed, Memray, PerfWarning

pytestmark = pytest.mark.slow

MEGABYTES = 5_000_000
#: Without the summary, which is made by a separate process.
Capture = partial(Memray, summary=False)


class Hungry(Small):
    """Allocates a few megabytes per step in a function of a known name."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eat()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.eat()

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.eat()
        return super().predict_step(batch, batch_idx)

    def eat(self) -> int:
        return len(bytearray(MEGABYTES))


def files(folder: Path) -> list[str]:
    """The files in the folder of the run, by relative path."""
    folder = folder / "records-version_0" / "memray"
    return [str(path.relative_to(folder)) for path in left_in(folder)]


def meals(capture: Path) -> int:
    """The number of the step's allocations in a capture."""
    with memray.FileReader(capture) as reader:
        return sum(
            record.size >= MEGABYTES and record.stack_trace()[0][0] == "eat"
            for record in reader.get_allocation_records()
            if record.size
        )


def fit(folder: Path, *profilers: Any, model: Any = None, **options: Any) -> list[str]:
    options = {"logger": Records(), **options}
    trainer(folder, *profilers, **options).fit(model or Hungry())
    return files(folder)


def test_compress_gzips_the_capture(tmp_path: Path) -> None:
    """memray reads the .bin.gz after gunzip."""
    assert fit(tmp_path, Capture(schedule="first 2ba", compress=True)) == ["rank0.2.bin.gz"]
    packed = tmp_path / "records-version_0" / "memray" / "rank0.2.bin.gz"
    plain = tmp_path / "plain.bin"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert meals(plain) == 2


@pytest.mark.parametrize("compress", [False, True])
def test_a_flame_graph_beside_each_capture(tmp_path: Path, compress: bool) -> None:
    """The page has the name of the allocating function, and loads nothing."""
    profiler = Capture(schedule="first 1ba", flamegraph=True, compress=compress)
    capture = "rank0.1.bin.gz" if compress else "rank0.1.bin"
    assert fit(tmp_path, profiler) == [capture, "rank0.1.html"]
    page = (tmp_path / "records-version_0" / "memray" / "rank0.1.html").read_text()
    # Not the file's name, because memray writes the command line into its pages.
    assert '"eat"' in page
    assert "<script src=" not in page
    assert '<link rel="stylesheet" href="http' not in page


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_stacks_are_complete_in_each_stage(tmp_path: Path, stage: str) -> None:
    """A stack reaches from the allocation to the script, whatever the depth of our hook."""
    second = Cyclic(wait=1, warmup=0, active=1, repeat=1)
    batches = {"limit_val_batches": 2 if stage == "validate" else 0}
    run = trainer(tmp_path, Capture(schedule=second), logger=Records(), **batches)
    getattr(run, stage)(Hungry())
    (capture,) = left_in(tmp_path / "records-version_0" / "memray")
    with memray.FileReader(capture) as reader:
        found = [
            [function for function, _, _ in record.stack_trace()]
            for record in reader.get_allocation_records()
            if record.size >= MEGABYTES
        ]
    assert len(found) == 1
    assert found[0][0] == "eat"
    assert "test_stacks_are_complete_in_each_stage" in found[0]


def test_capture_and_flame_graph_are_uploaded(tmp_path: Path, mlflow_database: str) -> None:
    """Both are artifacts of the run, also for the last window."""
    logger = MLFlowLogger("memory", tracking_uri=mlflow_database, run_name="crow")
    fit(tmp_path, Capture(schedule=Fixed(14, 2), flamegraph=True), logger=logger)
    found = MlflowClient(mlflow_database).list_artifacts(logger.run_id, "crow/memray")
    names = sorted(Path(entry.path).name for entry in found)
    assert names == ["rank0.16.bin", "rank0.16.html"]


def test_a_memray_tracker_of_the_user_continues(tmp_path: Path) -> None:
    """Windows during it are skipped, with one warning."""
    with (
        memray.Tracker(tmp_path / "theirs.bin"),
        pytest.warns(PerfWarning, match="while another memray tracker does") as caught,
    ):
        found = fit(tmp_path, Capture(schedule="every 3ba"))
    assert len(ours(caught)) == 1
    assert found == []
    assert meals(tmp_path / "theirs.bin") == 16


def test_options_reach_memray(tmp_path: Path) -> None:
    """Additional arguments are passed to memray."""
    fit(tmp_path, Capture(schedule="first 1ba", native_traces=True, trace_python_allocators=True))
    with memray.FileReader(tmp_path / "records-version_0" / "memray" / "rank0.1.bin") as reader:
        assert reader.metadata.has_native_traces
        assert reader.metadata.trace_python_allocators


COLLECTING = """
import gc, sys, threading
from memray import Tracker
from lightning_perf.profilers.memray import start, stop

begun, go, gone = threading.Event(), threading.Event(), threading.Event()

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):  # lets the other thread leave its eight hundred frames
        go.set()
        gone.wait(10)

def deep(frames):
    if frames:
        return deep(frames - 1)
    begun.set()
    go.wait()

def thread():
    deep(800)
    gone.set()

def record(name):
    tracker = Tracker(sys.argv[1] + name)
    start(tracker)
    assert gc.isenabled()
    stop(tracker)

record("first")  # which imports what it needs
threading.Thread(target=thread, daemon=True).start()
begun.wait()
gc.collect()
Garbage()
gc.set_threshold(600)
record("second")
"""


def test_garbage_collection_does_not_crash_the_start(tmp_path: Path) -> None:
    """memray walks all stacks at its start; finalizers would free frames that it reads."""
    command = [sys.executable, "-c", COLLECTING, str(tmp_path / "capture")]
    # Freed memory is overwritten at once, so that reading it would crash.
    subprocess.run(command, env=os.environ | {"PYTHONMALLOC": "debug"}, check=True, timeout=240)


def test_the_summary_lists_the_largest_allocators(tmp_path: Path) -> None:
    """The text has function, file, line and source."""
    found = fit(tmp_path, Memray(schedule="first 3ba"))
    assert found == ["rank0.3.bin", "rank0.3.txt"]
    text = (tmp_path / "records-version_0" / "memray" / "rank0.3.txt").read_text()
    peak, unfreed, everything = re.split(r"\n(?:Allocated in .*)\n-+\n", text)
    assert re.search(
        r"4\.8 MiB  eat  .*test_memray_profiler\.py:\d+\n +return len\(bytearray", peak
    )
    assert " eat " not in unfreed
    assert re.search(r"14\.3 MiB  eat ", everything)


def test_the_summary_is_logged_as_metrics(tmp_path: Path) -> None:
    """Each window logs at the step of its last batch, in all stages."""
    logger = Records()
    limits = {"limit_train_batches": 12, "limit_test_batches": 12}
    run = trainer(tmp_path, Memray(schedule=Every("5ba", lasting="2ba")), logger=logger, **limits)
    model = Hungry()
    run.fit(model)
    run.test(model, verbose=False)
    assert [step for step, _ in logger.of("memray/peak_memory")] == [6, 11]
    peaks = [logger.of(f"{stage}memray/peak_memory") for stage in ("", "test/")]
    assert all(MEGABYTES < value < 2 * MEGABYTES for points in peaks for _, value in points)
    assert [len(points) for points in peaks] == [2, 2]
    assert all(value > 2 * MEGABYTES for _, value in logger.of("memray/total_memory"))
    assert all(value < MEGABYTES for _, value in logger.of("memray/unfreed_memory"))
    assert all(value > 2 for _, value in logger.of("memray/total_allocations"))


def eating(file: str, function: str) -> Any:
    """A function that allocates, with any name in any file."""
    names: dict[str, Any] = {}
    exec(compile(f"def eat():\n    return len(bytearray({MEGABYTES}))", file, "exec"), names)
    eat = names["eat"]
    eat.__code__ = eat.__code__.replace(co_name=function)
    return eat


def test_names_are_not_executed(tmp_path: Path) -> None:
    """The page shows names of files and functions as text, not as tags."""
    evil = "</script><img src=x onerror='alert(1)'>"
    model = Hungry()
    model.eat = eating(f"{evil}.py", evil)  # type: ignore[method-assign]
    _, page, text = fit(tmp_path, Memray(schedule="first 1ba", flamegraph=True), model=model)
    folder = tmp_path / "records-version_0" / "memray"
    assert "<img" not in (folder / page).read_text()
    assert "onerror" in (folder / page).read_text()
    assert f"4.8 MiB  {evil}  {evil}.py:2" in (folder / text).read_text()


NOT_UTF8 = pytest.param(
    "\udcff.py",
    marks=pytest.mark.xfail(
        sys.version_info >= (3, 12), reason="memray's hook raises, and Python too"
    ),
)


@pytest.mark.parametrize("file", [NOT_UTF8, "", "a\"b'c`${d}\\\n.py", "x" * 100_000])
def test_any_file_name_is_recorded(tmp_path: Path, file: str) -> None:
    """Empty, long and non-UTF-8 names break neither training nor the capture."""
    model = Hungry()
    model.eat = eating(file, "eat")  # type: ignore[method-assign]
    fit(tmp_path, Capture(schedule="first 1ba"), model=model, limit_train_batches=2)
    with memray.FileReader(tmp_path / "records-version_0" / "memray" / "rank0.1.bin") as reader:
        assert any(record.size >= MEGABYTES for record in reader.get_allocation_records())


def test_the_summary_shows_the_source_of_python_files_only(tmp_path: Path) -> None:
    """Other files that code names as its source may contain secrets or be endless devices."""
    secret = tmp_path / "secret.txt"
    secret.write_text("first\npassword\n")
    model = Hungry()
    model.eat = eating(str(secret), "eat")  # type: ignore[method-assign]
    _, text = fit(tmp_path, Memray(schedule="first 1ba"), model=model)
    found = (tmp_path / "records-version_0" / "memray" / text).read_text()
    assert "secret.txt:2" in found
    assert "password" not in found


def test_a_pipe_is_not_read_for_its_source(tmp_path: Path) -> None:
    """If code names a pipe as its file, its page and summary are still made."""
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    model = Hungry()
    model.eat = eating(str(pipe), "eat")  # type: ignore[method-assign]
    run = tmp_path / "run"
    _, *further = fit(run, Memray(schedule="first 1ba", flamegraph=True), model=model)
    folder = run / "records-version_0" / "memray"
    assert ["pipe.py" in (folder / name).read_text() for name in further] == [True, True]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[::-1]])
@pytest.mark.parametrize("made", [{"flamegraph": True, "summary": False}, {"summary": True}])
def test_a_damaged_capture_is_kept_with_one_warning(
    tmp_path: Path, damage: Any, made: dict[str, bool]
) -> None:
    """If the capture is truncated or of an unknown format, the page or the text is missing."""

    class Damaged(Memray):
        def record(self, path: Path, *args: Any) -> Any:
            recorded = yield from super().record(path, *args)
            path.write_bytes(damage(path.read_bytes()))
            return recorded

    with pytest.warns(PerfWarning, match="does not look like a binary generated by memray") as w:
        found = fit(tmp_path, Damaged(schedule="first 1ba", **made))
    assert found == ["rank0.1.bin"]
    assert len(ours(w)) == 1


class LimitsFiles(L.Callback):
    """From a step on, no file of the process may be larger, as with `ulimit -f`."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 6:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))


def test_a_truncated_capture_displaces_no_whole_one(tmp_path: Path) -> None:
    """At a limit of the size of files, there are no metrics, and one warning."""
    profiler = Memray(schedule=Every("4ba", lasting="2ba"), num_traces_to_keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.warns(PerfWarning, match="may be truncated: a file may not be larger"):
            trainer(tmp_path, profiler, LimitsFiles(), logger=(records := Records())).fit(Hungry())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = [path.name for path in left_in(tmp_path)]
    assert names == ["rank0.14.bin", "rank0.6.bin", "rank0.6.txt"]
    assert len([row for _, row in records.rows if "memray/peak_memory" in row]) == 1


def test_unfreed_memory(tmp_path: Path) -> None:
    """Memory that a window allocates and does not free is its unfreed memory."""

    class Leaking(Hungry):
        def eat(self) -> int:
            self.kept = [*getattr(self, "kept", ()), bytearray(MEGABYTES)]
            return 0

    logger = Records()
    fit(tmp_path, Memray(schedule=Fixed(2, 3)), model=Leaking(), logger=logger)
    ((step, grown),) = logger.of("memray/unfreed_memory")
    assert step == 4
    assert 3 * MEGABYTES <= grown < 4 * MEGABYTES


def test_the_aggregated_format_has_a_summary_without_totals(tmp_path: Path) -> None:
    """memray has no totals for this format."""
    logger = Records()
    options = {"file_format": memray.FileFormat.AGGREGATED_ALLOCATIONS}
    fit(tmp_path, Memray(schedule="first 2ba", **options), logger=logger)
    assert {key for key in logger.keys if "memray" in key} == {
        "memray/peak_memory",
        "memray/unfreed_memory",
    }


def test_metrics_of_the_last_window_reach_mlflow(tmp_path: Path, mlflow_database: str) -> None:
    """They are logged although no batch follows."""
    logger = MLFlowLogger("memory", tracking_uri=mlflow_database, run_name="owl")
    fit(tmp_path, Memray(schedule=Fixed(14, 2)), logger=logger)
    metrics = MlflowClient(mlflow_database).get_run(logger.run_id).data.metrics
    assert metrics["memray/peak_memory"] > MEGABYTES


def test_ranks_have_different_keys(tmp_path: Path, mlflow_database: str) -> None:
    """The lowest recording rank has keys without a rank."""
    logger = MLFlowLogger("memory-ranks", tracking_uri=mlflow_database, run_name="two")
    torch.set_num_threads(1)
    ranks: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2}
    trainer(tmp_path, Memray(schedule="first 2ba"), logger=logger, **ranks).fit(Hungry())
    client = MlflowClient(mlflow_database)
    experiment = client.get_experiment_by_name("memory-ranks")
    (run,) = client.search_runs([experiment.experiment_id])
    for key in ("memray/peak_memory", "memray/rank1/peak_memory"):
        assert run.data.metrics[key] > MEGABYTES
    names = sorted(Path(a.path).name for a in client.list_artifacts(run.info.run_id, "two/memray"))
    assert names == ["rank0.2.bin", "rank0.2.txt", "rank1.2.bin", "rank1.2.txt"]


def test_data_loader_workers_are_captured_in_each_window(tmp_path: Path) -> None:
    """Each worker leaves one capture per window."""
    schedule = Cyclic(wait=2, warmup=0, active=5, repeat=2)
    profiler = Capture(schedule=schedule, follow_fork=True)
    trainer(tmp_path, profiler, logger=Records()).fit(Loading("fork"))
    assert files(tmp_path) == [
        f"rank0.{batch}{child}.bin" for batch in (14, 7) for child in ("", ".child1", ".child2")
    ]
    folder = tmp_path / "records-version_0" / "memray"
    pids = set()
    for path in folder.glob("*.child*"):
        with memray.FileReader(path) as reader:
            pids.add(reader.metadata.pid)
            records = list(reader.get_allocation_records())
        assert any(record.size > 10_000_000 for record in records)
    assert len(pids) == 2


def test_a_worker_started_in_a_window_is_captured(tmp_path: Path) -> None:
    """Workers of the second epoch start within a window and leave captures."""

    class Renewed(Loading):
        def train_dataloader(self) -> Any:
            return DataLoader(Work(), 4, num_workers=2, multiprocessing_context="fork")

    profiler = Capture(schedule=Fixed(19, 3), follow_fork=True)
    options = {"max_epochs": 2, "logger": Records()}
    trainer(tmp_path, profiler, **options).fit(Renewed("fork"))
    folder = tmp_path / "records-version_0" / "memray"
    assert "rank0.22.bin" in files(tmp_path)
    captures = list(folder.glob("*.child*"))
    assert len(captures) >= 2
    for capture in [*captures, folder / "rank0.22.bin"]:
        with memray.FileReader(capture) as reader:
            assert list(reader.get_allocation_records())


def test_writers_for_children_are_made_on_demand(tmp_path: Path) -> None:
    """follow_fork makes no writer in a run without child processes."""
    made = []

    class Counting(Memray):
        def new_writer(self, context: Any, names: Any) -> Any:
            made.append(names.local)
            return super().new_writer(context, names)

    profiler = Counting(schedule="first 2ba", follow_fork=True)
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    assert made == ["rank{rank}.{batch}.txt", "rank{rank}.{batch}.bin"]


def test_flame_graphs_that_need_a_network_are_refused(monkeypatch):
    """Those of memray before 1.19.1 load scripts from the web."""
    monkeypatch.setattr("lightning_perf.profilers.memray.version", lambda _: "1.15.0")
    Memray()
    with pytest.raises(ConfigError, match=r"flamegraph=True needs memray 1\.19\.1 or later"):
        Memray(flamegraph=True)
