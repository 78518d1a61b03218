"""MemorySnapshot: the history of CUDA memory, in windows and at out-of-memory errors."""

from __future__ import annotations

import base64
import gzip
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_allocator import (
    HISTORY,
    MIB,
    Allocator,
    OutOfMemory,
    files,
    fit,
    simulated_cuda,
)
from helpers.pages import loaded_from_elsewhere
from helpers.small import Small, ours

from lightning_perf import (
    Always,
    Cyclic,
    Fixed,
    MemorySnapshot,
    Never,
    PerfWarning,
    Suite,
)
from lightning_perf.profilers import memory_snapshot

AT_THE_END = [
    "rank0.3.html",
    "rank0.3.pickle",
    "rank0.3_memory_flamegraph.svg",
    "rank0.3_segment_flamegraph.svg",
    "rank0.3_segment_plot.html",
]


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    with simulated_cuda() as fake:
        yield fake


def history(folder: Path, name: str) -> list[Any]:
    """The allocations and frees in a pickle."""
    path = folder / "records-version_0" / "memory_snapshots" / name
    return pickle.loads(path.read_bytes())["device_traces"][0]


def test_windows_become_files(tmp_path: Path, allocator: Allocator) -> None:
    """Each window is a pickle with its history, and a page beside it."""
    found = fit(tmp_path, MemorySnapshot(schedule="every 6ba for 2ba"))
    names = [f"rank0.{batch}.{kind}" for batch in (14, 8) for kind in ("html", "pickle")]
    assert found == names
    assert history(tmp_path, "rank0.8.pickle") == [HISTORY]
    page = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.8.html"
    assert "train.py:7 forward" in page.read_text()
    assert loaded_from_elsewhere(page.read_text()) == []


