"""The case tables of the reference documents, row by row.

``CHECKS`` maps an area of the table to a function that checks one row of it. To implement another
area, add its function there and remove the area from ``NOT_HERE``.
"""

import builtins
import itertools
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from helpers.fake_allocator import OutOfMemory, simulated_cuda
from helpers.fake_allocator import fit as fit_with_snapshots
from helpers.fake_nvml import FakeGpu, install
from helpers.small import Records, Small, left_in, trainer

from lightning_perf import (
    ConfigError,
    MemorySnapshot,
    Never,
    PyTorch,
    SpeedMonitor,
    SystemMetrics,
)
from lightning_perf.callbacks.speed_monitor import elapsed
from lightning_perf.core.progress import Limits, Moment, Timestamp
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.flops.batch import checked_count, get_num_samples, get_num_tokens
from lightning_perf.run.signals import gigabytes
from lightning_perf.schedule import Cyclic, Every
from lightning_perf.system import Sampler
from lightning_perf.system.gpus import open_gpus
from lightning_perf.system.host import traffic
from lightning_perf.traces.names import file_format, remote_format, split_url

CASES = json.loads((Path(__file__).parent / "data" / "composer_cases.json").read_text())

#: Areas that other tests check, or that concern functions outside of this package.
NOT_HERE = {
    "det.timings", "format", "format.partial", "marker",
    "peak_flops", "peak_flops.quirk",
    "trace.conflict",
}  # fmt: skip

#: Rows about the unit `iter` and about token_type, which the design omits.
LEFT_OUT = {
    "1.1iter",
    "1.0iter",
    "2iter",
    "... -> to_next_epoch() -> to_next_batch(5,1,10s) -> to_next_iteration()",
    "same, token_type=loss_generating",
}

#: Rows that the design improves on: no limit on hours and seconds.
OURS = {"24h": {"value": 86400, "unit": "sec"}, "1000s": {"value": 1000, "unit": "sec"}}

#: Rows in which the design counts the tensors of a batch, whatever else is in it.
COUNTED = {"[tensor(128,8),'str']", "dict with str/int/tuple/None/nested dict value"}


def check(compute: Callable[[], Any], expected: Any) -> None:
    """Compare the result or error of a computation with the expected one of a row."""
    if isinstance(expected, dict) and "raises" in expected:
        with pytest.raises(getattr(builtins, expected["raises"])):
            compute()
    else:
        result = compute()
        assert result == expected
        assert type(result) is type(expected)


def evaluate(expression: str) -> Any:
    """Evaluate a row's expression, in which times have no quotes."""
    code = re.sub(r"(?<!['\w.])(-?[\d.]+(?:ep|ba|dur)\b)", r"parse('\1')", expression)
    names = {
        "Time": Time,
        "Timestamp": Timestamp,
        "ensure_time": Time.from_input,
        "parse": Time.from_timestring,
        **{kind.__name__: kind for kind in (bool, float, str)},
        "repr": repr,
    }
    return eval(code, {"__builtins__": {}}, names)


def check_parse(case: dict[str, Any]) -> None:
    expected = OURS.get(case["input"], case["expected"])
    if "value" in expected:
        time = Time.from_timestring(case["input"])
        check(lambda: time.value, expected["value"])
        assert time.unit is TimeUnit(expected["unit"])
    else:
        check(lambda: Time.from_timestring(case["input"]), expected)


def check_quirk(case: dict[str, Any]) -> None:
    check(lambda: Time.from_timestring(case["input"]).value, case["expected"]["recommended"])


def check_expression(case: dict[str, Any]) -> None:
    def compute() -> Any:
        result = evaluate(case["input"])
        return str(result) if isinstance(result, Time | TimeUnit) else result

    expected = case["expected"]
    if isinstance(expected, str) and case["area"] in ("time.arith", "time.construct"):
        unit = case["input"].endswith(".unit")
        expected = expected if unit else str(Time.from_timestring(expected))
    check(compute, expected)


