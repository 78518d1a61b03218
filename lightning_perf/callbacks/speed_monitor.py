"""Throughput over a rolling window, and where the wall-clock time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.core.metrics import SECONDS_PER_UNIT, elapsed, throughput
from lightning_perf.core.remaining import RemainingTime
from lightning_perf.core.window import Window
from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak
from lightning_perf.run.window_callback import WindowCallback

if TYPE_CHECKING:
    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.context import RunContext


class SpeedMonitor(WindowCallback):
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
        self._reported: set[str] = set()
        self._remaining: RemainingTime | None = None

    @override
    def prepare(self, context: RunContext) -> None:
        self._reported, self._remaining = set(), None
        context.meter.require(self.gpu_flops_available, "gpu_flops_available")
        rolling = context.batches.rolling(self.window_size)
        self._prefix = f"rolling_{self.window_size}"
        context.windows.offer(self._prefix, lambda: rolling)
        self.columns = (
            f"{self._prefix}/*",
            "batch/seconds",
            "progress/total_seconds",
            "progress/validation_seconds",
        )
        context.batches.listeners.append(self._watch_pace)
        super().prepare(context)

    @override
    def on_start(self, context: RunContext) -> None:
        super().on_start(context)
        progress = context.progress
        if context.stage == "train":
            validations, start = progress.stages["validate"].epoch, context.timestamp
            self._remaining = RemainingTime(context.limits, start, validations, self.window_size)
        elif self._remaining is not None and context.nested:
            batch = progress.stages["train"].batch
            self._remaining.validation_begins(batch, progress.validation_seconds)

    def _watch_pace(self, stage: str, records: Sequence[BatchRecord]) -> None:
        if stage == "train" and self._remaining is not None:
            for seconds, _, _, _, slowed, first in records:
                if not (slowed or first):
                    self._remaining.add(seconds)

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        prefix, stage = f"{self._prefix}/", window.stage
        batches = window.least(f"{prefix}batch/count")
        full = batches >= self.window_size
        if window.at_end:
            if not batches or (stage == "train" and stage in self._reported):
                return None
            full = True
        found = self._times(window)
        if full:
            self._reported.add(stage)
            found |= throughput(window, prefix)
            if self._context is not None:
                self._context.meter.peaks.warn_if_above_peak(found.get("throughput/device/mfu", 0))
        return found

    def _times(self, window: Window) -> dict[str, float]:
        each, spent = SECONDS_PER_UNIT[self.time_unit], window.own("progress/total_seconds")
        if window.stage != "train":
            return {"time/total": spent / each}
        validation = window.own("progress/validation_seconds")
        found = elapsed(spent, validation, self.time_unit)
        if self._remaining is not None and not window.at_end:
            left = self._remaining.seconds(window.last, validation)
            if left is not None:
                found["time/remaining_estimate"] = left / each
        return found
