"""Rules about GPUs and several ranks, on signals with and without their cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.signals import (
    FINE,
    WINDOWS,
    every,
    sampled,
    signals_of,
    signals_of_ranks,
    with_costs,
)
from helpers.windows import ranks_window

from lightning_perf.diagnosis import diagnose
from lightning_perf.diagnosis.report import evidence_text
from lightning_perf.diagnosis.signals import SAVES, Loader, Setup, Signals
from lightning_perf.timing.totals import Action, Cost

GPU = Setup(device="cuda", cpus=8, loader=Loader(num_workers=4, batch_size=16))
GB = 1e9


def on_gpu(
    per_batch: dict[str, float], columns: dict[str, Any] | None = None, **options: Any
) -> Signals:
    """Signals of a GPU that is busy 60 % of the time, unless given otherwise."""
    given = sampled(gpu_util=60.0) if columns is None else columns
    return signals_of(per_batch, columns=given, **({"setup": GPU} | options))


def throttled(**percent: float) -> dict[str, list[float]]:
    """A busy GPU below its maximum clock, for the given percentage of the time per reason."""
    reasons = {f"gpu_throttled_{kind}": percent.get(kind, 0.0) for kind in KINDS}
    state = {"gpu_util": 99.0, "gpu_temperature": 88.0, "gpu_sm_clock": 1.1e9}
    return sampled(gpu_throttled=max(percent.values()), **reasons, **state)


KINDS = ("power", "thermal", "hardware")
#: Half of the time in the model, most of the rest in the loop.
HALF = {"forward": 0.015, "backward": 0.015, "other": 0.02}
#: A third of the time in reading values from the device.
READING = {"forward": 0.01, "backward": 0.02, "from_device": 0.02}
PLOTS = Action("train", "callbacks", "Plots.on_train_batch_end")


def grows(**sensors: float) -> dict[str, list[float]]:
    """Allocated memory that grows by 100 MB per window of half a second."""
    used = [1.0 + 0.1 * number for number in range(WINDOWS)]
    return sampled(gpu_util=99.0, **sensors) | {"memory/current_allocated_mem": used}


PLANTED: dict[str, tuple[str, Signals, dict[str, Any]]] = {
    "small kernels": (
        "launch-bound",
        on_gpu(FINE, sampled(gpu_util=40.0)),
        {"severity": "critical", "share": 0.58, "phase": "forward", "gpu_percent": 40.0},
    ),
    "few kernels": (
        "low-gpu-utilization",
        on_gpu(HALF, sampled(gpu_util=45.0)),
        {"severity": "warning", "share": 0.15, "phase": "forward", "gpu_percent": 45.0},
    ),
    "values read in each step": (
        "sync-bound",
        on_gpu(READING, named={Action("train", "from_device", "Model.log"): every(0.2)}),
        {"severity": "critical", "share": 0.4, "culprit": "Model.log", "phase": "from_device"},
    ),
    "heat": (
        "throttled",
        on_gpu(FINE, throttled(power=100.0, thermal=30.0)),
        {"severity": "warning", "thermal_percent": 30.0, "gpu_temperature_celsius": 88.0},
    ),
    "a failing power supply": (
        "throttled",
        on_gpu(FINE, throttled(hardware=80.0)),
        {"severity": "critical", "hardware_percent": 80.0, "gpu_sm_clock_mhz": 1100.0},
    ),
    "tensors that are kept": (
        "device-memory-growth",
        on_gpu(FINE, grows(gpu_free_memory=5 * GB)),
        {"severity": "critical", "bytes_per_batch": 1e7, "seconds_until_full": 25.0},
    ),
    "tensors that are kept, on a GPU without NVML": (
        "device-memory-growth",
        on_gpu(FINE, {"memory/current_allocated_mem": [1 + 0.1 * n for n in range(WINDOWS)]}),
        {"severity": "warning"},
    ),
    "copies, by the device's clock": (
        "transfer-bound",
        on_gpu(FINE, sampled(gpu_util=80.0) | {"timings/device/to_device": [0.1] * WINDOWS}),
        {"severity": "critical", "share": 0.2, "phase": "to_device", "pin_memory": "False"},
    ),
    "batches that come late, by the device's clock": (
        "input-bound",
        on_gpu(
            {**FINE, "dataloader_next": 0.05},
            sampled(gpu_util=70.0)
            | {"timings/exposed_input": [0.2] * WINDOWS, "timings/device/batches": [8.0] * WINDOWS},
        ),
        {"severity": "critical", "share": 0.25, "wait_seconds": 0.025},
    ),
    "a callback, as far as the GPU idles": (
        "callback-bound",
        on_gpu({**FINE, "callbacks": 0.05}, sampled(gpu_util=75.0), named={PLOTS: every(0.5)}),
        {"severity": "critical", "share": 0.25, "culprit": "Plots.on_train_batch_end"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", PLANTED)
def test_a_cause_is_found(cause: str) -> None:
    """The verdict has its cost, its evidence and the predicted gain."""
    code, signals, expected = PLANTED[cause]
    (found,) = [each for each in diagnose(signals).verdicts if each.code == code]
    serious = [each.code for each in diagnose(signals).verdicts if each.severity != "info"]
    assert serious == [code]
    seen = found.as_dict() | dict(found.evidence)
    assert {name: seen[name] for name in expected} == pytest.approx(expected)
    advised = "advised_step_seconds" in found.evidence
    assert found.predicted_speedup == pytest.approx(1 / (1 - found.share), rel=0.02 * advised)
    assert found.advice


HEALTHY: dict[str, Signals] = {
    "a GPU at its power limit": on_gpu(FINE, throttled(power=100.0)),
    "a GPU that was hot for a moment": on_gpu(FINE, throttled(power=8.0, thermal=8.0)),
    "a busy GPU that the host runs ahead of": on_gpu(FINE, sampled(gpu_util=97.0)),
    "a GPU that idles a little": on_gpu(FINE, sampled(gpu_util=75.0)),
    "a GPU that is busy for half of the time, while the host computes": on_gpu(
        HALF, sampled(gpu_util=55.0)
    ),
    "reading values of a busy GPU": on_gpu(READING, sampled(gpu_util=98.0)),
    "batches that the host waits for while the GPU works": on_gpu(
        {**FINE, "dataloader_next": 0.05},
        sampled(gpu_util=98.0)
        | {"timings/exposed_input": [0.01] * WINDOWS, "timings/device/batches": [8.0] * WINDOWS},
    ),
    "a callback beside which the GPU works": on_gpu(
        {**FINE, "callbacks": 0.05}, sampled(gpu_util=98.0), named={PLOTS: every(0.5)}
    ),
    "memory that levels off": on_gpu(
        FINE,
        sampled(gpu_util=99.0)
        | {"memory/current_allocated_mem": [1 + min(0.2 * n, 0.9) for n in range(WINDOWS)]},
    ),
    "memory of a GPU that is not used": signals_of(FINE, columns=grows(gpu_free_memory=GB)),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_gpu_has_no_warning(case: str) -> None:
    """Host time during which the GPU is busy costs nothing."""
    verdicts = diagnose(HEALTHY[case]).verdicts
    assert verdicts[0].code == "healthy"
    assert {each.severity for each in verdicts} == {"info"}


def test_without_sensors_gpu_rules_are_unknown() -> None:
    """Each rule names the missing sensor; on a CPU it does not apply."""
    codes = {"throttled", "launch-bound", "low-gpu-utilization", "sync-bound"}
    abstained = diagnose(on_gpu(FINE, {})).abstained
    assert codes | {"device-memory-growth"} <= set(abstained)
    assert all("NVML" in abstained[code] for code in codes)
    assert not codes & set(diagnose(signals_of(FINE)).abstained)
    unsupported = sampled(gpu_util=99.0, gpu_throttled=float("nan"))
    assert "throttled" in diagnose(on_gpu(FINE, unsupported)).abstained


def test_constant_memory_of_a_gpu_is_diagnosed() -> None:
    """It is read in each window, so that equal values are samples and show no growth."""
    columns = sampled(gpu_util=97.0) | {"memory/current_allocated_mem": [2.0] * WINDOWS}
    assert "device-memory-growth" not in diagnose(on_gpu(FINE, columns)).abstained


def test_waiting_gpus_count_as_busy() -> None:
    """With several ranks, the cost of one rank's callback is not limited by GPU idle time."""
    setup = Setup(device="cuda", world_size=2)
    busy, named = sampled(gpu_util=98.0), {PLOTS: every(0.5)}
    signals = on_gpu({**FINE, "callbacks": 0.05}, busy, named=named, setup=setup)
    assert diagnose(signals).verdicts[0].code == "callback-bound"