def steps_of(case: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Read a row such as ``... -> to_next_batch(10,20,5s)``."""
    steps = []
    for method, arguments in re.findall(r"(to_next_\w+)\(([^)]*)\)", case["input"]):
        *counts, duration = arguments.split(",")
        names = ("samples", "tokens")
        steps.append(
            (
                method,
                {
                    **dict(zip(names, map(int, counts), strict=False)),
                    "duration": float(duration[:-1]),
                },
            )
        )
    return steps


def chained() -> list[dict[str, Any]]:
    """Order the rows that continue one another, by their counts."""
    rows = [
        case
        for case in CASES
        if case["area"] == "timestamp" and "->" in case["input"] and case["input"] not in LEFT_OUT
    ]
    return sorted(rows, key=lambda row: (row["expected"]["batch"], row["expected"].get("epoch", 0)))


def check_timestamp(case: dict[str, Any]) -> None:
    if "->" not in case["input"]:
        return check(lambda: evaluate(case["input"]), case["expected"])
    now, rows = Timestamp(), chained()
    for row in rows[: rows.index(case) + 1]:
        for method, arguments in steps_of(row):
            now = getattr(now, method)(**arguments)
    for name, value in case["expected"].items():
        if not name.endswith("_iteration") and not name.endswith("in_iteration"):
            assert getattr(now, name) == value, name
    return None


ONE, OTHER = torch.zeros(128, 8), torch.zeros(128, 64)
BATCHES = {
    "tensor (128,8)": [ONE],
    "list of (128,8),(128,64)": [[ONE, OTHER]],
    "tuple of (128,8),(128,64)": [(ONE, OTHER)],
    "dict a:(128,8) b:(128,64)": [{"a": ONE, "b": OTHER}],
    "list of dicts [{a:(128,8)},{c:(128,64)}]": [[{"a": ONE}, {"c": OTHER}]],
    "[tensor(128,8),'str']": [[ONE, "str"]],
    "[1,2]": [[1, 2]],
    "{} or [] or 5 or None": [{}, [], 5, None],
    "dict with str/int/tuple/None/nested dict value": [
        {"a": ONE, "b": value} for value in ("str", 1, (ONE, OTHER), None, {"c": ONE})
    ],
}


def check_samples(case: dict[str, Any]) -> None:
    expected = 128 if case["input"] in COUNTED else case["expected"]
    for batch in BATCHES[case["input"]]:
        check(lambda batch=batch: get_num_samples(batch), expected)


TOKENS: dict[str, list[Callable[[], int]]] = {
    "non-dict batch, no max_seq_len": [lambda: get_num_tokens(ONE)],
    "fn returns 8, token_type any": [lambda: checked_count(8, "fn")],
    "fn returns {total:8}, token_type=loss_generating": [lambda: checked_count({"total": 8}, "fn")],
    "fn returns 8.0 or None": [lambda: checked_count(8.0, "fn"), lambda: checked_count(None, "fn")],
}


def check_tokens(case: dict[str, Any]) -> None:
    for compute in TOKENS[case["input"]]:
        check(compute, case["expected"])


def letters(schedule: Cyclic, batches: int, limits: Limits) -> str:
    """Write the action of a schedule in each batch: Skip, Warm up, Active, active and eXport."""
    start, text = Moment("train", Timestamp(), Timestamp(), limits), ""
    for moment in (start.ahead(batch) for batch in range(batches)):
        window = schedule.window(moment)
        if window is not None:
            text += "A" if schedule.window(moment.ahead(1)) == window else "X"
        else:
            ahead = (moment.ahead(n) for n in range(1, schedule.lead + 1))
            text += "W" if any(map(schedule, ahead)) else "S"
    return text


def check_cyclic(case: dict[str, Any]) -> None:
    call, _, length = case["input"].partition(" dataloader_len=")

    def cyclic_schedule(*args: int, **kwargs: int) -> Cyclic:
        return Cyclic(*args, per_epoch=True, **kwargs)

    schedule = eval(call, {"__builtins__": {}}, {"cyclic_schedule": cyclic_schedule})
    limits = Limits(batches_per_epoch=int(length) if length else None)
    expected = case["expected"]
    assert letters(schedule, len(expected), limits) == expected


def check_interval(case: dict[str, Any]) -> None:
    given = dict(re.findall(r"(\w+)[= ]'?([\w.]+)", case["input"].replace("prev sample", "prev")))
    if "now" in given:
        previous, now = Timestamp(sample=int(given["prev"])), Timestamp(sample=int(given["now"]))
        now, limits = now.to_next_batch(), Limits()
    else:
        total, length = Time.from_timestring(given["max_duration"]), given["dataloader_len"]
        limits = Limits(
            max_steps=total.value if total.unit is TimeUnit.BATCH else None,
            max_epochs=total.value if total.unit is TimeUnit.EPOCH else None,
            batches_per_epoch=Time.from_timestring(length).value,
        )
        previous = now = Timestamp()
        for _ in range(int(given["current_batches"])):
            seconds = float(given["seconds_per_batch"])
            previous, now = now, now.to_next_batch(duration=seconds, steps=1)
    moment = Moment("train", now, previous, limits)
    check(lambda: Every(given["interval"])(moment), case["expected"])


def check_overwrite(case: dict[str, Any]) -> None:
    """The reference requires an empty folder; the design, that no later file matches the pattern.

    Such a file is of this rank and strictly after the current moment, because a resume finds traces
    up to the batch of its checkpoint. Like the reference, hidden files do not count.
    """

    def fit(*existing: str, overwrite: bool = False) -> None:
        shutil.rmtree("traces", ignore_errors=True)
        for name in existing:
            path = Path("traces", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        profiler = PyTorch(schedule="never", folder="traces", overwrite=overwrite)
        trainer(Path.cwd(), profiler).fit(Small())

    later = "rank0.1.pt.trace.json.gz"
    fit("notes.md", f"deeper/{later}", f".hidden/{later}", f".{later}")
    fit("rank0.0.pt.trace.json.gz", "rank1.1.pt.trace.json.gz", "rank0.1.pt.trace.json")
    fit(later, overwrite=True)
    check(lambda: fit(later), case["expected"])


def check_uri(case: dict[str, Any]) -> None:
    check(lambda: list(split_url(case["input"])), case["expected"])


class Declares(Small):
    """Its FLOPs need not be counted, so that all batches but the first are timed."""

    flops_per_batch = 1e6


def check_speed(case):
    """SpeedMonitor in a real training with the setup of a row."""
    setting, expected = case["input"], case["expected"]
    if setting.startswith("train "):
        train, validation, unit = re.findall(r"(\d+)s.* (\d+)s.* (\w+)$", setting)[0]
        assert elapsed(float(train), float(validation), unit) == expected
    elif setting.startswith("time_unit="):
        check(lambda: eval(f"SpeedMonitor({setting})"), expected)
    else:
        logger, monitor = Records(), SpeedMonitor(window_size=2)
        trainer(Path.cwd(), monitor, logger=logger, max_steps=100, max_epochs=-1).fit(Declares())
        if "points" in str(expected):
            points = {"throughput": "throughput/batches_per_sec", "time/*": "time/total"}
            found = {f"{name} points": len(logger.of(key)) for name, key in points.items()}
            assert found == expected
        elif setting == "checkpoint state":
            # The design keeps all progress; like the reference, the window refills.
            state = monitor.state_dict()["progress"]
            assert set(state) == {"stages", "validation_seconds", "paused_seconds", "job"}
        else:
            assert setting == "no token info"
            assert not [key for key in logger.keys if "tokens_per_sec" in key]


def check_runtime(case):
    """SpeedMonitor estimates the remaining time after the batches that the row skips."""
    epochs, batches, skipped = map(int, re.findall(r"\d+", case["input"]))
    assert skipped == 1  # the first batch is always a warm-up
    logger = Records()
    limits = {"max_epochs": epochs, "limit_train_batches": batches}
    trainer(Path.cwd(), SpeedMonitor(), logger=logger, **limits).fit(Declares())
    found = {f"{key} points": len(logger.of(key)) for key in ["time/remaining_estimate"]}
    assert found == case["expected"]
    assert min(seconds for _, seconds in logger.of("time/remaining_estimate")) >= 0


def check_trace_name(case: dict[str, Any]) -> None:
    """Names of torch's traces. The reference asserts where the design raises ConfigError."""
    expected = case["expected"]
    if isinstance(expected, list):
        folder = Path.cwd() / "records-version_0" / "torch_traces"
        profiler = PyTorch(schedule=Cyclic(per_epoch=True), use_gzip=False)
        trainer(Path.cwd(), profiler, logger=Records(), max_epochs=2).fit(Small())
        assert [path.name for path in left_in(folder)] == sorted(expected)
    elif isinstance(expected, str):
        for name in (expected, expected.removesuffix(".gz")):
            assert (
                file_format(name, gz=True).render({"rank": 0, "batch": 7})
                == "rank0.7.pt.trace.json.gz"
            )
            assert (
                remote_format(name, gz=True).render({"rank": 0, "batch": 7})
                == "rank0.7.pt.trace.json.gz"
            )
    else:
        with pytest.raises(ConfigError, match=r"does not end in \.html"):
            eval(f"PyTorch({case['input']})")


def check_trace_memory(case: dict[str, Any]) -> None:
    """Seven of the eight combinations are refused."""
    for flags in itertools.product([False, True], repeat=3):
        options = dict(zip(("with_stack", "record_shapes", "profile_memory"), flags, strict=True))
        if all(flags):
            PyTorch(memory_filename="a.html", **options)
        else:
            check(lambda o=options: PyTorch(memory_filename="a.html", **o), case["expected"])


def check_snapshot(case):
    """MemorySnapshot on a simulated device: the files written are the files sent."""
    schedule, model = ("1ba", Small()) if "1ba" in case["input"] else (Never(), OutOfMemory())
    with simulated_cuda(), suppress(torch.OutOfMemoryError):
        steps = {"limit_train_batches": 2} if "2 batches" in case["input"] else {}
        fit_with_snapshots(Path.cwd(), MemorySnapshot(schedule=schedule), model, **steps)
    kinds = [path.suffix for path in Path.cwd().rglob("rank*")]
    count, named = re.match(r"(\d) uploads(?: \((.*)\))?", case["expected"]).groups()
    assert len(kinds) == int(count)
    assert named is None or set(kinds) == set(named.split(","))


def check_memory(case):
    """Bytes are reported in gigabytes with five digits."""
    check(lambda: gigabytes(int(case["input"].removesuffix(" bytes"))), case["expected"])


def check_system_metrics(case):
    """GPU utilization is logged after one batch, per GPU and not per rank."""
    assert case["expected"] == "min_gpu_percentage_rank_0 present"
    logger = Records()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeGpu("GPU-a"))
        trainer(Path.cwd(), SystemMetrics(), logger=logger, max_steps=1).fit(Small())
    assert "system/node_0/gpu_0/gpu_util" in logger.keys


