"""VizTracer: timelines of calls in windows of batches."""

from __future__ import annotations

import cProfile
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.data_workers import Loading, Work
from helpers.recordings import theirs_in
from helpers.small import Records, Small, left_in, ours, trainer
from torch.utils.data import DataLoader

from lightning_perf import (
    Always,
    Cyclic,
    Fixed,
    PerfWarning,
    VizTracer,
)
from lightning_perf.profilers.tools import has_python_profiler

pytestmark = pytest.mark.slow


def traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of the finished traces below a folder, by their path in it."""
    return {
        str(path.relative_to(folder)): json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        for path in sorted(folder.rglob("*.json.gz"))
    }


def calls(events: list[dict[str, Any]], name: str) -> int:
    """Number of calls of a function."""
    return sum(event["name"].split(" ")[0].endswith(name) for event in events)


def fit(folder: Path, *profilers: Any, model: Any = None, **options: Any) -> dict[str, Any]:
    options = {"logger": Records(), **options}
    trainer(folder, *profilers, **options).fit(model or Small())
    return traces(folder / "records-version_0" / "viztracer")


def test_the_fetch_of_the_first_batch_is_in_the_window(tmp_path: Path) -> None:
    """A window opens at the end of the previous batch."""
    (events,) = fit(tmp_path, VizTracer(schedule=Fixed(4, 1))).values()
    assert calls(events, "_SingleProcessDataLoaderIter._next_data") == 1


def test_ranks_differ_in_a_merged_trace(tmp_path: Path) -> None:
    """The process has the name of the rank, and an id made of the rank."""
    (events,) = fit(tmp_path, VizTracer(schedule="first 1ba")).values()
    assert {event["pid"] for event in events} == {1}
    (name,) = (event["args"]["name"] for event in events if event["name"] == "process_name")
    assert name == "rank 0"


def test_uncompressed_traces_keep_their_name(tmp_path: Path) -> None:
    """compress=False writes plain JSON without .gz."""
    assert fit(tmp_path, VizTracer(schedule="first 2ba", compress=False)) == {}
    folder = tmp_path / "records-version_0" / "viztracer"
    (path,) = left_in(folder)
    assert path.name == "rank0.2.json"
    events = json.loads(path.read_bytes())["traceEvents"]
    assert calls(events, "Small.training_step") == 2


def test_log_torch_records_operators(tmp_path: Path) -> None:
    """Operators are in the trace, for any file name."""
    profiler = VizTracer(schedule=Fixed(2, 1), log_torch=True, filename="{batch}.trace")
    trainer(tmp_path, profiler, logger=Records()).fit(Small())
    (path,) = left_in(tmp_path / "records-version_0" / "viztracer")
    assert path.name == "3.trace.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert calls(trace["traceEvents"], "Small.training_step") == 1
    assert calls(trace["traceEvents"], "aten::addmm")
    # Training would wait for a pipe that code names as its file.
    assert "file_info" not in trace


def test_tracer_entries_limits_a_file(tmp_path: Path) -> None:
    """The most recent calls are kept."""
    (events,) = fit(tmp_path, VizTracer(schedule=Always(), tracer_entries=100)).values()
    assert 90 < len(events) < 110


def test_a_profiler_of_the_user_continues(tmp_path: Path) -> None:
    """Beside cProfile, windows are left out, with one warning."""
    watch = cProfile.Profile()
    watch.enable()
    try:
        with pytest.warns(PerfWarning, match="while another Python profiler does") as caught:
            found = fit(tmp_path, VizTracer(schedule="every 3ba"))
        assert len(ours(caught)) == 1
        assert has_python_profiler()
    finally:
        watch.disable()
    assert found == {}


def test_a_viztracer_of_the_user_is_saved(tmp_path: Path) -> None:
    """It would crash on what psutil calls when the sampler's thread imports it."""
    code = """
import sys
from viztracer import VizTracer
from lightning_perf.system import Sampler
with VizTracer(output_file=sys.argv[1], verbose=0):
    sampler = Sampler()
    sampler.subscribe("test", 60.0)
    assert sampler.refresh(60.0)
    sampler.unsubscribe("test")
assert "psutil" in sys.modules
"""
    path = tmp_path / "own.json"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert "Sampler.subscribe" in path.read_text()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers_are_in_the_trace_of_each_window(tmp_path: Path, context: str) -> None:
    """patch=True records workers that were started before the window, only while it is open."""
    start = BaseProcess.start
    profiler = VizTracer(schedule=Cyclic(wait=2, warmup=0, active=5, repeat=2), patch=True)
    model = Loading(context)
    found = fit(tmp_path, profiler, model=model)
    assert list(found) == ["rank0.14.json.gz", "rank0.7.json.gz"]
    for events in found.values():
        assert calls(events, "Loading.training_step") == 5
        by = Counter(e["pid"] for e in events if e["name"].startswith("Work.work"))
        assert set(by) == {10001, 10002}
        # Five batches are fetched in the window, so that at most five are requested, in addition to
        # those already requested.
        assert 8 <= by.total() <= 4 * (5 + 4)
        ours = [e["ts"] for e in events if e["pid"] == 1 and "ts" in e]
        theirs = [e["ts"] for e in events if e["pid"] > 1 and "ts" in e]
        # In microseconds; a worker may start before the parent does.
        assert min(ours) - 1e5 < min(theirs) <= max(theirs) < max(ours) + 1e5
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert sorted(names)[0] == "rank 0"
        assert all(re.fullmatch(r"rank 0 \w+-\d+", name) for name in sorted(names)[1:])
    assert BaseProcess.start is start
    assert len(model.losses) == 20


