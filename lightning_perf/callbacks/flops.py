"""Model FLOPs utilization: the FLOPs of the model as a share of what the hardware can do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.core.window import Window, utilization
from lightning_perf.flops import check_formula, check_peak, formula_for
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.schedule import Every, Schedule, as_schedule

if TYPE_CHECKING:
    from lightning_perf.run.batches import BatchRecord, BatchTotals
    from lightning_perf.run.context import RunContext


class Flops(WindowCallback):
    """Counts the FLOPs of the real batches and logs the utilization of the hardware.

    Keys:

    - ``mfu``, ``hfu``: model and hardware FLOPs utilization since the last report, as fractions of
      the peak. They include waiting for data and exclude validation, the first batch of a stage,
      and batches that were slowed down by counting;
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
        schedule: When to report; by default every 5 batches.
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
    columns: Sequence[str] = ("flops/*",)
    units: Mapping[str, str] = {
        "mfu*": "fraction",
        "hfu": "fraction",
        "batch_flops*": "FLOPs",
        "total_flops": "FLOP/s",
        "tflops_per_device": "TFLOP/s",
        "*_batches_per_sec": "per second",
        "*tracked_operations": "calls per batch",
    }

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        peak_flops: float | str | None = None,
        formula: Callable[[Any], float] | str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(as_schedule(schedule, default=Every("5ba")))
        check_peak(peak_flops)
        if formula is not None:
            check_formula(formula)
        self.peak_flops = peak_flops
        self.formula = formula
        self._formula: FormulaSignal | None = None
        self._reported: set[str] = set()

    @override
    def prepare(self, context: RunContext) -> None:
        self._reported = set()
        context.meter.require(self.peak_flops, "peak_flops")
        if self.formula is not None:
            formula = formula_for(self.formula, context.module)
            signal = self._formula = FormulaSignal(formula, context.batches)
            context.batches.listeners.append(signal.fold)
            context.offer("formula", signal)
            self.columns = ("flops/*", "formula/*")
        super().prepare(context)

    @override
    def overrides(self, method: str) -> bool:
        return super().overrides(method) and (method != "after_batch" or self._formula is not None)

    @override
    def after_batch(self, context: RunContext, batch: Any) -> None:
        if self._formula is not None and context.stage == "train":
            self._formula.count(batch)

    @override
    def window_due(self, context: RunContext, at_end: bool) -> bool:
        due = super().window_due(context, at_end)
        if not at_end and not context.stages.nested and context.counters.batches == 1:
            self.trigger.request()
            return True
        return due

    @override
    def on_window(self, window: Window) -> Mapping[str, float] | None:
        if not window.least("flops/known_batches"):
            return None  # no FLOPs are known yet, or a GPU has not finished a batch
        if window.stage == "train" and window.at_end and "train" in self._reported:
            return None
        found = utilization(window)
        if self._formula is not None and window.total("formula/batch"):
            found["batch_flops_from_formula"] = window.total("formula/batch")
            rate = window.rate("formula/ideal_seconds", "flops/seconds") / window.world_size
            if rate > 0:
                found["mfu_from_formula"] = rate
        if "mfu" in found:
            self._reported.add(window.stage)
            if self._context is not None:
                self._context.meter.peaks.warn_if_above_peak(found["mfu"])
        return found


class FormulaSignal:
    """The signal of a formula's FLOPs, for the batches of training."""

    columns = ("formula/ideal_seconds", "formula/batch")
    gauges = frozenset({"formula/batch"})

    def __init__(self, formula: Callable[[Any], float], batches: BatchTotals) -> None:
        self._formula, self._batches = formula, batches
        # FLOPs of batches whose records are not yet folded.
        self._pending: deque[float] = deque()
        self._ideal_seconds, self._last = 0.0, 0.0

    def count(self, batch: Any) -> None:
        """Apply the formula to a batch."""
        flops = 0.0 if batch is None else float(self._formula(batch))  # None: Lightning skipped it
        self._pending.append(flops / self._batches.sharing)

    def fold(self, stage: str, records: Sequence[BatchRecord]) -> None:
        """Add batches whose time is known by now."""
        if stage != "train":
            return
        for record in records:
            flops, cost = self._pending.popleft() if self._pending else 0.0, record.cost
            if cost is None:
                continue
            self._last = flops
            if flops and cost.total and record.timed:
                self._ideal_seconds += cost.ideal_seconds * flops / cost.total

    def totals(self, stage: str) -> Sequence[float]:
        """Seconds at the peak, and FLOPs of the last batch."""
        return (self._ideal_seconds, self._last) if stage == "train" else (0.0, 0.0)
