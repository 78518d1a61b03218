"""Comparing runs: differences, intervals, and runs that cannot be compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lightning_perf.diagnosis.compare import Comparison, Incomparable, Measured, compare


def stage(
    forward: float = 0.010,
    *,
    noise: float = 0.01,
    windows: int = 20,
    seed: int = 0,
    plots: float = 0.0,
    batch_size: int = 8,
    **more: Any,
) -> dict[str, Any]:
    """Windows of 10 batches with a random forward, 2 ms of loading, and a callback."""
    draw = random.Random(seed)
    times = {
        "forward": [10 * forward * draw.gauss(1, noise) for _ in range(windows)],
        "dataloader_next": [0.02] * windows,
        "callbacks": [10 * plots] * windows,
    }
    seconds = [sum(each) for each in zip(*times.values(), strict=True)]
    table = {
        "last": list(range(9, 10 * windows + 9, 10)),
        "batches": [10] * windows,
        "timed_batches": [10] * windows,
        "timed_seconds": seconds,
        "samples": [10 * batch_size] * windows,
        "ideal_seconds": [0.001] * windows,
        "timings": times,
        "culprits": {"Plots.on_train_batch_end": [10 * plots] * windows} if plots else {},
    }
    rates = {"batches_per_sec": 1.0, "samples_per_sec": 1.0, "mfu": 0.1}
    whole = {"batches": 10 * windows, "throughput": rates, "timings": {"forward": 1.0}}
    return {"whole_run": whole, "windows": table} | more


def compared(now: dict[str, Any], *before: dict[str, Any]) -> Comparison:
    return compare(Measured("now", now), [Measured(f"old {n}", b) for n, b in enumerate(before)])


def test_the_phase_and_the_cause_that_changed_are_named() -> None:
    """2 ms of a new callback in steps of 12 ms are 17 %; forward differs only by its noise."""
    found = compared(stage(plots=0.002, seed=1), stage())
    changes = {(each.kind, each.name): each for each in found.changes}
    step = changes["step", "batch"]
    assert found.slowdown is step
    assert step.relative(step.difference) == pytest.approx(1 / 6, abs=0.02)
    assert step.low is not None
    assert step.high is not None
    assert 0.0018 < step.low < step.difference < step.high < 0.0022
    for key in (("phase", "callbacks"), ("culprit", "Plots.on_train_batch_end")):
        assert changes[key].difference == pytest.approx(0.002)
        assert changes[key].certain
    assert not changes["phase", "forward"].certain
    assert changes["rate", "samples_per_sec"].relative(changes["rate", "samples_per_sec"].difference
        ) == pytest.approx(-1 / 7, abs=0.02)  # fmt: skip
    assert changes["rate", "mfu"].after == pytest.approx(0.0001 / 0.014, rel=0.02)
    assert (found.slower_than(0.05), found.slower_than(0.2)) == (True, False)
    assert [each.kind for each in found.changes][:2] == ["step", "phase"]


def test_equal_runs_rarely_differ() -> None:
    """Of 50 pairs of runs with noise only, 2 or 3 have an interval without 0."""
    pairs = [(stage(noise=0.05, seed=2 * n), stage(noise=0.05, seed=2 * n + 1)) for n in range(50)]
    certain = sum(compared(*pair).slowdown.certain for pair in pairs)
    assert certain <= 7


def uneven(mean: float, seed: int, windows: int = 20) -> dict[str, Any]:
    """A stage with windows of very different speed, of which some are ten times as slow."""
    draw = random.Random(seed)
    found = stage(windows=windows)
    slow = [10 if draw.random() < 0.15 else 1 for _ in range(windows)]
    seconds = [mean / 2.35 * factor * draw.lognormvariate(0, 0.05) for factor in slow]
    found["windows"] |= {"timed_seconds": seconds, "timings": {"forward": seconds}, "culprits": {}}
    return found


def test_no_interval_is_below_zero() -> None:
    """However uneven runs are, none can be slower than standing still, or take less than 0 s."""
    for seed in range(8):
        found = compared(uneven(0.1, seed), uneven(0.3, seed + 1, 6), uneven(0.1, seed + 2))
        for change in found.changes:
            assert change.low is not None
            assert change.high is not None
            assert -change.before <= change.low <= change.high
            assert change.relative(change.low) >= -1


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [1.0, 1.3])
def test_intervals_contain_the_true_ratio(ratio: float) -> None:
    """Of 200 pairs most do, and an interval is as wide as one computed without resampling."""
    covered, wider = 0, []
    for seed in range(200):
        runs = [stage(0.010 * ratio, noise=0.1, seed=2 * seed), stage(noise=0.1, seed=2 * seed + 1)]
        found = next(each for each in compared(*runs).changes if each.kind == "rate")
        assert found.low is not None
        assert found.high is not None
        # Steps take 2 ms besides.
        covered += found.low <= found.before * (12 / (10 * ratio + 2) - 1) <= found.high
        # The delta method: the variance of a logarithm of means.
        times = [np.array(each["windows"]["timed_seconds"]) for each in runs]
        variance = sum(each.var(ddof=1) / each.mean() ** 2 / len(each) for each in times)
        wider.append((found.high - found.low) / found.after / (2 * 1.96 * variance**0.5))
    assert 0.88 <= covered / 200 <= 0.98
    assert 0.8 <= np.median(wider) <= 1.1


def test_several_baselines_show_the_normal_spread() -> None:
    """A run as slow as the slowest baseline is not slower, though it is slower than the first."""
    normal = [stage(forward, seed=n) for n, forward in enumerate((0.010, 0.011, 0.012, 0.013))]
    slow = stage(0.013, seed=9)
    assert compared(slow, normal[0]).slower_than(0.05)
    found = compared(slow, *normal)
    assert found.slowdown.before == pytest.approx(0.0135, rel=0.02)
    assert found.slower_than(0.05) is False
    assert compared(stage(0.02, seed=9), *normal).slower_than(0.05)


def test_different_batch_sizes_are_compared_by_time_per_sample() -> None:
    """Twice the samples in 1.8 times the time are an improvement."""
    found = compared(stage(0.0196, batch_size=16, seed=1), stage())
    assert (found.slowdown.name, found.slower_than(0.0)) == ("sample", False)
    assert found.slowdown.certain
    assert any("batch sizes differ" in note for note in found.notes)


def test_runs_without_windows_are_refused() -> None:
    """The message names a run without windows, the run or any baseline, and what to do."""
    old = stage()
    del old["windows"]
    expected = "has no windows .*: train longer, or lower log_every_n_steps"
    with pytest.raises(Incomparable, match=f"old 1 {expected}"):
        compared(stage(), stage(seed=1), old)
    with pytest.raises(Incomparable, match=f"now {expected}"):
        compared(old, stage())


def test_too_few_windows_have_no_interval() -> None:
    """The note gives their number and what to do."""
    found = compared(stage(windows=4), stage())
    assert found.slower_than(0.05) is None
    assert found.notes == [
        "now has 4 windows after the warm-up, and an interval needs 5: train longer, or lower "
        "log_every_n_steps"
    ]


def test_runs_without_timings_are_compared_by_their_throughput() -> None:
    """With SpeedMonitor only, the step and rates are compared, without phases."""
    now, before = stage(0.02), stage()
    for each in (now, before):
        del each["windows"]["timings"], each["windows"]["culprits"]
    found = compared(now, before)
    assert {each.kind for each in found.changes} == {"step", "rate"}
    assert found.slower_than(0.05)


@pytest.mark.parametrize(
    "windows",
    [
        {"batches": "x"}, {"batches": [1, 2], "timings": {"forward": [1.0]}}, [1],
        {"batches": [1], "timings": 3}, {"timings": {"forward": [1.0]}},
        {"batches": [10] * 6, "timings": {"forward": [float("nan")] * 6}},
    ],
)  # fmt: skip
def test_damaged_windows_give_a_one_line_error(windows: Any) -> None:
    """The message names the run."""
    with pytest.raises(Incomparable, match="the windows of now are damaged"):
        compared(stage(windows=6) | {"windows": windows}, stage())


@pytest.mark.parametrize("whole", ["x", {"throughput": 5}])
def test_a_damaged_whole_run_gives_a_one_line_error(whole: Any) -> None:
    """The rates of the whole run are read, and the message names the damaged one."""
    with pytest.raises(Incomparable, match="the windows of now are damaged"):
        compared(stage() | {"whole_run": whole}, stage())


def test_runs_without_a_number_of_batches_are_compared_per_batch() -> None:
    """A damaged run's rate and timed batches do not give its batch size."""
    now = stage()
    del now["whole_run"]["throughput"]["batches_per_sec"]
    now["windows"]["timed_batches"] = [0] * 20
    assert compared(now, stage()).slowdown.name == "batch"


def test_runs_without_common_figures_are_reported() -> None:
    """A run without measured times cannot be compared."""
    with pytest.raises(Incomparable, match="no time per batch in common"):
        compared({"windows": {"batches": [10] * 6}}, stage())


def test_runs_with_and_without_timings_are_compared_by_one_quantity() -> None:
    """Validation, which only timings contain, does not make a run slower than one without them."""
    timed = {"batches": [10] * 6, "timed_batches": [10] * 6, "timed_seconds": [1.0] * 6}
    bare = Measured("bare", {"windows": timed})
    both = {"forward": [1.0] * 6, "validation": [3.0] * 6}
    full = Measured("full", {"windows": {**timed, "timings": both}})
    for run, baseline in ((full, bare), (bare, full)):
        found = compare(run, [baseline])
        assert found.slowdown.before == found.slowdown.after == 0.1
        assert found.slower_than(0.05) is False
        assert "without validation" in found.notes[0]
    assert compare(full, [full]).slowdown.after == 0.4
