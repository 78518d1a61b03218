"""Model FLOPs utilization: the FLOPs of the model as a share of what the hardware can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.core.window import Window, utilization
from lightning_perf.flops import check_formula, check_peak
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.schedule import Schedule
from lightning_perf.timing.cuda_events import clocked

if TYPE_CHECKING:
    from lightning_perf.run.run import Run


class Flops(WindowCallback):
    """Counts the FLOPs of the real batches and logs the utilization of the hardware.

    Keys:

    - ``mfu``, ``hfu``: model and hardware FLOPs utilization since the last report, as fractions of
      the peak. They include waiting for data and exclude validation, the first batch of a stage,
      and what counting adds to a batch;
    - ``mfu_causal``: as ``mfu``, with half of the square of a causal mask, as Megatron-LM counts;
    - ``mfu_at_clock``: as ``mfu``, of the peak at the mean SM clock that NVML sampled meanwhile;
    - ``batch_flops``: model FLOPs of one batch over all ranks: forward and backward, 2 per
      multiply-add, attention in full;
    - ``actual_batches_per_sec``, ``max_batches_per_sec``: measured, and what the peak would allow;
    - ``total_flops``: peak FLOP/s of all devices; ``tflops_per_device``: TFLOP/s that one reaches;
    - ``tracked_operations``, ``untracked_operations``: operator calls per batch;
    - with a formula, ``batch_flops_from_formula`` and ``mfu_from_formula``.

    Stages other than training report their own batches with their name in front
    (``validate/mfu``).

    FLOPs are the module's ``flops_per_batch`` if it has one. Otherwise each new shape of batch is
    counted once, at the first batch whatever the schedule says.

    Args:
        schedule: When to report; by default every 5 batches. ``"log_every_n_steps"``: whenever
            Lightning logs, as other callbacks do by default.
        peak_flops: FLOP/s of one device, ``"measure"`` to time a matrix product, or None to look
            the device up.
        formula: FLOPs to report beside the counted ones: a function of the batch that returns this
            rank's; the name of a formula (``"palm"``, ``"megatron"``, ``"nanogpt"``) for a
            transformer whose sizes are in the module's ``config``, ``cfg`` or ``hparams``; or a
            mapping with ``kind`` and ``config``.

    Raises:
        ConfigError: An argument is not valid; the message shows one that is.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Flops
        >>> trainer = L.Trainer(callbacks=[Flops(schedule="every 10ba")], logger=False)
    """

    monitored = True
    columns: tuple[str, ...] = ("flops/*",)

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        peak_flops: float | str | None = None,
        formula: Callable[[Any], float] | str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__("every 5ba" if schedule is None else schedule)
        check_peak(peak_flops)
        if formula is not None:
            check_formula(formula)
        self.peak_flops = peak_flops
        self.formula = formula
        # Applies the formula to a batch.
        self._count: Callable[[Any], None] | None = None
        self._reported: set[str] = set()

    @override
    def prepare(self, context: Run) -> None:
        self._reported = set()
        context.require_flops(self.peak_flops, "peak_flops")
        self.columns = ("flops/*",)
        if self.formula is not None:
            self._count = context.offer_formula(self.formula)
            self.columns += ("formula/*",)
        if clocked(context.trainer.strategy.root_device):  # a GPU, whose clock may be sampled
            self.columns += ("system/*",)
        super().prepare(context)

    @override
    def overrides(self, method: str) -> bool:
        return super().overrides(method) and (method != "after_batch" or self._count is not None)

    @override
    def after_batch(self, context: Run, batch: Any) -> None:
        if self._count is not None:
            self._count(batch)

    @override
    def window_due(self, context: Run, at_end: bool) -> bool:
        due = super().window_due(context, at_end)
        scheduled = self.schedule is not None
        if scheduled and not at_end and not context.nested and context.counters.batches == 1:
            self.trigger.request()
            return True
        return due

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        if not window.least("flops/known_batches"):
            return None  # no FLOPs are known yet, or a GPU has not finished a batch
        if window.stage == "train" and window.at_end and "train" in self._reported:
            return None
        metrics = utilization(window)
        if "mfu" in metrics:
            self._reported.add(window.stage)
            holds_at = self._context and self._context.peak_clock()
            if holds_at and (clock := _sm_clock(window)) > 0:
                metrics["mfu_at_clock"] = metrics["mfu"] * holds_at / clock
        return metrics


def _sm_clock(window: Window) -> float:
    """The mean SM clock of all GPUs over a window, in hertz; not above 0 if it was not sampled."""
    clocks = [name for name in window.columns if name.endswith("/gpu_sm_clock")]
    seconds = sum(window.total(name.replace("gpu_sm_clock", "seconds")) for name in clocks)
    return sum(map(window.total, clocks)) / seconds if seconds else 0.0