def check_sensors(case):
    """Determined's disks and GPUs, read twice."""
    setting = case["input"]
    if setting.startswith("disk"):
        counts = [int(number) for number in re.findall(r"\d+", setting)]
        samples = [counts[0:2] + counts[4:6], counts[2:4] + counts[6:8]]
        check_disks(samples, case["expected"])
    else:
        free, use = re.findall(r"(\S+),(\S+)", setting)
        uuids = list(case["expected"])
        rows = zip(uuids, map(float, free), map(float, use), strict=True)
        with pytest.MonkeyPatch.context() as patch:
            install(patch, *(FakeGpu(uuid, memory=(f, 0), util=u) for uuid, f, u in rows))
            with open_gpus() as found:
                rows = [gpu(0.0) for gpu in found]
        for index, expected in enumerate(case["expected"].values()):
            assert {name: rows[index][f"gpu_{index}/{name}"] for name in expected} == expected


def check_disks(samples, expected):
    names = ("read_count", "write_count", "read_bytes", "write_bytes")
    _, sensor = traffic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_perf.system.host.physical", lambda disk: True)
        for second, sample in enumerate(samples):
            counts = SimpleNamespace(**dict(zip(names, sample, strict=True)))
            patch.setattr(psutil, "disk_io_counters", lambda counts=counts, **_: {"sda": counts})
            found = sensor(float(second))
    assert found == expected


