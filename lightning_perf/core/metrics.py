"""Throughput and utilization from windows: arithmetic that knows no Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.core.window import Window

SECONDS_PER_UNIT = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


def throughput(window: Window, prefix: str = "") -> dict[str, float]:
    """Rates of all ranks together, and of one device on average.

    Args:
        window: Holds the columns ``batch/...`` and ``flops/...`` of timed batches.
        prefix: What their names begin with, such as ``"rolling_100/"``.

    Returns:
        ``throughput/...`` and ``throughput/device/...`` by name, all per second; ``mfu`` is a
        fraction of the peak. What some rank does not know is left out.
    """
    ranks, per = window.world_size, f"{prefix}batch/seconds"
    # Every rank takes part in every batch, so batches are averaged where samples are summed.
    rates = {"batches_per_sec": window.rate(f"{prefix}batch/count", per) / ranks}
    for name, column, uncounted in (
        ("samples", "batch/samples", "batch/uncounted_samples"),
        ("tokens", "batch/tokens", "batch/uncounted_tokens"),
        ("flops", "flops/model", "flops/uncounted_batches"),
    ):
        # One batch that could not be counted would make the rate too low.
        if not window.total(prefix + uncounted):
            rate = window.rate(prefix + column, per)
            if rate > 0:
                rates[f"{name}_per_sec"] = rate
    found = {f"throughput/{key}": value for key, value in rates.items()}
    found |= {f"throughput/device/{key}": value / ranks for key, value in rates.items()}
    if window.least(f"{prefix}flops/ideal_seconds") > 0 and "flops_per_sec" in rates:
        found["throughput/device/mfu"] = window.rate(f"{prefix}flops/ideal_seconds", per) / ranks
    return found


def utilization(window: Window) -> dict[str, float]:
    """The metrics of ``Flops`` from the columns ``flops/...``; what is unknown is left out.

    Args:
        window: Holds the columns of all ranks; each has known FLOPs.
    """
    flops, peak = window.total("flops/batch"), window.total("flops/peak")
    found = {
        "batch_flops": flops,
        "tracked_operations": window.total("flops/tracked_operations"),
        "untracked_operations": window.total("flops/untracked_operations"),
    }
    if window.least("flops/peak") > 0:
        found |= {"total_flops": peak, "max_batches_per_sec": peak / flops}
    if window.least("flops/seconds") > 0:
        rates = {
            "actual_batches_per_sec": ("flops/batches", 1.0),
            "tflops_per_device": ("flops/model", 1e12),
            "mfu": ("flops/ideal_seconds", 1.0),
            "hfu": ("flops/hardware_ideal_seconds", 1.0),
        }
        for key, (column, unit) in rates.items():
            rate = window.rate(column, "flops/seconds") / window.world_size / unit
            if rate > 0:
                found[key] = rate
    return found


def elapsed(train: float, validation: float, unit: str) -> dict[str, float]:
    """Elapsed time by what it was spent on.

    Args:
        train: Seconds of training.
        validation: Seconds of validation inside of fit.
        unit: One of ``SECONDS_PER_UNIT``.

    Example:
        >>> elapsed(5400.0, 1800.0, "hours")
        {'time/train': 1.5, 'time/val': 0.5, 'time/total': 2.0}
    """
    each = SECONDS_PER_UNIT[unit]
    return {
        "time/train": train / each,
        "time/val": validation / each,
        "time/total": (train + validation) / each,
    }
