"""From events to tables and pages: the arithmetic of the files beside a trace."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_perf.traces.summary import Row, key_averages, read, table


def rows_of(folder: Path, events: list[dict[str, Any]]) -> list[Row]:
    """The rows of a trace with these events."""
    path = folder / "events.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return key_averages(read(path))


@pytest.mark.slow
@pytest.mark.parametrize("with_stack", [False, True])
def test_it_agrees_with_torch_s_key_averages(tmp_path: Path, with_stack: bool) -> None:
    """The same names, calls and memory, and the same times within a percent."""
    model = torch.nn.TransformerEncoderLayer(16, 2, 32)
    optimizer = torch.optim.Adam(model.parameters())
    phases = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        with_stack=with_stack,
        schedule=phases,
    ) as profiler:
        for _ in range(4):
            with record_function("outer"), record_function("outer"):
                model(torch.randn(4, 2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    rows = {row.name: row for row in key_averages(read(path))}
    # From torch 2.15 on it omits Python frames unless they are requested.
    frames = {"include_python_functions": True}
    known = signature(profiler.key_averages).parameters
    averages = profiler.key_averages(**(frames if frames.keys() <= known.keys() else {}))
    theirs = {row.key: row for row in averages if row.key != "[memory]"}
    assert set(rows) == {name.partition(" at 0x")[0] + ">" * (" at 0x" in name) for name in theirs}
    theirs = {name: row for name, row in theirs.items() if " at 0x" not in name}
    for name, row in theirs.items():
        mine = rows[name]
        assert mine.calls == row.count, name
        # Times of a trace are whole nanoseconds, so that each call may lose a fraction.
        assert mine.total["cpu"] / 1e3 == pytest.approx(row.cpu_time_total, rel=0.01, abs=0.1), name
        assert mine.own["cpu"] / 1e3 == pytest.approx(row.self_cpu_time_total, rel=0.01, abs=0.1)
        assert mine.total["cpu_memory"] == row.cpu_memory_usage, name
        assert mine.own["cpu_memory"] == row.self_cpu_memory_usage, name


def call(name: str, ts: float, dur: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    identity = more.pop("identity", None)
    args = {} if identity is None else {"External id": identity}
    event = {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}
    return {**event, "args": args, **more}


GPU = [
    call("aten::linear", 0.0, 50.0, identity=1),
    call("aten::addmm", 10.0, 30.0, identity=2),
    call("cudaLaunchKernel", 15.0, 5.0, "cuda_runtime", identity=2),
    call("cuLaunchKernelEx", 25.0, 2.0, "cuda_driver", identity=2),
    call("gemm", 100.0, 400.0, "kernel", identity=2, tid=7),
    call("Memcpy HtoD", 600.0, 20.0, "gpu_memcpy", identity=1, tid=7),
    call("ProfilerStep#3", 0.0, 700.0, "gpu_user_annotation", tid=7),
]


def test_kernels_count_for_the_operators_that_launched_them(tmp_path: Path) -> None:
    """Self device time is of the operator's own kernels; device time includes inner operators."""
    rows = {
        row.name: (row.calls, row.own["device"], row.total["device"])
        for row in rows_of(tmp_path, GPU)
    }
    assert rows == {
        "gemm": (1, 400_000, 400_000),
        "aten::addmm": (1, 400_000, 400_000),
        "aten::linear": (1, 20_000, 420_000),
        "Memcpy HtoD": (1, 20_000, 20_000),
        "cudaLaunchKernel": (1, 0, 0),
        "cuLaunchKernelEx": (1, 0, 0),
    }


def test_rows_are_sorted_by_device_time_if_there_is_a_device(tmp_path: Path) -> None:
    """Without a device, rows are sorted by CPU time."""
    assert [row.name for row in rows_of(tmp_path, GPU)][:2] == ["aten::addmm", "gemm"]
    on_cpu = [event for event in GPU if event["tid"] == 1]
    assert [row.name for row in rows_of(tmp_path, on_cpu)][:2] == ["aten::addmm", "aten::linear"]


def test_frames_of_python_come_after_the_operators(tmp_path: Path) -> None:
    """Frames are grouped by function, wherever their objects are, and names are truncated."""
    frames = [
        call(f"<built-in method {'x' * 80}run of Engine object at 0x7f{i}>", 100.0 * i, 90.0,
             "python_function")
        for i in range(3)
    ]  # fmt: skip
    operator, frame = rows_of(tmp_path, [*frames, call("aten::" + "y" * 80, 500.0, 1.0)])
    assert operator.name.startswith("aten::")
    assert (frame.calls, frame.own["cpu"]) == (3, 270_000)
    *_, first, line = table([operator, frame]).splitlines()
    assert first.startswith(f"aten::{'y' * 71}... ")
    assert line.startswith("...xxx")
    assert line[80 - len("run of Engine object>") :].startswith("run of Engine object> ")


def test_threads_do_not_nest_into_each_other(tmp_path: Path) -> None:
    """A simultaneous call of another thread is not a child."""
    events = [call("outer", 0.0, 10.0), call("other", 2.0, 5.0, tid=2)]
    assert {row.name: row.own["cpu"] for row in rows_of(tmp_path, events)} == {
        "outer": 10_000,
        "other": 5_000,
    }


def test_a_table_shows_its_columns_in_milliseconds_and_megabytes(tmp_path: Path) -> None:
    """Columns without values are omitted, and rows beyond the limit are counted."""
    allocated = {
        "ph": "i", "name": "[memory]", "ts": 12.0,
        "args": {"Device Type": 1, "Device Id": 0, "Bytes": 3_000_000},
    }  # fmt: skip
    lines = table(rows_of(tmp_path, [*GPU, allocated]), limit=2).splitlines()
    assert "self device ms" in lines[0]
    assert "self device MB" in lines[0]
    assert "CPU MB" not in lines[0]
    assert lines[2].split() == [
        "aten::addmm", "1", "46.0%", "0.023", "0.030", "0.400", "0.400", "3.000", "3.000",
    ]  # fmt: skip
    assert lines[-1] == "and 4 more with less time"


def test_a_trace_without_operators_has_an_empty_table() -> None:
    """There is no division by zero and no row."""
    assert table([]).splitlines()[0].split() == ["name", "calls"]
