"""Throughput over a rolling window, elapsed time, and an estimate of the remaining time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.checks import whole
from lightning_perf.core.window import Window, throughput
from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak
from lightning_perf.run.window_callback import WindowCallback

if TYPE_CHECKING:
    from lightning_perf.core.progress import Timestamp
    from lightning_perf.run.run import Run

SECONDS_PER_UNIT = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


class SpeedMonitor(WindowCallback):
    """Logs throughput and utilization, with the keys of Composer's SpeedMonitor.

    Keys:

    - ``throughput/{batches,samples,tokens,flops}_per_sec``: all ranks together;
    - ``throughput/device/...``: the same for one device on average, in training alone, and
      ``throughput/device/mfu``, a fraction of the peak;
    - ``time/{train,val,total}``: elapsed time;
    - ``time/remaining_estimate``: time until ``max_steps``, ``max_epochs`` or ``max_time``,
      whichever comes first; validation and the time between epochs are included once seen.

    Stages other than training put their name in front (``validate/throughput/...``). Validation
    inside of fit has no time of its own: ``time/val`` is its time.

    Samples and tokens are inferred from the batch, or counted by ``get_num_samples_in_batch`` and
    ``get_num_tokens_in_batch`` of the module or the datamodule. FLOPs are the module's
    ``flops_per_batch`` (of this rank: a number, or a callable that takes the batch); without it
    they are counted, so MFU needs no code.

    The window holds the last ``window_size`` batches. It includes waiting for data and excludes
    validation, the first batch of a stage, and what counting adds to a batch. It is reported every
    ``Trainer(log_every_n_steps)`` once it is full, and at the end of a stage that was too short to
    fill it.

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

    monitored = True

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
        check_peak(gpu_flops_available, "gpu_flops_available")
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        # Set only where given: a subclass may define them as methods.
        vars(self).update({name: each for name, each in counters.items() if each is not None})
        self.num_samples = num_samples
        self._reported: set[str] = set()
        # Seconds of validation in the last report.
        self._validated = 0.0
        # Where the training began, and its batches before the last validation inside of it.
        self._start: Timestamp | None = None
        self._batches_per_step: int | None = None
        self._validated_at = 0
        # The batches before the ends of epochs, and the seconds until the next epochs.
        self._ends = deque[tuple[int, float]](maxlen=window_size)

    @override
    def prepare(self, context: Run) -> None:
        self._reported, self._start, self._batches_per_step = set(), None, None
        self._ends.clear()
        context.require_flops(self.gpu_flops_available, "gpu_flops_available")
        self._prefix = context.offer_rolling(self.window_size)
        self.columns = (
            f"{self._prefix}/*",
            "batch/count",
            "progress/total_seconds",
            "progress/validation_seconds",
        )
        super().prepare(context)

    @override
    def on_start(self, context: Run) -> None:
        super().on_start(context)
        progress = context.progress
        if context.stage == "train":
            self._start = progress.timestamp("train")
        if context.stage == "train" or context.nested:
            # A resumed training may have no validation any more.
            validates = context.trainer.enable_validation
            self._validated_at = progress.stages["train"].batch if validates else 0

    @override
    def on_epoch(self, context: Run) -> None:
        super().on_epoch(context)
        if context.counters.batches:
            self._ends.append((context.counters.batch, context.stages.since_batch))

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        prefix, stage = f"{self._prefix}/", window.stage
        batches = window.least(f"{prefix}batch/count")
        timed = window.since_start("batch/count") > 0
        context = self._context
        full = timed and batches >= self.window_size
        if timed and batches and not full:
            # A monitor must see a value, also in an epoch that is shorter than the window.
            full = context is not None and context.is_monitored
        if window.at_end:
            if stage == "train" and stage in self._reported:
                missing = window.own("progress/validation_seconds") > self._validated
                return self._times(window) if missing else None
            full = batches > 0
        metrics = self._times(window)
        if full:
            self._reported.add(stage)
            metrics |= throughput(window, prefix)
        return metrics

    def _times(self, window: Window) -> dict[str, float]:
        each, spent = SECONDS_PER_UNIT[self.time_unit], window.own("progress/total_seconds")
        if window.stage != "train":
            nested = self._start is not None  # its time is `time/val` of training
            return {} if nested else {"time/total": spent / each}
        before, validation = self._validated, window.own("progress/validation_seconds")
        self._validated = validation
        metrics = elapsed(spent, validation, self.time_unit)
        # At the end of training it is logged only if validation changes it.
        due = not window.at_end or validation > before
        if due and self._start is not None and self._context is not None:
            spent, timed = (window.own(f"{self._prefix}/batch/{n}") for n in ("seconds", "count"))
            limits, left = self._context.limits, inf  # those of the current epoch
            known, self._batches_per_step = self._batches_per_step, limits.batches_per_step
            if known not in (None, self._batches_per_step):
                self._start = window.last
            if window.since_start("batch/count") > 0:
                validated = self._validated_at, validation
                now = window.last
                ends = {at: seconds for at, seconds in self._ends if at < now.batch}
                within = sum(seconds for at, seconds in ends.items() if at >= now.batch - timed)
                pace = max(spent - within, 0.0) / timed
                between = sum(ends.values()) / max(len(ends), 1)
                left = limits.seconds_left(self._start, now, pace, validated, between)
            if left < inf:
                metrics["time/remaining_estimate"] = 0.0 if window.at_end else left / each
        return metrics


def elapsed(train: float, validation: float, unit: str) -> dict[str, float]:
    """Elapsed time in a unit, from seconds of training and of validation inside of fit."""
    each = SECONDS_PER_UNIT[unit]
    return {
        "time/train": train / each,
        "time/val": validation / each,
        "time/total": (train + validation) / each,
    }
