"""MemorySnapshot: the history of CUDA memory, by window and where memory runs out."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import Records, Small, left_in, ours, trainer
from pages import loaded_from_elsewhere

from lightning_perf import (
    Always,
    ConfigError,
    Cyclic,
    Fixed,
    MemorySnapshot,
    Never,
    PerfWarning,
    Suite,
)
from lightning_perf.profilers import memory_snapshot

MIB = 1 << 20
AT_THE_END = [
    "rank0.3.html",
    "rank0.3.pickle",
    "rank0.3_memory_flamegraph.svg",
    "rank0.3_segment_flamegraph.svg",
    "rank0.3_segment_plot.html",
]


def stack(filename: str, *names: str) -> list[dict[str, Any]]:
    """Frames as the allocator tells them, the innermost first."""
    return [{"filename": filename, "line": 7, "name": name} for name in reversed(names)]


#: An allocation as PyTorch's allocator tells it.
HISTORY = {
    "action": "alloc",
    "addr": 0x100,
    "size": 3 * MIB,
    "stream": 0,
    "time_us": 5,
    "frames": stack("train.py", "main", "forward"),
}


def segment(address: int, frames: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Four MiB of the device that hold one block."""
    block = {"size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
    free = {"size": 4 * MIB - size, "requested_size": 0, "state": "inactive", "frames": []}
    return {"address": address, "stream": 0, "total_size": 4 * MIB, "blocks": [block, free]}


class Allocator:
    """What PyTorch's CUDA allocator answers, without a device."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, dict[str, Any]]] = []
        self.segments = [segment(0x100, stack("train.py", "forward"), 3 * MIB)]
        self.observer: Any = None

    def record(self, enabled: str | None = "all", **options: Any) -> None:
        self.told.append((enabled, options))

    def snapshot(self) -> dict[str, Any]:
        traces = [HISTORY] * bool(self.recording)
        return {"segments": self.segments, "device_traces": [traces], "allocator_settings": {}}

    def attach(self, observer: Any) -> None:
        self.observer = observer

    @property
    def recording(self) -> bool:
        return bool(self.told) and self.told[-1][0] is not None


@contextmanager
def seeming_device() -> Iterator[Allocator]:
    """CUDA's boundary, replaced: a machine that seems to have a device."""
    fake = Allocator()
    memory_snapshot._attach.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_perf.profilers.memory_snapshot._has_cuda", lambda: True)
        patch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
        patch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.attach, raising=False)
        yield fake
    memory_snapshot._attach.cache_clear()


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    with seeming_device() as fake:
        yield fake


def files(folder: Path) -> list[str]:
    """What lies in the folder of one run, by its path in it."""
    folder = folder / "records-version_0" / "memory_snapshots"
    return [str(path.relative_to(folder)) for path in left_in(folder)]


def history(folder: Path, name: str) -> list[Any]:
    """The allocations and frees that a pickle holds."""
    path = folder / "records-version_0" / "memory_snapshots" / name
    return pickle.loads(path.read_bytes())["device_traces"][0]


def fit(folder: Path, profiler: Any, model: Any = None, **options: Any) -> list[str]:
    trainer(folder, profiler, logger=Records(), **options).fit(model or Small())
    return files(folder)