# -- several ranks ----------------------------------------------------------------------------


def late(seconds: float) -> Signals:
    """Rank 2 has more work in forward, and the others wait for its gradients."""
    return signals_of_ranks({"forward": {2: seconds}}, dict.fromkeys((0, 1, 3), seconds))


def test_a_straggler_is_named_with_its_cost() -> None:
    """Rank 2 has 5 s more work in forward than the others, out of 16 s."""
    (found,) = [v for v in diagnose(late(5.0)).verdicts if v.code == "straggler"]
    assert (found.severity, found.culprit, found.rank, found.phase) == (
        "critical", "rank 2", 2, "forward",
    )  # fmt: skip
    assert found.share == pytest.approx(5 / 16)
    assert evidence_text(found) == (
        "It takes 500 ms per batch and at least 31.2% of the time. "
        "Measured: waited 500 ms, node 0, slow in most windows."
    )
    assert found.predicted_speedup == pytest.approx(16 / 11)


@pytest.mark.parametrize(("seconds", "severity"), [(0.3, None), (0.9, "info"), (1.5, "warning")])
def test_the_severity_of_a_straggler_follows_the_waits(
    seconds: float, severity: str | None
) -> None:
    """From 5 % of the time on it is listed, and from 10 % on it is a warning."""
    verdicts = diagnose(late(seconds)).verdicts
    found = [each.severity for each in verdicts if each.code == "straggler"]
    assert found == ([] if severity is None else [severity])


