"""The operators of a trace: calls, and self time on the CPU and on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_perf.traces.summary import TraceSummary, summarize, tables


def summary_of(folder: Path, events: list[dict[str, Any]]) -> TraceSummary:
    """The summary of a trace with these events."""
    path = folder / "events.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return summarize(path)


@pytest.mark.slow
@pytest.mark.parametrize("with_stack", [False, True])
def test_it_agrees_with_torch_s_key_averages(tmp_path: Path, with_stack: bool) -> None:
    """The same calls, and the same self times within a percent, of the most costly operators."""
    model = torch.nn.TransformerEncoderLayer(16, 2, 32)
    optimizer = torch.optim.Adam(model.parameters())
    phases = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=with_stack, schedule=phases
    ) as profiler:
        for _ in range(4):
            with record_function("outer"), record_function("outer"):
                model(torch.randn(4, 2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    theirs = {row.key: row for row in profiler.key_averages()}
    operators = summarize(path).operators
    assert len(operators) == 10
    for mine in operators:
        row = theirs[mine.name]
        assert mine.calls == row.count, mine.name
        # Times of a trace are whole nanoseconds, so that each call may lose a fraction.
        assert mine.cpu_seconds * 1e6 == pytest.approx(row.self_cpu_time_total, rel=0.01, abs=0.1)


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
    """Device time is of the operator's own kernels, also if a driver call has its id."""
    found = summary_of(tmp_path, GPU)
    rows = [*found.operators, *found.kernels]
    assert [(row.name, row.calls, round(row.device_seconds * 1e9)) for row in rows] == [
        ("aten::addmm", 1, 400_000),
        ("aten::linear", 1, 20_000),
        ("gemm", 1, 400_000),
        ("Memcpy HtoD", 1, 20_000),
    ]
    assert [round(row.cpu_seconds * 1e9) for row in found.operators] == [23_000, 20_000]


def test_rows_are_sorted_by_device_time_if_there_is_a_device(tmp_path: Path) -> None:
    """Without a device, rows are sorted by CPU time."""
    events = [*GPU, call("aten::other", 60.0, 500.0)]
    assert summary_of(tmp_path, events).operators[0].name == "aten::addmm"
    on_cpu = [event for event in events if event["tid"] == 1]
    assert summary_of(tmp_path, on_cpu).operators[0].name == "aten::other"


def test_long_names_are_cut_in_tables_only(tmp_path: Path) -> None:
    """The data has the whole name."""
    name = "aten::" + "y" * 80
    summary = summary_of(tmp_path, [call(name, 0.0, 1.0)]).as_dict()
    assert summary["operators"][0]["name"] == name
    ((_, _, rows),) = tables(summary)
    assert rows[0][0] == f"aten::{'y' * 71}..."


def test_threads_do_not_nest_into_each_other(tmp_path: Path) -> None:
    """A simultaneous call of another thread is not a child."""
    events = [call("outer", 0.0, 10.0), call("other", 2.0, 5.0, tid=2)]
    rows = summary_of(tmp_path, events).operators
    assert {row.name: round(row.cpu_seconds * 1e9) for row in rows} == {
        "outer": 10_000,
        "other": 5_000,
    }
