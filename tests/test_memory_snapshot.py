"""MemorySnapshot: the history of CUDA memory, by window and where memory runs out."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Records, Small, ours, trainer

from lightning_perf import Always, ConfigError, Fixed, MemorySnapshot, Never, PerfWarning, Suite


class Allocator:
    """What PyTorch's CUDA allocator answers, without a device."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, dict[str, Any]]] = []

    def record(self, enabled: str | None = "all", **options: Any) -> None:
        self.told.append((enabled, options))

    def snapshot(self) -> dict[str, Any]:
        traces = ["history"] * bool(self.recording)
        return {"segments": [], "device_traces": [traces], "allocator_settings": {}}

    @property
    def recording(self) -> bool:
        return bool(self.told) and self.told[-1][0] is not None


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """CUDA's boundary, replaced: a machine that seems to have a device."""
    fake = Allocator()
    monkeypatch.setattr("lightning_perf.profilers.memory_snapshot._has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.snapshot)
    return fake


def files(folder: Path) -> list[str]:
    """What lies in the folder of one run, by its path in it."""
    folder = folder / "records-version_0" / "memory_snapshots"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


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
    assert history(tmp_path, "rank0.8.pickle") == ["history"]
    page = tmp_path / "records-version_0" / "memory_snapshots" / "rank0.8.html"
    assert "Active Memory Timeline" in page.read_text()


def test_an_interval_of_a_batch_in_two_batches_makes_two_files(
    tmp_path: Path, allocator: Allocator
) -> None:
    """The reference's row: a pickle and a page."""
    found = fit(tmp_path, MemorySnapshot(schedule="1ba"), limit_train_batches=2)
    assert [Path(name).suffix for name in found] == [".html", ".pickle"]


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
    assert pickle.loads(gzip.decompress(path.read_bytes()))["segments"] == []


@pytest.mark.parametrize(
    ("schedule", "expected"), [(Always(), ["history"]), (Never(), []), (Fixed(0, 2), [])], ids=str
)
def test_running_out_of_memory_leaves_a_snapshot(
    tmp_path: Path, allocator: Allocator, schedule: Any, expected: list[str]
) -> None:
    """With the history where a window is open, and with what is allocated where none is."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, MemorySnapshot(schedule=schedule, html=False), OutOfMemory())
    assert files(tmp_path)[-1] == "rank0.3.pickle"
    assert history(tmp_path, "rank0.3.pickle") == expected
    assert not allocator.recording


def test_running_out_of_memory_is_seen_from_within_a_suite(
    tmp_path: Path, allocator: Allocator
) -> None:
    """A Suite hands its end on to the callbacks that it hosts."""
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Suite([MemorySnapshot(schedule=Never())]), OutOfMemory())
    assert files(tmp_path) == ["rank0.3.html", "rank0.3.pickle"]


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
    """Training runs, and no file is written, even where memory runs out."""
    with pytest.warns(PerfWarning, match="there is no CUDA device") as caught:
        assert fit(tmp_path, MemorySnapshot(schedule=Always())) == []
    assert len(ours(caught)) == 1
    with pytest.warns(PerfWarning), pytest.raises(torch.OutOfMemoryError):
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
    assert any(event["action"] == "oom" for event in history(tmp_path, "rank0.3.pickle"))
