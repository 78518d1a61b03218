"""Throughput over a rolling window, and where the wall-clock time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.checks import whole
from lightning_perf.core.metrics import SECONDS_PER_UNIT, RemainingTime, elapsed, throughput
from lightning_perf.core.window import Window
from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak
from lightning_perf.run.window_callback import WindowCallback

if TYPE_CHECKING:
    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.context import RunContext


class SpeedMonitor(WindowCallback):
    """Logs throughput and utilization, with the keys of Composer's SpeedMonitor.

    Keys:

    - ``throughput/{batches,samples,tokens,flops}_per_sec``: all ranks together;
    - ``throughput/device/...``: the same for one device on average, in training alone, and
      ``throughput/device/mfu``, a fraction of the peak;
    - ``time/{train,val,total}``: elapsed time;
    - ``time/remaining_estimate``: time until ``max_steps``, ``max_epochs`` or ``max_time``,
      whichever comes first, validation included once it was seen.

    Stages other than training put their name in front (``validate/throughput/...``). Validation
    inside of fit has no time of its own: ``time/val`` is its time.

    Samples and tokens are inferred from the batch, or counted by ``get_num_samples_in_batch`` and
    ``get_num_tokens_in_batch`` of the module or the datamodule. FLOPs are the module's
    ``flops_per_batch`` (of this rank: a number, or a callable that takes the batch); without it
    they are counted, so MFU needs no code.

    The window holds the last ``window_size`` batches. It includes waiting for data and excludes
    validation, the first batch of a stage, and batches that were slowed down by counting. It is
    reported every ``Trainer(log_every_n_steps)`` once it is full, and at the end of a stage that
    was too short to fill it.

    Args:
        window_size: Batches that the rolling averages cover.
        gpu_flops_available: Peak FLOP/s of one device; by default looked up or measured.
        time_unit: Unit of ``time/...``: ``seconds``, ``minutes``, ``hours`` or ``days``.
        get_num_samples_in_batch: Returns the samples of a batch, if neither the module nor the
            datamodule defines it.
        get_num_tokens_in_batch: The same for tokens.
        num_samples: Samples per epoch over all ranks, where the data has no length.

    Raises:
        ConfigError: An argument is not valid; the message shows one that is.

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
        self.window_size = whole("window_size", window_size, 1, "100")
        if not isinstance(time_unit, str) or time_unit not in SECONDS_PER_UNIT:
            problem = f"is not one of {', '.join(SECONDS_PER_UNIT)}"
            raise ConfigError("time_unit", time_unit, problem, "'hours'")
        if num_samples is not None:
            whole("num_samples", num_samples, 1, "1281167")
        counters = {
            "get_num_samples_in_batch": get_num_samples_in_batch,
            "get_num_tokens_in_batch": get_num_tokens_in_batch,
        }
        for name, counter in counters.items():
            if counter is not None and not callable(counter):
                raise ConfigError(name, counter, "is not a function of the batch", "my_counter")
        if gpu_flops_available is not None:
            check_peak(gpu_flops_available, "gpu_flops_available")
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        self.units = {
            "throughput/*_per_sec": "per second",
            "throughput/device/mfu": "fraction",
            "time/*": time_unit,
        }
        # Set only where given: a subclass may define them as methods.
        vars(self).update({name: each for name, each in counters.items() if each is not None})
        self.num_samples = num_samples
        self._reported: set[str] = set()
        self._remaining: RemainingTime | None = None

    @override
    def prepare(self, context: RunContext) -> None:
        self._reported, self._remaining = set(), None
        context.meter.require(self.gpu_flops_available, "gpu_flops_available")
        rolling = context.batches.rolling(self.window_size)
        self._prefix = f"rolling_{self.window_size}"
        context.windows.sources[self._prefix] = lambda: rolling
        self.columns = (
            f"{self._prefix}/*",
            "batch/count",
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
        elif self._remaining is not None and context.stages.nested:
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
        timed = window.since_start("batch/count") > 0
        full = timed and batches >= self.window_size
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
            nested = self._remaining is not None  # its time is `time/val` of training
            return {} if nested else {"time/total": spent / each}
        validation = window.own("progress/validation_seconds")
        found = elapsed(spent, validation, self.time_unit)
        if self._remaining is not None and not window.at_end:
            left = self._remaining.seconds(window.last, validation)
            if left is not None:
                found["time/remaining_estimate"] = left / each
        return found