@pytest.mark.parametrize(("own", "severity"), [(20.0, "info"), (195.0, "critical")])
def test_a_rank_delayed_once_by_other_programs_is_not_a_straggler(
    own: float, severity: str
) -> None:
    """Unless it is late in most windows, the CPU share of this training decides the severity."""
    use = {"cpu_util_simple": 100.0, "process_cpu": own}
    usual = signals_of_ranks({}, {}, **use).windows
    once = signals_of_ranks({"forward": {2: 40.0}}, dict.fromkeys((0, 1, 3), 40.0), **use).windows
    steps = np.repeat([1.1, 5.1], [50, 10])
    signals = Signals([*usual[:5], once[0]], steps, setup=Setup(world_size=4, cpus=2))
    found = {each.code: each.severity for each in diagnose(signals).verdicts}
    assert found["straggler"] == severity
    # Four of ten windows are no chance.
    signals = Signals([*usual, *4 * once[:1]], setup=Setup(world_size=4, cpus=2))
    found = {each.code: each.severity for each in diagnose(signals).verdicts}
    assert found["straggler"] != "info"


def meeting(own: dict[str, dict[int, float]], waits: dict[str, dict[int, float]]) -> Signals:
    """Four ranks, of which each spends 1 s in each of eleven categories, and what is given."""
    return Signals([ranks_window(4, own, waits, **{"waits/exchange": [0.0] * 4})] * 6)