class OutOfMemory(Small):
    """Asks for more than there is, in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


def test_windows_become_files(tmp_path: Path, allocator: Allocator) -> None:
    """Each window is a pickle with its history, and a page beside it."""
    found = fit(tmp_path, MemorySnapshot(schedule="every 6ba for 2ba"))
    names = [f"rank0.{batch}.{kind}" for batch in (14, 8) for kind in ("html", "pickle")]
    assert found == names
    assert history(tmp_path, "rank0.8.pickle") == [HISTORY]
    page = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.8.html"
    assert "train.py:7 forward" in page.read_text()
    assert loaded_from_elsewhere(page.read_text()) == []


def test_each_window_holds_its_own_batches(tmp_path: Path, allocator: Allocator) -> None:
    """Recording is on from the end of the batch before a window to the end of its last."""
    seen = []

    class Watched(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(allocator.recording)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, MemorySnapshot(schedule=Cyclic(wait=2, active=2, repeat=3)), Watched())
    wait, active = [False] * 3, [True] * 2
    assert seen == [*(wait + active) * 3, False]


def test_history_is_bounded_and_off_between_windows(tmp_path: Path, allocator: Allocator) -> None:
    """Each window switches recording on, with a bound, and off again."""
    fit(tmp_path, MemorySnapshot(schedule="every 6ba", max_entries=7))
    on = ("all", {"stacks": "python", "max_entries": 7})
    assert allocator.told == [on, (None, {}), on, (None, {})]


def test_pages_can_be_left_out_and_pickles_compressed(tmp_path: Path, allocator: Allocator) -> None:
    """html=False makes the pickle alone, and compress=True gzips it."""
    profiler = MemorySnapshot(schedule="first 1ba", html=False, compress=True)
    assert fit(tmp_path, profiler) == ["rank0.1.pickle.gz"]
    path = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.1.pickle.gz"
    assert len(pickle.loads(gzip.decompress(path.read_bytes()))["segments"]) == 1


@pytest.mark.parametrize(
    ("schedule", "expected"), [(Always(), [HISTORY]), (Never(), []), (Fixed(0, 2), [])], ids=str
)
def test_running_out_of_memory_leaves_a_snapshot(
    tmp_path: Path, allocator: Allocator, schedule: Any, expected: list[str]
) -> None:
    """With the history where a window is open, and with what is allocated where none is."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=schedule, html=False), OutOfMemory())
    assert "rank0.3.pickle" in files(tmp_path)
    assert history(tmp_path, "rank0.3.pickle") == expected
    assert not allocator.recording


@pytest.mark.parametrize("schedule", [Always(), Never()], ids=str)
def test_running_out_of_memory_leaves_five_files(
    tmp_path: Path, allocator: Allocator, schedule: Any
) -> None:
    """The reference's row: a pickle, two pages, and two flame graphs: none needs a network."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=schedule), OutOfMemory())
    assert files(tmp_path) == AT_THE_END
    folder = tmp_path / "records-version_0" / "memory_snapshots"
    plot = (folder / "rank0.3_segment_plot.html").read_text()
    assert "1 segments of 4.0 MiB, of which 3.0 MiB are in use" in plot
    for name in AT_THE_END:
        if not name.endswith(".pickle"):
            assert loaded_from_elsewhere((folder / name).read_text()) == [], name
    memory = (folder / "rank0.3_memory_flamegraph.svg").read_text()
    assert "train.py:7:forward (3.0 MiB, 75.0%)" in memory
    assert "seg_256" not in memory
    assert "seg_256 (4.0 MiB, 100.0%)" in (folder / "rank0.3_segment_flamegraph.svg").read_text()


def test_without_pages_the_flame_graphs_stay(tmp_path: Path, allocator: Allocator) -> None:
    """html=False leaves out the pages, and nothing else."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=Never(), html=False), OutOfMemory())
    assert files(tmp_path) == [name for name in AT_THE_END if not name.endswith(".html")]


def test_what_is_saved_is_what_was_there_when_memory_ran_out(
    tmp_path: Path, allocator: Allocator
) -> None:
    """The allocator tells the moment itself, before the error's way up has freed anything."""

    class Freed(OutOfMemory):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                allocator.observer(0, 1, 2, 3)
                allocator.segments = []
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=Never(), html=False), Freed())
    path = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.3.pickle"
    assert [s["address"] for s in pickle.loads(path.read_bytes())["segments"]] == [0x100]


def test_memory_that_ran_out_in_vain_leaves_nothing(tmp_path: Path, allocator: Allocator) -> None:
    """cuDNN asks for too much and finds another way: no file, and no memory is kept for it."""

    class Survives(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            allocator.observer(0, 1, 2, 3)
            return super().training_step(batch, batch_idx)

    profiler = MemorySnapshot(schedule=Never())
    assert fit(tmp_path, profiler, Survives()) == []
    assert profiler._oom.snapshot is None
    assert not memory_snapshot._watching


def test_the_run_after_one_that_failed_makes_its_usual_files(
    tmp_path: Path, allocator: Allocator
) -> None:
    """One object, a run that ran out of memory and a run that did not."""
    profiler = MemorySnapshot(schedule="first 1ba", html=False)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path / "a", profiler, OutOfMemory())
    assert fit(tmp_path / "b", profiler) == ["rank0.1.pickle"]