def test_recording_workers_does_not_change_training(tmp_path: Path) -> None:
    """Losses are the same with and without patch=True."""
    losses = []
    for folder, profiler in (
        ("on", VizTracer(schedule="every 6ba for 3ba", patch=True)),
        ("", None),
    ):
        model = Loading("fork")
        model.profilers = [profiler] if profiler is not None else []
        torch.manual_seed(1)
        model.net.load_state_dict(
            {k: torch.ones_like(v) for k, v in model.net.state_dict().items()}
        )
        fit(tmp_path / folder, *model.profilers, model=model)
        losses.append(model.losses)
    assert losses[0] == losses[1]


def test_a_process_forked_in_a_window_does_not_record(tmp_path: Path) -> None:
    """The parent's tracer is stopped in the child."""
    reader, writer = os.pipe()

    class Forking(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            pid = os.fork()
            if pid == 0:
                os.write(writer, b"!" if has_python_profiler() else b".")
                os._exit(0)
            os.waitpid(pid, 0)
            return super().training_step(batch, batch_idx)

    (events,) = fit(tmp_path, VizTracer(schedule="first 2ba"), model=Forking()).values()
    assert calls(events, "Forking.training_step") == 2
    assert os.read(reader, 100) == b"." * 16


THOUSANDS = """
import json, os, sys
from pathlib import Path
from lightning_perf.profilers import viztracer

def f(): pass

for number in range(3000):
    tracer = viztracer.ready_tracer(0, 100, {"log_gc": True})
    viztracer.start(tracer)
    f()
    viztracer.stop(tracer, path := Path(f"{number}.json"))
    assert any("f (" in e["name"] for e in json.loads(path.read_bytes())["traceEvents"])
    path.unlink()
import gc
print("whole", len(gc.callbacks), len(os.listdir("/proc/self/fd")) < 50)
"""


def test_thousands_of_windows(tmp_path: Path) -> None:
    """A process can record 3,000 windows, and each file can be opened."""
    done = subprocess.run(
        [sys.executable, "-c", THOUSANDS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "whole 0 True\n"


LATE_THREADS = """
import gc
import threading
from pathlib import Path
from lightning_perf.profilers import viztracer

ran, stop = threading.Semaphore(0), threading.Event()

def work():
    (lambda: ran.release())()
    stop.wait()

def window(start=()):
    tracer = viztracer.ready_tracer(0, 1000, {})
    viztracer.start(tracer)
    for thread in start:
        thread.start()
        ran.acquire()
    viztracer.stop(tracer, Path("trace.json"))

threads = [threading.Thread(target=work) for _ in range(100)]
window(threads)
window()
gc.collect()
numbers = [2**29 + i for i in range(50_000)]
stop.set()
for thread in threads:
    thread.join()
print(sum(number != 2**29 + i for i, number in enumerate(numbers)), "were overwritten")
"""


def test_threads_may_end_after_the_window(tmp_path: Path) -> None:
    """When such a thread ends, VizTracer writes to its tracer, which must not be freed.

    From Python 3.12 on it sees all threads; with a tracer for each window, which were then freed,
    a hundred objects of the process were overwritten here.
    """
    done = subprocess.run(
        [sys.executable, "-c", LATE_THREADS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 were overwritten\n"), done.stderr


class Feeding(Small):
    """Has two workers, whose feeder threads end after the window."""

    def train_dataloader(self) -> Any:
        return DataLoader(Work(), 4, num_workers=2)


def test_data_loader_workers_come_and_go_between_windows(tmp_path: Path) -> None:
    """Windows of several epochs, with new workers in each, are complete."""
    profiler = VizTracer(schedule="every 10ba for 2ba")
    found = fit(tmp_path, profiler, model=Feeding(), max_epochs=3)
    assert len(found) == 5
    assert all(calls(events, "Small.training_step") == 2 for events in found.values())


def test_lightning_s_profiler_beside_log_torch(tmp_path: Path) -> None:
    """Windows are left out with log_torch, and recorded without."""
    theirs = theirs_in(tmp_path / "theirs")
    with pytest.warns(PerfWarning, match=r"VizTracer cannot record while Trainer\(profiler=PyTo"):
        found = fit(tmp_path, VizTracer(schedule="every 3ba", log_torch=True), profiler=theirs)
    assert found == {}
    assert list((tmp_path / "theirs").rglob("*.pt.trace.json"))
    found = fit(tmp_path / "plain", VizTracer(schedule="every 3ba"), profiler=theirs_in(tmp_path))
    assert len(found) == 5