@pytest.mark.parametrize("waits", ["waits/start", "waits/forward", "waits/backward"])
@pytest.mark.parametrize("category", ["other", "forward", "backward", "callbacks"])
def test_ranks_wait_for_a_straggler_wherever_they_meet(category: str, waits: str) -> None:
    """Rank 2 has 4 s more work, for which the others wait in the same category or another one."""
    signals = meeting({category: {2: 4.0}}, {waits: dict.fromkeys((0, 1, 3), 4.0)})
    (found,) = [v for v in diagnose(signals).verdicts if v.severity != "info"]
    assert (found.code, found.rank) == ("straggler", 2)
    assert found.share == pytest.approx(4 / 15)


def test_ranks_wait_for_a_straggler_in_collectives_of_metrics() -> None:
    """With sync_dist=True in each step: 4 s of 15."""
    waits = {"reduce_metrics": dict.fromkeys((0, 1, 3), 4.0)}
    signals = meeting({"forward": {2: 4.0}} | waits, {})
    (found,) = [v for v in diagnose(signals).verdicts if v.severity != "info"]
    assert (found.code, found.rank, found.share) == ("straggler", 2, pytest.approx(4 / 15))


def test_a_hook_of_the_module_on_rank_0_is_the_hooks() -> None:
    """Others wait in the category that it is in: 4 s of 15."""
    signals = meeting({"other": {0: 4.0}}, {"waits/start": dict.fromkeys((1, 2, 3), 4.0)})
    hook = Action("train", "other", "Net.on_train_batch_end")
    found = diagnose(with_costs(signals, [{hook: Cost(4.0, 10)}] * 6)).verdicts
    assert {v.culprit: v.share for v in found if v.severity != "info"} == {
        hook.name: pytest.approx(4 / 15)
    }


@pytest.mark.parametrize("others", [0.0, 2.0])
def test_what_ranks_wait_for_a_callback_of_rank_0_is_the_callbacks(others: float) -> None:
    """It takes 4 s of 15 on rank 0 alone, whatever another callback takes on all ranks."""
    own = {**dict.fromkeys(range(4), others), 0: others + 4.0}
    signals = signals_of_ranks({"callbacks": own}, dict.fromkeys((1, 2, 3), 4.0))
    other = Action("train", "callbacks", "Other.on_train_batch_end")
    mine = Action("train", "callbacks", "Plots.on_train_batch_end")
    costs = {mine: Cost(4.0, 10), other: Cost(1.0 + others, 10)}
    found = diagnose(with_costs(signals, [costs] * 6)).verdicts
    shares = {v.culprit: v.share for v in found if v.severity != "info"}
    total = 15.0 + others
    assert shares == {
        mine.name: pytest.approx(4 / total), other.name: pytest.approx((1 + others) / total),
    }  # fmt: skip


def test_what_ranks_wait_for_a_checkpoint_of_rank_0_is_the_checkpoints() -> None:
    """It takes 4 s of 15 on rank 0 alone, such as an upload: 1 s of it is the category's mean."""
    signals = signals_of_ranks({"checkpoint": {0: 4.0}}, dict.fromkeys((1, 2, 3), 4.0))
    writing = Action("train", "checkpoint", "checkpoint writing (Uploads.on_train_batch_end)")
    costs = {writing: Cost(5.0, 1), SAVES: Cost(0.0, 1)}
    found = diagnose(with_costs(signals, [costs] * 6)).verdicts
    (verdict,) = [v for v in found if v.severity != "info"]
    assert (verdict.code, verdict.evidence["seconds_per_checkpoint"]) == ("checkpoint-bound", 5.0)
    assert verdict.share == pytest.approx(5 / 15)


