"""Throughput, utilization and the remaining time: arithmetic that knows no Trainer."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.core.progress import Limits, Timestamp
    from lightning_perf.core.window import Window

SECONDS_PER_UNIT = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
#: A batch that takes this many times as long as the mean of the earlier ones is a stall.
_STALL = 5.0
#: Tolerance: the mean interval between validations may be inexact.
_ALMOST = 1e-6


def throughput(window: Window, prefix: str = "") -> dict[str, float]:
    """Rates of all ranks together, and in training those of one device on average.

    All are per second, except MFU, which is a fraction of the peak. What some rank does not know is
    left out. The window holds the columns ``batch/...`` and ``flops/...`` of timed batches; the
    prefix is that of their names, such as ``"rolling_100/"``.
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
    if window.stage == "train":  # Composer's keys are those of training
        found |= {f"throughput/device/{key}": value / ranks for key, value in rates.items()}
    if window.least(f"{prefix}flops/ideal_seconds") > 0 and "flops_per_sec" in rates:
        found["throughput/device/mfu"] = window.rate(f"{prefix}flops/ideal_seconds", per) / ranks
    return found


def utilization(window: Window) -> dict[str, float]:
    """The metrics of ``Flops`` from the columns ``flops/...``; what is unknown is left out."""
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
    """Elapsed time in a unit, from seconds of training and of validation inside of fit."""
    each = SECONDS_PER_UNIT[unit]
    return {
        "time/train": train / each,
        "time/val": validation / each,
        "time/total": (train + validation) / each,
    }


class RemainingTime:
    """Estimates the remaining time of a training from the speed of this run.

    The estimate has three parts:

    - batches, at the mean duration of the last ``horizon``, so that it follows a slowdown;
    - stalls (start of an epoch, checkpoints), at their mean over the whole run, because recent
      batches contain either none or too many;
    - validations, at the frequency and mean duration so far. The first one, which includes its
      warm-up, counts only until there is a second.

    After a resume, the batches and validations before ``start`` do not affect the speed.
    """

    def __init__(
        self, limits: Limits, start: Timestamp, validations: int = 0, horizon: int = 100
    ) -> None:
        self._limits, self._start, self._horizon = limits, start, horizon
        self._batches, self._batch_seconds, self._stall_seconds = 0, 0.0, 0.0
        self._before = validations if start.batch else 0
        self._validations, self._validated_at = 0, 0
        #: Batches and validation seconds at the start of the measured validations.
        self._since = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Add the seconds of a batch, but not of the first one and those that we slowed down."""
        self._batches += 1
        if self._batches > 1 and seconds > _STALL * self._batch_seconds:
            self._stall_seconds += seconds - self._batch_seconds
        else:
            self._batch_seconds += (seconds - self._batch_seconds) / min(
                self._batches, self._horizon
            )

    def validation_begins(self, batch: int, validation_seconds: float) -> None:
        """Add a validation, with the training batches and seconds of validation before it."""
        if self._validations == 0:
            # A resumed run may not have seen a whole interval yet.
            self._since = batch - batch / (self._before + 1), validation_seconds
        elif self._validations == 1:
            self._since = self._validated_at, validation_seconds
        self._validations, self._validated_at = self._validations + 1, batch

    def seconds(self, now: Timestamp, validation_seconds: float = 0.0) -> float | None:
        """Return the remaining seconds, or None without a limit or batches.

        ``validation_seconds`` are those of all validations so far.
        """
        if not self._batches:
            return None
        left = inf
        if self._limits.max_seconds:  # Lightning's Timer counts validation too
            left = max(self._limits.max_seconds - now.total_wct - validation_seconds, 0.0)
        batches = self._batches_left(now)
        if batches < inf:
            validations, each = self._validations_left(now.batch + batches, validation_seconds)
            per_batch = self._batch_seconds + self._stall_seconds / self._batches
            left = min(left, batches * per_batch + validations * each)
        return left if left < inf else None

    def _batches_left(self, now: Timestamp) -> float:
        limits, left = self._limits, inf
        batches, steps = now.batch - self._start.batch, now.step - self._start.step
        if limits.max_steps and steps > 0:
            # Measured steps per batch: covers gradient accumulation and several optimizers.
            left = (limits.max_steps - now.step) * batches / steps
        if limits.max_epochs:
            each = self._batches_per_epoch(now)
            left = min(left, (limits.max_epochs - now.epoch) * each - now.batch_in_epoch)
        return max(left, 0.0)

    def _batches_per_epoch(self, now: Timestamp) -> float:
        limits, samples = self._limits, now.sample - self._start.sample
        if limits.batches_per_epoch:
            return limits.batches_per_epoch
        if limits.samples_per_epoch and samples:
            return limits.samples_per_epoch * (now.batch - self._start.batch) / samples
        return (now.batch - now.batch_in_epoch) / now.epoch if now.epoch else inf

    def _validations_left(self, last_batch: float, spent: float) -> tuple[float, float]:
        """Return the number of remaining validations and the seconds of each."""
        measured = max(self._validations - 1, 1)
        every = (self._validated_at - self._since[0]) / measured
        if not every:
            return 0, 0.0
        left = (last_batch - self._validated_at + _ALMOST) // every
        return left, (spent - self._since[1]) / measured
