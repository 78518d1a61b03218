"""Trace summaries: arithmetic on hand-made CUDA traces, a real CPU trace, damaged files."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import call
from helpers.cuda_trace import GEMM, LINE, RELU, cuda_trace, on_device, on_host, step
from helpers.small import Small, trainer

from lightning_perf import PyTorch
from lightning_perf.traces.events import TraceError
from lightning_perf.traces.summary import Synchronization, TraceSummary, summarize


def written(folder: Path, content: Any, name: str = "trace.json") -> Path:
    path = folder / name
    text = json.dumps(content, indent=1).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


@pytest.fixture
def summary(tmp_path: Path) -> TraceSummary:
    return summarize(written(tmp_path, cuda_trace()))


def test_the_time_of_the_device_is_split(summary: TraceSummary) -> None:
    """Busy and idle time add up to the two steps; events outside of them do not count."""
    assert (summary.steps, summary.seconds) == (2, pytest.approx(2e-3))
    device = summary.device
    assert device is not None
    found = [
        device.busy, device.idle_input, device.idle_launch, device.idle_other,
        device.communication, device.exposed_communication, device.kernels, device.tensor_cores,
    ]  # fmt: skip
    assert found == pytest.approx([us * 2e-6 for us in (600, 200, 100, 100, 200, 150, 400, 300)])


def test_operators_have_their_self_time_and_their_kernels(summary: TraceSummary) -> None:
    """Nested calls are subtracted; a kernel belongs to the operator that launched it."""
    found = {each.name: each for each in summary.operators}
    assert found["aten::addmm"].cpu_seconds == pytest.approx(2 * 70e-6)
    assert found["aten::addmm"].device_seconds == pytest.approx(2 * 300e-6)
    assert found["aten::linear"].cpu_seconds == pytest.approx(2 * 20e-6)
    assert found["aten::linear"].device_seconds == 0
    assert summary.operators[0].name == "aten::addmm"
    assert "aten::warmup" not in found
    assert (summary.kernels[0].name, summary.kernels[0].calls) == (GEMM, 2)


def test_a_call_that_began_before_the_first_step_does_not_count(tmp_path: Path) -> None:
    """The time of calls within it is not subtracted from other calls of its name."""
    events = [
        {**on_host("user_annotation", "ProfilerStep#1", 100, 200), "tid": 1},
        on_host("cpu_op", "aten::outer", 50, 150), on_host("cpu_op", "aten::inner", 110, 140),
        on_host("cpu_op", "aten::outer", 160, 180),
    ]  # fmt: skip
    found = summarize(written(tmp_path, events)).operators
    assert [(each.name, each.calls, each.cpu_seconds) for each in found] == [
        ("aten::inner", 1, pytest.approx(30e-6)), ("aten::outer", 1, pytest.approx(20e-6)),
    ]  # fmt: skip


def test_a_synchronization_has_its_source_line(summary: TraceSummary) -> None:
    """A wait within another wait counts once; frames of libraries are skipped."""
    assert summary.synchronizations == [
        Synchronization("aten::item", "", LINE, 2, pytest.approx(340e-6))
    ]


def test_the_operator_of_a_synchronization_is_named(tmp_path: Path) -> None:
    """Without stacks the waiting operator is shown instead of a line."""
    events = step(5, 0.0)
    events += [
        on_host("cpu_op", "aten::nonzero", 910, 990, 1),
        on_host("cuda_runtime", "cudaStreamSynchronize", 920, 980, 1),
    ]
    events = [event for event in events if event.get("cat") != "python_function"]
    found = summarize(written(tmp_path, {"traceEvents": events})).synchronizations
    assert [(each.call, each.operator, each.line) for each in found] == [
        ("aten::item", "", ""), ("cudaStreamSynchronize", "aten::nonzero", ""),
    ]  # fmt: skip


def test_a_device_that_lags_behind_is_summarized_later(tmp_path: Path) -> None:
    """The host launches three steps of 5 ms in 3 ms, and the device has earlier work for 2 ms."""
    events = [on_device("kernel", RELU, -500, 2000, link=0)]
    for number in range(3):
        begin, link = 1000 * number, 10 + number
        events += [
            on_host("user_annotation", f"ProfilerStep#{number}", begin, begin + 1000),
            on_host("cpu_op", "aten::mm", begin + 100, begin + 200, link),
            on_device("kernel", GEMM, 2000 + 5000 * number, 7000 + 5000 * number, link),
        ]
    found = summarize(written(tmp_path, events))
    assert (found.steps, found.seconds) == (3, pytest.approx(15e-3))
    assert found.device is not None
    assert found.device.busy == pytest.approx(15e-3)
    (product,) = found.operators
    assert (product.calls, product.device_seconds) == (3, pytest.approx(15e-3))
    assert [(each.name, each.calls) for each in found.kernels] == [(GEMM, 3)]


def test_several_devices_are_averaged(tmp_path: Path) -> None:
    """One GPU works as in the other tests, the other one without a pause."""
    events = [*step(5, 0.0), {**step(5, 0.0)[11], "ts": 0.0, "dur": 1000.0, "pid": 1}]
    device = summarize(written(tmp_path, events)).device
    assert device is not None
    assert (device.devices, device.busy) == (2, pytest.approx(800e-6))


@pytest.mark.parametrize(
    ("kernel", "fast"),
    [
        (GEMM, True), ("volta_h884gemm_64x128_ldg8_nn", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x64_stage3_cublas", True),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", True),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>", True),
        ("ampere_sgemm_128x64_tn", False), ("cutlass_80_simt_sgemm_128x64_8x5_nt_align1", False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_warpsize1x2x1_ffma", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
    ],
)  # fmt: skip
def test_tensor_cores_are_recognized_by_kernel_names(
    tmp_path: Path, kernel: str, fast: bool
) -> None:
    """Names of Volta to Hopper, cuBLAS, CUTLASS and FlashAttention are recognized."""
    event = {**step(5, 0.0)[11], "name": kernel}
    device = summarize(written(tmp_path, [on_host("cpu_op", "a", 0, 900), event])).device
    assert device is not None
    assert device.tensor_cores == (device.kernels if fast else 0.0)


@pytest.mark.parametrize("stack", [False, True])
def test_a_real_trace_of_the_cpu(tmp_path: Path, stack: bool) -> None:
    """It has steps and operators but no device, and its folder may have the name of a stage."""
    profiler = PyTorch(schedule="at 3ba for 4ba", with_stack=stack, folder="{run_name}/test")
    trainer(tmp_path, profiler).fit(Small())
    found = profiler.trace_summary()
    assert (found.steps, found.device) == (4, None)
    assert found.seconds > 0
    assert not found.synchronizations
    names = {each.name for each in found.operators}
    assert names & {"aten::addmm", "aten::linear", "AddmmBackward0", "aten::mm"}
    assert sum(each.cpu_seconds for each in found.operators) <= found.seconds


class Items(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (loss.item() + 1)


@pytest.mark.slow
def test_real_stacks_lead_to_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel added by hand, `item` in a real trace has the line of this file."""
    profiler = PyTorch(schedule="at 3ba for 2ba", with_stack=True, compress=False)
    trainer(tmp_path, profiler).fit(Items())
    ((_, (path,)),) = profiler.saved_traces
    assert path is not None
    trace = json.loads(path.read_text())
    begin = next(e["ts"] for e in trace["traceEvents"] if "ProfilerStep" in e.get("name", ""))
    trace["traceEvents"].append({**step(5, begin)[11]})
    (found,) = summarize(written(tmp_path, trace)).synchronizations
    assert (found.call, found.calls) == ("aten::item", 2)
    assert found.line.endswith(": training_step")
    assert Path(__file__).name in found.line