def test_a_callback_in_validation_on_rank_0_is_validations() -> None:
    """It takes 4 s of 16 there, for which the others wait, beside 1 s of validation on all."""
    own = {**dict.fromkeys(range(4), 1.0), 0: 5.0}
    signals = signals_of_ranks({"validation": own}, dict.fromkeys((1, 2, 3), 4.0))
    plots = Action("validate", "callbacks", "Plots.on_validation_end")
    found = diagnose(with_costs(signals, [{plots: Cost(4.0, 1)}] * 6)).verdicts
    (verdict,) = [v for v in found if v.severity != "info"]
    assert (verdict.code, verdict.culprit) == ("validation-bound", plots.name)
    assert verdict.share == pytest.approx(5 / 16)


def test_waits_for_metrics_in_validation_may_be_for_a_slow_rank() -> None:
    """The strategy is no culprit that could do less: the advice says what ranks wait for."""
    signals = signals_of_ranks({"validation": dict.fromkeys(range(4), 9.0)}, {})
    reduce = Action("validate", "reduce_metrics", "DDPStrategy.reduce")
    found = diagnose(with_costs(signals, [{reduce: Cost(8.0, 10)}] * 6)).verdicts
    (verdict,) = [v for v in found if v.severity != "info"]
    assert (verdict.code, verdict.culprit) == ("validation-bound", reduce.name)
    assert "compare their validation data" in verdict.advice


def test_validation_that_is_slow_on_one_rank_is_the_stragglers() -> None:
    """The others wait 9 s of 20 for it."""
    signals = signals_of_ranks({"validation": {2: 9.0}}, dict.fromkeys((0, 1, 3), 9.0))
    (found,) = [v for v in diagnose(signals).verdicts if v.severity != "info"]
    assert (found.code, found.rank, found.phase) == ("straggler", 2, "validation")
    assert found.share == pytest.approx(9 / 20)


@pytest.mark.parametrize("category", ["dataloader_next", "to_device", "forward"])
def test_slow_work_on_one_rank_is_attributed_to_the_straggler(category: str) -> None:
    """Slow input or transfer on one rank has no other verdict than the straggler's."""
    signals = signals_of_ranks({category: {2: 9.0}}, dict.fromkeys((0, 1, 3), 9.0))
    (found,) = [v for v in diagnose(signals).verdicts if v.severity != "info"]
    assert (found.code, found.rank) == ("straggler", 2)


def test_communication_is_the_least_wait_of_all_ranks() -> None:
    """The rank that waits least waits for no other rank: 3 s out of 14 s."""
    signals = signals_of_ranks({}, {0: 3.0, 1: 3.5, 2: 3.2, 3: 3.1})
    (found,) = [v for v in diagnose(signals).verdicts if v.severity != "info"]
    assert (found.code, found.severity, found.phase) == (
        "communication-bound", "critical", "backward",
    )  # fmt: skip
    assert found.share == pytest.approx(3 / 14.2, rel=0.01)


LATE = signals_of_ranks({"forward": {2: 5.0}}, dict.fromkeys((0, 1, 3), 5.0))
ALL = dict.fromkeys(range(4), 3.0)


@pytest.mark.parametrize(
    ("signals", "severity"),
    [
        (signals_of_ranks({}, {}), None),
        # The late rank itself does not wait.
        (LATE, None),
        # Ranks take turns: each waits as long as the others, but not in every batch.
        (signals_of_ranks({}, ALL, exchange=dict.fromkeys(range(4), 0.1)), None),
        # Other programs use the CPUs that exchange gradients, for longer than the exchange takes.
        (signals_of_ranks({}, ALL, cpu_util_simple=100.0, process_cpu=20.0), None),
        (signals_of_ranks({}, ALL, cpu_util_simple=100.0, process_cpu=195.0), "critical"),
        (signals_of_ranks({}, ALL, cpu_util_simple=50.0, process_cpu=20.0), "critical"),
    ],
)
def test_waits_with_another_cause_are_not_communication(
    signals: Signals, severity: str | None
) -> None:
    """Late ranks, alternating ranks, and a busy machine: 3 ms of 14 ms per batch."""
    shorter = [replace(each, rows=np.array(each.rows) / 100) for each in signals.windows]
    signals = replace(signals, windows=shorter, setup=Setup(world_size=4, cpus=2))
    found = {each.code: each.severity for each in diagnose(signals).verdicts}
    assert found.get("communication-bound") == severity


