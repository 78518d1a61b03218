"""Traces of several ranks in one file: processes, clocks, collectives and refused input."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call, exit_code
from helpers.late import Late, Sleeps
from helpers.small import trainer

from lightning_perf import PyTorch, VizTracer
from lightning_perf.traces import combine

ALL_REDUCE = "gloo:all_reduce"


def torch_trace(
    folder: Path, rank: int, offset: float = 0.0, late: float = 0.0, name: str = "", **head: Any
) -> Path:
    """A trace of ten steps as written by torch.profiler, by a clock with an offset."""
    jitter = random.Random(rank)
    thread = {"pid": 4000, "tid": 7}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", **thread, "ts": offset, "args": {"name": "python"}},
        {"ph": "X", "name": "Record", "pid": "Spans", "tid": "Profiler", "ts": offset, "dur": 9},
    ]
    for step in range(10):
        begins = 1e5 * step + 1e3 * late + offset
        ends = 1e5 * step + 9e4 + jitter.uniform(0, 50) + offset
        events += [
            {"ph": "X", "name": ALL_REDUCE, **thread, "ts": begins, "dur": ends - begins},
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


@pytest.mark.parametrize("offset", [5e6, -3e5, 400.0])
def test_clocks_are_aligned_by_the_ends_of_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offset: float
) -> None:
    """They agree within 0.1 ms after the shift, which is printed."""
    for rank in range(3):
        torch_trace(tmp_path / "in", rank, offset if rank == 2 else 0.0, 30 if rank == 1 else 0)
    events = merged(tmp_path / "in")["traceEvents"]
    ends: dict[int, list[float]] = {}
    for event in events:
        if event["name"] == ALL_REDUCE:
            ends.setdefault(event["pid"], []).append(event["ts"] + event["dur"])
    first, *others = ends.values()
    for other in others:
        assert all(abs(a - b) < 100 for a, b in zip(first, other, strict=True))
    printed = capsys.readouterr().out
    shifted = {5e6: "5.00 s", -3e5: "300 ms", 400.0: r"(3[6-9]\d|4[0-3]\d) µs"}[offset]
    assert re.search(f"rank 2: clock shifted by {shifted}, residual error", printed)
    assert "Rank 1 came last to 100% of 10 collectives of 3 ranks. The longest" in printed
    assert re.search(r"(30\.0|29\.9) ms", printed)


def test_the_merge_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the file, the shift of each clock and the waits of each collective."""
    for rank in range(2):
        torch_trace(tmp_path / "in", rank, 5e6 if rank else 0.0, 30 if rank else 0)
    merged(tmp_path / "in", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(tmp_path / "all.json.gz")
    assert (found["missing_ranks"], len(found["collectives"])) == ([2], 10)
    assert found["ranks"][0] == {"rank": 0, "clock_shift_us": 0.0, "residual_error_us": 0.0}
    assert found["ranks"][1]["clock_shift_us"] == pytest.approx(-5e6, abs=100)
    first = found["collectives"][0]
    assert (first["name"], first["last_rank"]) == (ALL_REDUCE, 1)
    assert first["waited_us"]["0"] == pytest.approx(3e4, abs=100)


@pytest.mark.parametrize("last", [None, 0, 1])
def test_busy_ranks_are_aligned_by_their_shortest_delays(last: int | None) -> None:
    """They agree within 0.5 ms, although each rank leaves most collectives milliseconds late."""
    random.seed(7)
    ahead = [0.0, 3e6, -2e6, 5e3]
    found: list[list[combine.Marker]] = [[] for _ in ahead]
    for step in range(20):
        starts = [1e5 * step + random.uniform(0, 5e3) for _ in ahead]
        if last is not None:
            starts[last] += 3e4
        for rank, offset in enumerate(ahead):
            # Rank 3 shares its core with more processes than rank 0.
            end = max(starts) + 50 + random.expovariate(1 / (1e3 + 5e2 * rank))
            found[rank].append(combine.Marker(starts[rank] + offset, end + offset))
    traces = [combine.RankTrace(rank, Path(f"rank{rank}.json")) for rank in range(len(ahead))]
    for trace, markers in zip(traces, found, strict=True):
        trace.collectives = {ALL_REDUCE: markers}
    combine.align(traces)
    for trace, offset in zip(traces, ahead, strict=True):
        assert abs(trace.shift + offset) < 500
        assert trace.error is not None
        assert trace.error < 1000


@pytest.mark.parametrize("key", ["", "viztracer_metadata"])
def test_the_time_base_of_the_tool_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Hosts may have different bases; the events were simultaneous, and no clock is corrected."""
    for rank, base in enumerate((10**15, 10**15 + 2 * 10**9)):
        head = {"baseTimeNanoseconds": base}
        torch_trace(tmp_path / "in", rank, 0.0 if rank else 2e6, **({key: head} if key else head))
    events = merged(tmp_path / "in", "--json")["traceEvents"]
    assert abs(json.loads(capsys.readouterr().out)["ranks"][1]["clock_shift_us"]) < 100
    starts = [event["ts"] for event in events if event["name"] == ALL_REDUCE]
    assert starts[:10] == pytest.approx(starts[10:], abs=60)


def test_nccl_is_matched_by_its_kernels_and_groups(tmp_path: Path) -> None:
    """Annotations of launches are not compared, and ranks of different groups are not matched."""

    def trace(rank: int, group: str, start: float) -> combine.RankTrace:
        found = combine.RankTrace(rank, tmp_path / f"rank{rank}.json")
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            "ts": start,
            "dur": 5.0,
        }
        events = [
            kernel | {"args": {"Process Group Ranks": group}},
            {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 0.0, "dur": 1.0},
        ]  # fmt: skip
        found.path.write_text(json.dumps(events))
        combine.scan(found)
        return found

    traces = [trace(0, "[0, 1]", 1.0), trace(1, "[0, 1]", 4.0), trace(2, "[2, 3]", 9.0)]
    (found,) = combine.collectives(traces)
    assert (found.last_rank, found.waited_us) == (1, {0: 3.0, 1: 0.0})


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
    combine.scan(trace)
    written = combine.write([trace], tmp_path / "all.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written == 10_002
    assert peak < 8e6


def came_last(folder: Path) -> Counter[int]:
    """How many collectives each rank began last, by the clock that all ranks share."""
    begun = []
    for path in sorted(folder.rglob("rank*.pt.trace.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        base = trace["baseTimeNanoseconds"] / 1e3
        reduced = (event for event in trace["traceEvents"] if event["name"] == ALL_REDUCE)
        begun.append(sorted(base + event["ts"] for event in reduced))
    return Counter(starts.index(max(starts)) for starts in zip(*begun, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("profiler", [PyTorch, VizTracer])
def test_traces_of_four_real_ranks_are_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiler: Any
) -> None:
    """One machine has one clock; the rank that arrived last is named.

    On a busy machine, it is not always the one that sleeps.
    """
    torch.set_num_threads(1)
    options: dict[str, Any] = {"strategy": "ddp_fork", "devices": 4, "max_epochs": 3}
    callback = profiler(schedule="at 6ba for 4ba")
    trainer(tmp_path / "in", callback, Sleeps(), **options).fit(Late({2}, "forward", 0.05))
    events = merged(tmp_path / "in")["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {f"rank {rank}" for rank in range(4)} <= named
    printed = capsys.readouterr().out
    clock = "clock not shifted, residual error"
    if profiler is VizTracer:  # which sees no collectives of gloo
        clock = "no collective in common with rank 0, clock as it is"
    for rank in (1, 2, 3):
        assert f"rank {rank}: {clock}" in printed
    if profiler is PyTorch:
        (_, most), *_ = (counts := came_last(tmp_path / "in")).most_common()
        most_often = [rank for rank, count in counts.items() if count == most]
        rank, share = re.findall(r"Rank (\d) came last to (\d+)% of 4 collectives of 4", printed)[0]
        assert int(rank) in most_often
        assert int(share) == 100 * most / 4


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