def check_aggregate(case):
    """Determined's means of samples at intervals of 1 s; here a label is a prefix."""
    label = "L" in case["expected"]
    sums = Sampler()
    for sample in eval(case["input"], {"__builtins__": {}}, {"n1": "n1", "n2": "n2", "L": "L"}):
        sums.receive(sample["L"] if label else sample, seconds=1.0)
    means = {name: total / seconds for name, (total, seconds) in sums.totals().items()}
    assert means == (case["expected"]["L"] if label else case["expected"])


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "trace.overwrite": check_overwrite,
    "uri": check_uri,
    "time.parse": check_parse,
    "time.parse.quirk": check_quirk,
    "time.arith": check_expression,
    "time.compare": check_expression,
    "time.construct": check_expression,
    "time.repr": check_expression,
    "time.str": check_expression,
    "timestamp": check_timestamp,
    "samples": check_samples,
    "tokens": check_tokens,
    "schedule.cyclic": check_cyclic,
    "schedule.interval": check_interval,
    "speed": check_speed,
    "runtime": check_runtime,
    "trace.filename": check_trace_name,
    "trace.memory": check_trace_memory,
    "snapshot": check_snapshot,
    "memory": check_memory,
    "sysmetrics": check_system_metrics,
    "det.system": check_sensors,
    "det.aggregate": check_aggregate,
}

HERE = [case for case in CASES if case["area"] in CHECKS and case["input"] not in LEFT_OUT]


@pytest.mark.parametrize("case", HERE, ids=lambda case: f"{case['area']}: {case['input']}")
def test_a_case_of_the_reference_holds(case):
    """A row of the reference holds here, too."""
    CHECKS[case["area"]](case)


def test_every_area_is_accounted_for():
    """Every area of the table is checked or excluded, and none is listed twice."""
    areas = {case["area"] for case in CASES}
    assert areas == set(CHECKS) | NOT_HERE
    assert not set(CHECKS) & NOT_HERE


def test_exceptions_match_rows_of_the_table():
    """An exception that no longer matches a row would hide a case."""
    assert LEFT_OUT | set(OURS) <= {case["input"] for case in CASES}