ALTERNATELY = {"gradients": ALL, "exchange": dict.fromkeys(range(4), 0.2)}


@pytest.mark.parametrize(("own", "severity"), [(20.0, None), (195.0, "warning")])
def test_ranks_that_are_late_in_turn_are_stragglers(own: float, severity: str | None) -> None:
    """Each waits 30 ms of 140 ms, 2 ms of which are the exchange. Other programs may delay them by
    a time slice in each batch, which is 4 ms: they explain all of a tenth of this. A quarter may be
    due to chance, so that a fifth of the time is not critical.
    """
    signals = signals_of_ranks({}, **ALTERNATELY, cpu_util_simple=100.0, process_cpu=own)
    windows = [replace(each, rows=np.array(each.rows) / 100) for each in signals.windows]
    signals = Signals(windows, setup=Setup(world_size=4, cpus=2))
    found = [each for each in diagnose(signals).verdicts if each.code == "straggler"]
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    for each in found:
        assert (each.rank, each.phase) == (None, "backward")
        assert each.share == pytest.approx(2.8 / 14)
        assert each.evidence["slow_in"] == "changing ranks"


def test_a_rank_that_is_late_more_often_than_others_is_not_the_cause() -> None:
    """Two ranks are late in 9 and 6 reports: the one alone explains a fifth of the waits."""
    first, second = (
        signals_of_ranks(
            {"forward": {rank: 9.0}}, {1 - rank: 9.0}, ranks=2, exchange={1 - rank: 0.1}
        ).windows[:1]
        for rank in (0, 1)
    )
    signals = Signals([*first, *(first * 3 + second * 2) * 3])
    (found,) = [each for each in diagnose(signals).verdicts if each.code == "straggler"]
    assert found.rank is None
    assert found.share == pytest.approx(4.5 / 20)


@pytest.mark.parametrize("rank", [2, None])
def test_ranks_that_are_late_from_some_batch_on_are_no_slowdown(rank: int | None) -> None:
    """The seconds belong to the straggler, which is more specific, whether one rank or changing
    ones; and the slowdown of all ranks is still found.
    """
    usual, later = signals_of_ranks({}, {}).windows, late(9.0).windows
    if rank is None:
        later = signals_of_ranks({}, dict.fromkeys(range(4), 9.0), exchange={0: 0.1}).windows
    steps = np.repeat([1.1, 2.0], 60)
    both = {"straggler", "slowdown"}
    found = diagnose(Signals([*usual, *later], steps=steps)).verdicts
    (waited,) = [each for each in found if each.code in both]
    assert (waited.code, waited.rank) == ("straggler", rank)
    assert waited.share == pytest.approx(6 * 9 / (6 * 11 + 6 * 20), rel=0.01)
    later = signals_of_ranks({"forward": dict.fromkeys(range(4), 9.0)}, {}).windows
    found = diagnose(Signals([*usual, *later], steps=steps)).verdicts
    assert [(v.code, v.phase) for v in found if v.code in both] == [("slowdown", "forward")]


def test_without_waits_rank_rules_are_unknown() -> None:
    """Both rules name the missing columns; with one rank they do not apply."""
    (whole, *_) = signals_of_ranks({}, {}, ranks=2).windows
    columns = {n: p for n, p in whole.columns.items() if not n.startswith("waits/")}
    signals = Signals(windows=[replace(whole, columns=columns)] * 6)
    assert {"straggler", "communication-bound"} <= set(diagnose(signals).abstained)
    assert "straggler" not in diagnose(signals_of(FINE)).abstained
