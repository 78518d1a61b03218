"""Throughput over a rolling window, and where the wall-clock time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.core.metrics import SECONDS_PER_UNIT, RollingWindow, Work, elapsed, throughput
from lightning_perf.core.reduce import Rows, min_over_ranks, sum_of_rates
from lightning_perf.core.remaining import RemainingTime
from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak
from lightning_perf.run.callback import PerfCallback, Report

if TYPE_CHECKING:
    from lightning_perf.run.callback import BatchRecord
    from lightning_perf.run.context import RunContext


class SpeedMonitor(PerfCallback):
    """Logs throughput and utilization, with the keys of Composer's SpeedMonitor.

    ``throughput/{batches,samples,tokens,flops}_per_sec`` over all ranks, the same under
    ``throughput/device/`` for one device on average, ``throughput/device/mfu`` (a fraction), and
    ``time/{train,val,total}``. Other stages than training have theirs under the stage's name
    (``validate/throughput/...``). ``time/remaining_estimate`` tells, from the second batch on, how
    long training will go on until the first of its limits (``max_steps``, ``max_epochs``,
    ``max_time``), validation included once it was seen. Samples and tokens are inferred from the
    batch, or counted by ``get_num_samples_in_batch`` and ``get_num_tokens_in_batch`` of the module
    or the datamodule.
    FLOPs are the module's ``flops_per_batch`` (this rank's, a number or a callable that takes the
    batch), or else counted; no code is needed for MFU.

    A window holds the most recent batches, waiting for data included, validation left out; the
    first batch of a stage and batches slowed down by being counted are left out too. It is
    reported every ``Trainer(log_every_n_steps)`` once it is full, and at the end of a stage that
    was too short to fill it.

    Args:
        window_size: Batches that the rolling averages cover.
        gpu_flops_available: Peak FLOP/s of one device; by default found out.
        time_unit: Of ``time/...``: ``seconds``, ``minutes``, ``hours`` or ``days``.
        get_num_samples_in_batch: Counts the samples of a batch, where neither the module nor the
            datamodule does.
        get_num_tokens_in_batch: The same for tokens.
        num_samples: Samples of an epoch over all ranks, where the data has no length.

    Raises:
        ConfigError: A size below one, an unknown unit, a peak that is not positive.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import SpeedMonitor
        >>> trainer = L.Trainer(callbacks=[SpeedMonitor(window_size=10)], logger=False)
    """

    reports = True

    def __init__(
        self,
        window_size: int = 100,
        gpu_flops_available: float | None = None,
        time_unit: str = "hours",
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
            problem = "is not a number of batches"
            raise ConfigError("window_size", window_size, problem, "100")
        if time_unit not in SECONDS_PER_UNIT:
            problem = f"is none of {', '.join(SECONDS_PER_UNIT)}"
            raise ConfigError("time_unit", time_unit, problem, "'hours'")
        if num_samples is not None and num_samples < 1:
            problem = "is no number of samples"
            raise ConfigError("num_samples", num_samples, problem, "1281167")
        if gpu_flops_available is not None:
            check_peak(gpu_flops_available, "gpu_flops_available")
        self.window_size = window_size
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        # Set only where given: a subclass may define them as methods.
        if get_num_samples_in_batch is not None:
            self.get_num_samples_in_batch = get_num_samples_in_batch
        if get_num_tokens_in_batch is not None:
            self.get_num_tokens_in_batch = get_num_tokens_in_batch
        self.num_samples = num_samples
        #: What was reported last, by key.
        self.metrics: dict[str, float] = {}
        self._windows: dict[str, RollingWindow] = {}
        self._told: set[str] = set()
        self._remaining: RemainingTime | None = None

    @override
    def prepare(self, context: RunContext) -> None:
        self._windows, self._told = {}, set()
        context.meter.require(self.gpu_flops_available, "gpu_flops_available")

    @override
    def on_start(self, context: RunContext) -> None:
        progress = context.progress
        if context.stage == "train":
            validations, start = progress.stages["validate"].epoch, context.timestamp
            self._remaining = RemainingTime(context.limits, start, validations, self.window_size)
        elif self._remaining is not None and context.nested:
            batch = progress.stages["train"].batch
            self._remaining.validation_begins(batch, progress.validation_seconds)

    @override
    def after_batches(self, context: RunContext, batches: Sequence[BatchRecord]) -> None:
        window = self._windows.get(context.stage)
        if window is None:
            window = self._windows[context.stage] = RollingWindow(self.window_size)
        remaining = self._remaining if context.stage == "train" else None
        for seconds, samples, tokens, work, slowed, first in batches:
            if slowed or first:
                continue
            flops, ideal = (None, 0.0) if work is None else (work.total, work.ideal_seconds)
            window.add(seconds, samples, tokens, flops, ideal)
            if remaining is not None:
                remaining.add(seconds)

    @override
    def due(self, context: RunContext, at_end: bool) -> bool:
        return at_end or context.report_due

    @override
    def collect(self, context: RunContext, at_end: bool) -> Report:
        window = self._windows.get(context.stage)
        work = window.work() if window is not None else Work()
        return Report(work, context.stage, context.step, at_end, self._times(context, at_end))

    @override
    def publish(self, context: RunContext, report: Report, rows: Rows) -> None:
        stage = report.stage
        found = dict(report.own)
        least = Work(*min_over_ranks(rows))
        if self._worth_telling(report, least):
            self._told.add(stage)
            found |= throughput(Work(*sum_of_rates(rows)), least, len(rows))
            context.meter.peaks.warn_if_above_peak(found.get("throughput/device/mfu", 0.0))
        elif report.at_end:
            return
        prefix = "" if stage == "train" else f"{stage}/"
        self.metrics = {prefix + key: value for key, value in found.items()}
        context.log(self.metrics, report.step)

    def _worth_telling(self, report: Report, least: Work) -> bool:
        """Whether the windows are full on all ranks, or will not be any more."""
        if report.at_end:
            done = report.stage == "train" and "train" in self._told
            return not done and least.batches > 0
        return least.batches >= self.window_size

    def _times(self, context: RunContext, at_end: bool) -> dict[str, float]:
        each, spent = SECONDS_PER_UNIT[self.time_unit], context.counters.total_wct
        if context.stage != "train":
            return {"time/total": spent / each}
        validation = context.progress.validation_seconds
        times = elapsed(spent, validation, self.time_unit)
        left = None
        if self._remaining is not None and not at_end:
            left = self._remaining.seconds(context.timestamp, validation)
        return times if left is None else times | {"time/remaining_estimate": left / each}
