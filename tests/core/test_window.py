"""A window's arithmetic, by hand-computed numbers."""

from __future__ import annotations

import pytest
from helpers.windows import window_of

from lightning_perf.core.window import throughput, utilization


@pytest.mark.parametrize(
    ("values", "total", "mean", "least", "spread"),
    [
        ([4.0], 4.0, 4.0, 4.0, (4.0, 4.0, 4.0, 0)),
        ([1.0, 3.0], 4.0, 2.0, 1.0, (1.0, 2.0, 3.0, 1)),
        ([5.0, 1.0, 3.0], 9.0, 3.0, 1.0, (1.0, 3.0, 5.0, 0)),
    ],
)
def test_reductions_over_ranks(
    values: list[float], total: float, mean: float, least: float, spread: tuple[float, ...]
) -> None:
    """Sums, means, the least and the spread are those of the ranks' values."""
    window = window_of({"x": values})
    assert window.world_size == len(values)
    assert window["x"].tolist() == values
    assert (window.total("x"), window.mean("x"), window.least("x")) == (total, mean, least)
    assert window.spread("x") == spread
    assert window.worst_rank("x") == spread[3]


def test_rates_are_each_rank_s_own() -> None:
    """Each rank is divided by its own seconds; one without seconds adds nothing."""
    window = window_of({"batch/seconds": [2.0, 1.0, 0.0], "x": [64.0, 96.0, 7.0]})
    assert window.rate("x") == 128.0
    assert window_of({"batch/seconds": [0.0], "x": [7.0]}).rate("x") == 0.0
    pair = window_of({"batch/seconds": [2.0, 1.0], "x": [64.0, 96.0]})
    assert pair.spread("x", per="batch/seconds") == (32.0, 64.0, 96.0, 1)


def test_a_rank_reads_its_own_values() -> None:
    """``own`` and ``since_start`` are this rank's values, of the window and of the run."""
    window = window_of({"x": [1.0, 2.0]}, rank=1, totals=[[10.0], [20.0]])
    assert (window.own("x"), window.since_start("x")) == (2.0, 20.0)
    assert window.whole_run.total("x") == 30.0
    assert window.batches == 5


def test_an_unknown_column_is_named_with_the_nearest() -> None:
    """The error names the column that was probably meant."""
    with pytest.raises(KeyError, match=r"no column 'timings/forwrd'. Did you mean timings/forw"):
        window_of({"timings/forward": [1.0]}).total("timings/forwrd")


def timed(**changes: list[float]) -> dict[str, list[float]]:
    columns = {
        "batch/seconds": [2.0, 2.0], "batch/count": [10.0, 10.0], "batch/samples": [80.0, 40.0],
        "batch/tokens": [0.0, 0.0], "flops/model": [4e9, 2e9], "flops/ideal_seconds": [0.5, 0.25],
        "batch/uncounted_samples": [0.0, 0.0], "batch/uncounted_tokens": [0.0, 0.0],
        "flops/uncounted_batches": [0.0, 0.0], "flops/seconds": [2.0, 2.0],
        "flops/batches": [10.0, 10.0],
    }  # fmt: skip
    return columns | {name.replace("__", "/"): value for name, value in changes.items()}


def test_throughput_sums_samples_and_averages_batches() -> None:
    """Global samples per second are the sum of the ranks', batches are their mean."""
    found = throughput(window_of(timed()))
    assert found["throughput/samples_per_sec"] == 60
    assert found["throughput/batches_per_sec"] == 5
    assert found["throughput/device/samples_per_sec"] == 30
    assert found["throughput/device/flops_per_sec"] == 1.5e9
    assert found["throughput/device/mfu"] == (0.25 + 0.125) / 2
    assert "throughput/tokens_per_sec" not in found


@pytest.mark.parametrize("what", ["samples", "tokens"])
def test_a_batch_that_was_not_counted_leaves_its_rate_out(what: str) -> None:
    """One batch without a count on one rank would make the rate too low."""
    counts = {f"batch__{what}": [80.0, 40.0], f"batch__uncounted_{what}": [0.0, 1.0]}
    assert f"throughput/{what}_per_sec" not in throughput(window_of(timed(**counts)))


def test_mfu_is_that_of_the_batches_with_known_flops() -> None:
    """One batch with unknown FLOPs leaves out FLOP/s, and its time from MFU, as in ``Flops``."""
    columns = timed(flops__uncounted_batches=[1.0, 0.0], flops__seconds=[1.0, 2.0])
    found = throughput(window_of(columns))
    assert "throughput/flops_per_sec" not in found
    assert found["throughput/device/mfu"] == (0.5 + 0.125) / 2


@pytest.mark.parametrize(("unknown", "known"), [(54.0, True), (55.0, False)])
def test_a_few_batches_give_no_mfu(unknown: float, known: bool) -> None:
    """Less than a tenth of the batches, 3 per rank, are often the first ones: they are slow."""
    columns = timed(flops__batches=[3.0, 3.0], flops__uncounted_batches=[unknown, 0.0])
    assert ("throughput/device/mfu" in throughput(window_of(columns))) is known


def test_a_rank_without_a_peak_leaves_mfu_out() -> None:
    """The utilization of one rank alone would not be that of the run."""
    found = throughput(window_of(timed(flops__ideal_seconds=[0.5, 0.0])))
    assert "throughput/device/mfu" not in found
    assert "throughput/flops_per_sec" in found


def test_utilization_by_hand() -> None:
    """FLOPs and peaks add up over ranks; utilization is their mean."""
    columns = {
        "flops/tracked_operations": [5, 5],
        "flops/untracked_operations": [0, 1], "flops/seconds": [2.0, 1.0],
        "flops/batches": [4.0, 2.0], "flops/model": [12e9, 2e9], "flops/ideal_seconds": [1.0, 0.25],
        "flops/hardware_ideal_seconds": [1.5, 0.25], "flops/known_batches": [8.0, 2.0],
        "flops/causal_ideal_seconds": [0.5, 0.25],
        "flops/known": [24e9, 2e9], "flops/known_ideal_seconds": [2.0, 0.25],
    }  # fmt: skip
    found = utilization(window_of(columns | {"flops/uncounted_batches": [0.0, 55.0]}))
    assert not {"mfu", "hfu"} & found.keys()
    columns["flops/uncounted_batches"] = [0.0, 0.0]
    assert utilization(window_of(columns)) == {
        "batch_flops": 4e9,
        "tracked_operations": 10,
        "untracked_operations": 1,
        "total_flops": 12e9 + 8e9,
        "max_batches_per_sec": 5.0,
        "actual_batches_per_sec": 2.0,
        "tflops_per_device": (6e9 + 2e9) / 2 / 1e12,
        "mfu": (0.5 + 0.25) / 2,
        "hfu": (0.75 + 0.25) / 2,
        "mfu_causal": (0.25 + 0.25) / 2,
    }