def test_a_file_contains_only_batches_of_its_window(tmp_path: Path, allocator: Allocator) -> None:
    """Recording starts at the end of the batch before the window and stops after its last batch."""
    seen = []

    class Watched(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(allocator.recording)
            return super().training_step(batch, batch_idx)

    schedule = Cyclic(wait=2, active=2, repeat=3)
    fit(tmp_path, MemorySnapshot(schedule=schedule, html=False), Watched())
    wait, active = [False] * 3, [True] * 2
    assert seen == [*(wait + active) * 3, False]


def test_history_is_bounded_and_off_between_windows(tmp_path: Path, allocator: Allocator) -> None:
    """Each window starts the recording, with a maximum number of entries, and stops it."""
    fit(tmp_path, MemorySnapshot(schedule="every 6ba", html=False, max_entries=7))
    on = ("all", {"stacks": "python", "max_entries": 7})
    assert allocator.calls == [on, (None, {}), on, (None, {})]


def test_html_and_compress(tmp_path: Path, allocator: Allocator) -> None:
    """html=False writes the pickle only, and compress=True gzips it."""
    profiler = MemorySnapshot(schedule="first 1ba", html=False, compress=True)
    assert fit(tmp_path, profiler) == ["rank0.1.pickle.gz"]
    path = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.1.pickle.gz"
    assert len(pickle.loads(gzip.decompress(path.read_bytes()))["segments"]) == 1


@pytest.mark.parametrize(
    ("schedule", "expected"), [(Always(), [HISTORY]), (Never(), []), (Fixed(0, 2), [])], ids=str
)
def test_an_out_of_memory_error_leaves_a_snapshot(
    tmp_path: Path, allocator: Allocator, schedule: Any, expected: list[str]
) -> None:
    """With history if a window is open; otherwise only the allocated blocks."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=schedule, html=False), OutOfMemory())
    assert "rank0.3.pickle" in files(tmp_path)
    assert history(tmp_path, "rank0.3.pickle") == expected
    assert not allocator.recording


@pytest.mark.parametrize("schedule", [Always(), Never()], ids=str)
def test_an_out_of_memory_error_leaves_five_files(
    tmp_path: Path, allocator: Allocator, schedule: Any
) -> None:
    """The five files of the reference are written; all but PyTorch's plot work offline."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=schedule), OutOfMemory())
    assert files(tmp_path) == AT_THE_END
    folder = tmp_path / "records-version_0" / "memory_snapshots"
    plot = (folder / "rank0.3_segment_plot.html").read_text()
    assert "Allocator State History" in plot
    (pickled,) = re.findall(r'"base64": "([^"]+)"', plot)
    assert pickle.loads(base64.b64decode(pickled))["segments"][0]["address"] == 0x100
    for name in AT_THE_END:
        if not name.endswith((".pickle", "plot.html")):
            assert loaded_from_elsewhere((folder / name).read_text()) == [], name
    memory = (folder / "rank0.3_memory_flamegraph.svg").read_text()
    assert "train.py:7:forward (3.0 MiB, 75.0%)" in memory
    assert "seg_256" not in memory
    assert "seg_256 (4.0 MiB, 100.0%)" in (folder / "rank0.3_segment_flamegraph.svg").read_text()


def test_a_snapshot_that_cannot_be_written_ends_the_run_normally(
    tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After out of memory on a full disk, the profiler no longer observes the allocator."""

    def full() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", full)
    profiler = MemorySnapshot(schedule=Never())
    with (
        pytest.warns(PerfWarning, match="no space left"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        fit(tmp_path, profiler, OutOfMemory())
    assert profiler not in memory_snapshot._watching
    assert profiler._oom is None


def test_html_false_keeps_the_flame_graphs(tmp_path: Path, allocator: Allocator) -> None:
    """html=False leaves out the pages only."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=Never(), html=False), OutOfMemory())
    assert files(tmp_path) == [name for name in AT_THE_END if not name.endswith(".html")]


def test_the_snapshot_is_of_the_failed_allocation(tmp_path: Path, allocator: Allocator) -> None:
    """It is taken before the exception has freed any memory."""

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


def test_a_failed_allocation_that_is_handled_leaves_no_file(
    tmp_path: Path, allocator: Allocator
) -> None:
    """cuDNN retries with a smaller workspace: the snapshot is discarded."""

    class HandlesError(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            allocator.observer(0, 1, 2, 3)
            return super().training_step(batch, batch_idx)

    profiler = MemorySnapshot(schedule=Never())
    assert fit(tmp_path, profiler, HandlesError()) == []
    assert profiler._oom is None
    assert not memory_snapshot._watching


def test_a_run_after_an_out_of_memory_error_is_unaffected(
    tmp_path: Path, allocator: Allocator
) -> None:
    """One profiler, one run with the error and one without."""
    profiler = MemorySnapshot(schedule="first 1ba", html=False)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path / "a", profiler, OutOfMemory())
    assert fit(tmp_path / "b", profiler) == ["rank0.1.pickle"]


def test_an_out_of_memory_error_in_a_suite(tmp_path: Path, allocator: Allocator) -> None:
    """A Suite forwards the exception to its callbacks."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Suite([MemorySnapshot(schedule=Never())]), OutOfMemory())
    assert files(tmp_path) == AT_THE_END


def test_other_exceptions_leave_no_snapshot(tmp_path: Path, allocator: Allocator) -> None:
    """Other errors only close the open window."""

    class Failing(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, MemorySnapshot(schedule=Never()), Failing())
    assert files(tmp_path) == []


def test_a_failing_snapshot_stops_the_recording(
    tmp_path: Path, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues with one warning and without recording."""

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    with pytest.warns(PerfWarning, match=r"MemorySnapshot is off.*planted") as caught:
        assert fit(tmp_path, MemorySnapshot(schedule="every 4ba")) == []
    assert len(ours(caught)) == 1
    assert not allocator.recording


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_there_is_one_warning(tmp_path: Path) -> None:
    """No file is written, even after an out-of-memory error, and later runs do not warn."""
    memory_snapshot._warn_once.cache_clear()
    with pytest.warns(PerfWarning, match="there is no CUDA device") as caught:
        assert fit(tmp_path, MemorySnapshot(schedule=Always())) == []
    assert len(ours(caught)) == 1
    with pytest.raises(torch.OutOfMemoryError):  # a second warning would raise
        fit(tmp_path, MemorySnapshot(schedule=Always()), OutOfMemory())
    assert files(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_history_on_a_device(tmp_path: Path) -> None:
    """The pickle has allocations and frees with their source lines."""
    found = fit(tmp_path, MemorySnapshot(schedule=Fixed(2, 2)), accelerator="gpu")
    assert found == ["rank0.4.html", "rank0.4.pickle"]
    events = history(tmp_path, "rank0.4.pickle")
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    assert any(frame["name"] == "training_step" for e in events for frame in e["frames"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_history_of_an_out_of_memory_error_on_a_device(tmp_path: Path) -> None:
    """The last event is the failed allocation."""

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
def test_snapshot_of_a_failed_allocation_on_a_device(tmp_path: Path) -> None:
    """A block that the exception frees is in the snapshot, with its source line."""

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
