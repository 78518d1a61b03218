"""Throughput over a rolling window, and where the wall-clock time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak
from lightning_perf.throughput import SECONDS_PER_UNIT, RollingWindow, Work, elapsed, throughput
from lightning_perf.trainer.hooks import PerfCallback
from lightning_perf.trainer.meter import BatchWork

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

_REPORT = 1  # what the ranks' messages are told apart by
_UNKNOWN = BatchWork()


class SpeedMonitor(PerfCallback):
    """Logs throughput and utilization, with the keys of Composer's SpeedMonitor.

    ``throughput/{batches,samples,tokens,flops}_per_sec`` over all ranks, the same under
    ``throughput/device/`` for one device on average, ``throughput/device/mfu`` (a fraction), and
    ``time/{train,val,total}``. Other stages than training have theirs under the stage's name
    (``validate/throughput/...``). Samples and tokens are inferred from the batch, or counted by
    ``get_num_samples_in_batch`` and ``get_num_tokens_in_batch`` of the module or the datamodule.
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
        self.get_num_samples_in_batch = get_num_samples_in_batch
        self.get_num_tokens_in_batch = get_num_tokens_in_batch
        self.num_samples = num_samples
        #: What was reported last, by key.
        self.metrics: dict[str, float] = {}
        self._windows: dict[str, RollingWindow] = {}
        self._reported: set[str] = set()

    @override
    def prepare(self, driver: Driver) -> None:
        self._windows, self._reported = {}, set()
        driver.meter.require(self.gpu_flops_available, "gpu_flops_available")

    @override
    def after_batch(self, driver: Driver, batch: Any) -> None:
        stage = driver.stage
        window = self._windows.get(stage)
        if window is None:  # the first batch warms up
            window = self._windows[stage] = RollingWindow(self.window_size)
        elif not driver.slowed:
            work, last = driver.work or _UNKNOWN, driver.counters
            window.add(
                last.last_seconds,
                last.last_samples,
                last.last_tokens,
                work.total,
                work.ideal_seconds,
            )
        if driver.report_due:
            self._report(driver, window if window.full else None)

    @override
    def on_end(self, driver: Driver) -> None:
        stage = driver.stage
        window = self._windows.get(stage)
        if stage == "train" and stage in self._reported:
            return
        if window is not None and len(window):
            self._report(driver, window)

    def _report(self, driver: Driver, window: RollingWindow | None) -> None:
        stage, step = driver.stage, driver.step
        prefix = "" if stage == "train" else f"{stage}/"
        times = {prefix + key: value for key, value in self._times(driver).items()}
        if window is None:
            self._publish(driver, times, step)
            return
        self._reported.add(stage)

        def publish(rows: list[list[float]]) -> None:
            rates = throughput([Work(*row) for row in rows])
            named = {prefix + key: value for key, value in rates.items()}
            self._publish(driver, named | times, step)

        driver.gather(_REPORT, astuple(window.work()), publish)

    def _publish(self, driver: Driver, metrics: dict[str, float], step: int) -> None:
        self.metrics = metrics
        driver.log(metrics, step)

    def _times(self, driver: Driver) -> dict[str, float]:
        spent = driver.counters.total_wct
        if driver.stage == "train":
            return elapsed(spent, driver.progress.validation_seconds, self.time_unit)
        return {"time/total": spent / SECONDS_PER_UNIT[self.time_unit]}
