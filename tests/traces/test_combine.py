"""Traces of several ranks in one file: processes, times and refused input."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call, exit_code
from helpers.small import Small, trainer

from lightning_perf import PyTorch, VizTracer
from lightning_perf.traces import combine

ALL_REDUCE = "gloo:all_reduce"


def torch_trace(folder: Path, rank: int, offset: float = 0.0, name: str = "", **head: Any) -> Path:
    """A trace of ten steps as written by torch.profiler, by a clock with an offset."""
    thread = {"pid": 4000, "tid": 7}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", **thread, "ts": offset, "args": {"name": "python"}},
        {"ph": "X", "name": "Record", "pid": "Spans", "tid": "Profiler", "ts": offset, "dur": 9},
    ]
    for step in range(10):
        begins = 1e5 * step + offset
        events += [
            {"ph": "X", "name": ALL_REDUCE, **thread, "ts": begins, "dur": 9e4},
            {"ph": "s", "name": "fwdbwd", "id": step, **thread, "ts": begins},
        ]
    shared = {"run_name": "r", "stage": "train", "batch": 7, "world_size": 3, "rank": rank}
    path = folder / (name or f"rank{rank}.12.pt.trace.json.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schemaVersion": 1, **shared, **head, "traceEvents": events}, indent=1)
    path.write_bytes(gzip.compress(text.encode()))
    return path


def merged(folder: Path, *options: str) -> dict[str, Any]:
    """The merged trace of the command."""
    target = folder.parent / "all.json.gz"
    assert exit_code("trace", "--combine", str(folder), "-o", str(target), *options) == 0
    found: dict[str, Any] = json.loads(gzip.decompress(target.read_bytes()))
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that fails."""
    code, _, err = call(capsys, "trace", *arguments)
    assert code == 2
    return err


def test_each_rank_is_a_process_with_its_name(tmp_path: Path) -> None:
    """Processes and ids of different ranks stay distinct, and no event is lost."""
    for rank in range(3):
        torch_trace(tmp_path / "in", rank)
    events = merged(tmp_path / "in")["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(named.values()) == sorted(
        [name for rank in range(3) for name in (f"rank {rank}", f"rank {rank}: Spans")]
    )
    assert all(isinstance(event["pid"], int) and event["pid"] in named for event in events)
    # Perfetto accepts numbers only.
    ids = {event["id"] for event in events if "id" in event}
    assert len(ids) == 30
    assert all(isinstance(each, int) and each < 2**53 for each in ids)
    assert sum(event["name"] == ALL_REDUCE for event in events) == 30


def test_the_merge_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the file, the number of its events, and the ranks."""
    for rank in range(2):
        torch_trace(tmp_path / "in", rank)
    found = merged(tmp_path / "in", "--json")
    assert json.loads(capsys.readouterr().out) == {
        "file": str(tmp_path / "all.json.gz"), "events": len(found["traceEvents"]),
        "ranks": [0, 1], "missing_ranks": [2],
    }  # fmt: skip


@pytest.mark.parametrize("key", ["", "viztracer_metadata"])
def test_the_time_base_of_the_tool_is_used(tmp_path: Path, key: str) -> None:
    """Processes may have different bases; events that were simultaneous are so in the file."""
    for rank, base in enumerate((10**15, 10**15 + 2 * 10**9)):
        head = {"baseTimeNanoseconds": base}
        torch_trace(tmp_path / "in", rank, 0.0 if rank else 2e6, **({key: head} if key else head))
    events = merged(tmp_path / "in")["traceEvents"]
    starts = [event["ts"] for event in events if event["name"] == ALL_REDUCE]
    assert starts[:10] == pytest.approx(starts[10:], abs=60)


def test_several_windows_need_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the windows and the option; traces of two runs are refused too."""
    for rank in range(2):
        torch_trace(tmp_path / "in", rank)
        torch_trace(tmp_path / "in", rank, name=f"rank{rank}.112.pt.trace.json.gz")
    message = refusal(capsys, "--combine", str(tmp_path / "in"))
    assert "traces of 2 windows or runs" in message
    assert "--window 112" in message
    assert merged(tmp_path / "in", "--window", "12")["traceEvents"]
    assert "no traces" in refusal(capsys, "--combine", str(tmp_path / "in"), "--window", "13")