def test_the_command_shows_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both outputs have named shares and tables with the same numbers."""
    monkeypatch.setenv("COLUMNS", "200")
    path = written(tmp_path, cuda_trace(), "trace.json.gz")
    code, out, _ = call(capsys, "trace", str(path))
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert code == 0
    for line in (
        "steps 2 in 2.00 ms, 1.00 ms each", "device busy 60.0%",
        "idle, host in operators (launch-bound) 10.0%", "idle, host waits for data 20.0%",
        "communication, exposed 15.0%", "kernels on tensor cores 75.0% of their time",
        "aten::addmm 2 140 µs 600 µs", f"aten::item {LINE} 2 340 µs",
    ):  # fmt: skip
        assert line in lines
    code, out, _ = call(capsys, "trace", str(path), "--json")
    assert json.loads(out)["device"]["busy"] == pytest.approx(1.2e-3)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_truncated_trace_is_summarized_up_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The first of two steps is summarized; the output says that the rest is missing."""
    events = [event for number in range(100) for event in step(number, 1000.0 * number)]
    path = written(tmp_path, {"traceEvents": events}, name)
    os.truncate(path, path.stat().st_size // 2)
    found = summarize(path)
    assert 20 < found.steps < 90
    assert found.device is not None
    assert found.device.busy / found.seconds == pytest.approx(0.6, abs=0.05)
    code, out, _ = call(capsys, "trace", str(path))
    assert code == 0
    assert f"Note: the file is cut short or damaged after {found.events:,} events." in out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is cut short, or not a trace"), (b"no trace", "is not a trace in Chrome's format"),
        (b'{"a": 1}', "is not a trace of torch.profiler"), (b"\x1f\x8bxxxxxxxxxx", "is damaged"),
        (b'{"traceEvents": [', "is cut short"), (b'{"traceEvents": 3}', "not a trace of torch"),
        (b'[{"ph": "X", "cat": "cpu_op"}, 3, null]', "is not a trace of torch.profiler"),
        (b'{"traceEvents": [{"ph": "X", "cat": "FEE", "name": "f", "ts": 1, "dur": 2}],'
         b'"viztracer_metadata": {}}', "is not a trace of torch.profiler: it is one of VizTracer"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, why: str
) -> None:
    """The message has the path of the file, and the exit code is 2."""
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=why):
        summarize(path)
    code, out, err = call(capsys, "trace", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"lightning-perf trace: {path} ")