def test_running_out_of_memory_is_seen_from_within_a_suite(
    tmp_path: Path, allocator: Allocator
) -> None:
    """A Suite hands its end on to the callbacks that it hosts."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Suite([MemorySnapshot(schedule=Never())]), OutOfMemory())
    assert files(tmp_path) == AT_THE_END


def test_other_exceptions_leave_no_snapshot_of_their_own(
    tmp_path: Path, allocator: Allocator
) -> None:
    """Only an open window is saved where the error is another one."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, MemorySnapshot(schedule=Never()), Failing())
    assert files(tmp_path) == []


def test_other_stages_have_folders_of_their_own(tmp_path: Path, allocator: Allocator) -> None:
    """Validation inside of fit, test and predict do not collide with training."""
    profiler = MemorySnapshot(schedule="first 2ba", html=False)
    run = trainer(tmp_path, profiler, logger=Records(), limit_val_batches=4)
    model = Small()
    run.fit(model)
    run.test(model, verbose=False)
    run.predict(model)
    assert files(tmp_path) == [
        f"{folder}rank0.2.pickle" for folder in ("predict/", "", "test/", "validate/")
    ]


def test_a_snapshot_that_fails_switches_the_recording_off(
    tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on with one warning, and without the cost of the history."""

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    with pytest.warns(PerfWarning, match=r"MemorySnapshot is off.*planted") as caught:
        assert fit(tmp_path, MemorySnapshot(schedule="every 4ba")) == []
    assert len(ours(caught)) == 1
    assert not allocator.recording


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_there_is_one_warning_and_nothing_else(tmp_path: Path) -> None:
    """Training runs, no file is written, even where memory runs out, and later runs are quiet."""
    memory_snapshot._warn_once.cache_clear()
    with pytest.warns(PerfWarning, match="there is no CUDA device") as caught:
        assert fit(tmp_path, MemorySnapshot(schedule=Always())) == []
    assert len(ours(caught)) == 1
    with pytest.raises(torch.OutOfMemoryError):  # a second warning would be an error
        fit(tmp_path, MemorySnapshot(schedule=Always()), OutOfMemory())
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_entries": 0}, "max_entries"), ({"batches_per_trace": 0}, "batches_per_trace")],
)
def test_bad_settings_are_refused_at_construction(options: dict[str, Any], field: str) -> None:
    """The message names the field, the value and an example that works."""
    with pytest.raises(ConfigError, match=f"{field}=0.*Try {field}="):
        MemorySnapshot(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_s_own_history_is_recorded(tmp_path: Path) -> None:
    """On a device the pickle holds allocations and frees, with the source lines that asked."""
    found = fit(tmp_path, MemorySnapshot(schedule=Fixed(2, 2)), accelerator="gpu")
    assert found == ["rank0.4.html", "rank0.4.pickle"]
    events = history(tmp_path, "rank0.4.pickle")
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    assert any(frame["name"] == "training_step" for e in events for frame in e["frames"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_runs_out_of_memory_leaves_its_history(tmp_path: Path) -> None:
    """The last event of the pickle is the request that could not be met."""

    class Greedy(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=Always()), Greedy(), accelerator="gpu")
    assert files(tmp_path) == AT_THE_END
    assert any(event["action"] == "oom" for event in history(tmp_path, "rank0.3.pickle"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_s_oom_is_saved(tmp_path: Path) -> None:
    """A block that lived only until the error is in the snapshot, by the line that asked for it."""

    class Greedy(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                self.hoard()
            return super().training_step(batch, batch_idx)

        def hoard(self) -> None:
            try:
                hoard = [torch.empty(64 * MIB, dtype=torch.uint8, device=self.device)]
                torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
            finally:
                hoard.clear()

    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=Always()), Greedy(), accelerator="gpu")
    folder = tmp_path / "records-version_0" / "memory_snapshots"
    graph = (folder / "rank0.3_memory_flamegraph.svg").read_text()
    assert ":hoard (64.0 MiB" in graph