def test_a_window_of_each_stage_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number alone names the window of training; others have their stage in front."""
    training = tmp_path / "run" / "torch_traces"
    validation = training / "validate"
    for rank in range(2):
        torch_trace(training, rank)
        torch_trace(validation, rank)
    assert "--window 12" in refusal(capsys, "--combine", str(tmp_path))
    for window, folder in (("12", training), ("validate/12", validation)):
        found = combine.find_window(tmp_path, window)
        assert [trace.path.parent for trace in found] == [folder, folder]
    assert len(combine.find_window(validation, "12")) == 2


@pytest.mark.parametrize("key", ["run_name", "batch", "world_size", "stage"])
def test_contradictory_traces_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """A file of another run or window with the name of this one is refused."""
    torch_trace(tmp_path / "in", 0)
    torch_trace(tmp_path / "in", 1, **{key: 99})
    message = refusal(capsys, "--combine", str(tmp_path / "in"), "-o", str(tmp_path / "all.json"))
    assert f"not of one window: their {key} is" in message
    assert not (tmp_path / "all.json").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _shorten(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:900]))


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (_cut, "cut short"), (_shorten, "cut short"),
        (lambda path: path.write_text("no trace"), "not a trace"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], expected: str
) -> None:
    """The message names the file, and nothing is written."""
    torch_trace(tmp_path / "in", 0)
    path = torch_trace(tmp_path / "in", 1)
    harm(path)
    message = refusal(capsys, "--combine", str(tmp_path / "in"), "-o", str(tmp_path / "x.json"))
    assert str(path) in message
    assert expected in message
    assert not (tmp_path / "x.json").exists()


def test_a_missing_rank_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The traces of the other ranks are merged."""
    for rank in (0, 2):
        torch_trace(tmp_path / "in", rank)
    merged(tmp_path / "in")
    assert "No traces of ranks 1." in capsys.readouterr().out


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """A trace of many megabytes is copied in chunks."""
    event = {
        "ph": "X",
        "name": "aten::add",
        "pid": 1,
        "tid": 1,
        "ts": 1.5,
        "dur": 2.5,
        "args": {"x": "y" * 1200},
    }
    text = json.dumps({"traceEvents": [event] * 10_000})
    assert len(text) > 10e6
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rank0.1.json").write_text(text)
    del text
    (trace,) = combine.find_window(tmp_path / "in")
    tracemalloc.start()
    combine.read_head(trace)
    written = combine.write([trace], tmp_path / "all.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written == 10_002
    assert peak < 8e6


@pytest.mark.slow
@pytest.mark.parametrize("profiler", [PyTorch, VizTracer])
def test_traces_of_real_ranks_are_merged(tmp_path: Path, profiler: Any) -> None:
    """Their windows are of the same batches, and overlap in time."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 3}
    trainer(tmp_path / "in", profiler(schedule="at 6ba for 4ba"), **options).fit(Small())
    events = merged(tmp_path / "in")["traceEvents"]
    named = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= named.keys()
    steps = {
        rank: [e for e in events if e["pid"] == named[f"rank {rank}"] and "ts" in e and "dur" in e]
        for rank in (0, 1)
    }
    begins = {rank: min(e["ts"] for e in own) for rank, own in steps.items()}
    ends = {rank: max(e["ts"] + e["dur"] for e in own) for rank, own in steps.items()}
    assert max(begins.values()) < min(ends.values())


# -- input of strangers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        {"world_size": 10**12},
        {"world_size": 1e999},
        {"baseTimeNanoseconds": 1e300},
        {"traceEvents": [{"ph": "X", "name": ALL_REDUCE, "ts": 1e999, "dur": 1, "pid": 1}]},
        {"traceEvents": [{"ph": "X", "name": ALL_REDUCE, "ts": 1, "dur": float("nan"), "pid": 1}]},
        {"traceEvents": [{"ph": "i", "name": "a", "ts": 1e300, "pid": 1}]},
        {"traceEvents": [{"ph": "i", "name": "a", "args": {"b": 10**4000}, "ts": 1e999, "pid": 1}]},
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, damage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the damaged trace, and no file is written."""
    for rank in range(2):
        head = {"world_size": 2, "batch": 7, "traceEvents": []} | damage
        (tmp_path / f"rank{rank}.12.json").write_text(json.dumps(head))
    message = refusal(capsys, "--combine", str(tmp_path), "-o", str(tmp_path / "all.json"))
    assert "rank0.12.json is damaged" in message
    assert not (tmp_path / "all.json").exists()


def test_a_merged_trace_is_json_for_every_reader(tmp_path: Path) -> None:
    """NaN and Infinity of arguments, which Python alone reads, become null."""
    event = {"ph": "i", "name": "a", "ts": 1, "pid": 1, "args": {"b": float("nan"), "c": 2.5}}
    for rank in range(2):
        head = {"world_size": 2, "batch": 7, "traceEvents": [event]}
        (tmp_path / f"rank{rank}.12.json").write_text(json.dumps(head))
    target = tmp_path / "all.json"
    assert exit_code("trace", "--combine", str(tmp_path), "-o", str(target)) == 0
    (found, *_) = [each for each in json.loads(target.read_text())["traceEvents"] if "ts" in each]
    assert found["args"] == {"b": None, "c": 2.5}


def test_no_device_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe and the terminal stay what they are; a link of the user is followed."""
    for rank in range(2):
        torch_trace(tmp_path / "run", rank)
    os.mkfifo(pipe := tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    (tmp_path / "null.json").symlink_to(os.devnull)
    for place in (pipe, tmp_path / "null.json", tmp_path):
        message = refusal(capsys, "--combine", str(tmp_path / "run"), "-o", str(place))
        assert re.search("Not a regular file|Is a directory", message)
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()
    link = str(tmp_path / "link.json")
    assert exit_code("trace", "--combine", str(tmp_path / "run"), "-o", link) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["traceEvents"]