@pytest.mark.parametrize("args", [[], ["x.json", "--combine", "y"], ["none.json"]])
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    """No argument, both arguments, and a missing file are refused."""
    code, _, err = call(capsys, "trace", *args)
    assert (code, err.count("\n")) == (2, 1)


def test_events_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    """Memory does not grow with the file: the note says how many events are used."""
    path = written(tmp_path, cuda_trace(steps=20))
    found = summarize(path, most=30)
    assert found.notes == [
        "only the first 30 events of the host are used",
        "only the first 30 events of the devices are used",
    ]
    assert 0 < found.steps < 20


def test_memory_does_not_grow_with_unused_data(tmp_path: Path) -> None:
    """A file of many megabytes, mostly arguments of events, is read in chunks."""
    event = on_host("cpu_op", "aten::add", 0, 5)
    event["args"] = {"Input Dims": "y" * 2000}
    events = [{**event, "ts": 10.0 * number} for number in range(10_000)]
    path = written(tmp_path, {"traceEvents": events})
    assert path.stat().st_size > 20e6
    del events
    tracemalloc.start()
    found = summarize(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.operators[0].calls == 10_000
    assert peak < 8e6


def test_nested_calls_that_wait_are_followed_once(tmp_path: Path) -> None:
    """What is above a call is derived from its caller's: walks up to the root were cubic."""
    depth = 3000
    calls = [
        on_host("cpu_op", "aten::item" if level % 2 else "aten::mm", level, 2 * depth - level)
        for level in range(depth)
    ]
    path = written(tmp_path, {"traceEvents": [*calls, on_device("kernel", GEMM, 0, 1, 1)]})
    (found,) = summarize(path).synchronizations
    assert (found.call, found.operator, found.calls) == ("aten::item", "aten::mm", 1)


def test_a_long_value_is_parsed_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt has twice the text of the one before: their sum is linear in its length."""
    attempts = []
    parse = json.JSONDecoder.raw_decode

    def counted(decoder: json.JSONDecoder, text: str, at: int = 0) -> Any:
        attempts.append(len(text) - at)
        return parse(decoder, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    length = 20 << 20
    content = json.dumps({"a": "x" * length, "traceEvents": []}).encode()
    (path := tmp_path / "trace.json.gz").write_bytes(gzip.compress(content, 1))
    with pytest.raises(TraceError):
        summarize(path)
    assert sum(attempts) < 5 * length
