"""Model FLOPs utilization: the work that a model asks for against what the hardware can do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.core.reduce import Rows, min_over_ranks, sum_of_rates, sum_over_ranks
from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak, formula_for
from lightning_perf.run.callback import PerfCallback, Report
from lightning_perf.run.windows import ReportTrigger
from lightning_perf.schedule import Every, Schedule, as_schedule

if TYPE_CHECKING:
    from lightning_perf.run.callback import BatchRecord
    from lightning_perf.run.context import RunContext
    from lightning_perf.run.flop_meter import BatchCost


@dataclass(slots=True)
class _Tally:
    """One rank's batches since the last report, and the last of them alone."""

    seconds: float = 0.0
    batches: float = 0
    flops: float = 0
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0
    formula_ideal_seconds: float = 0.0
    batch_flops: float = 0
    peak: float = 0.0
    batch_formula_flops: float = 0
    tracked_operations: float = 0
    untracked_operations: float = 0

    def see(self, work: BatchCost, formula: float) -> None:
        """Take in a batch's work, whatever time it took."""
        self.batch_flops, self.peak = work.total, work.peak if work.ideal_seconds else 0.0
        self.batch_formula_flops = formula
        self.tracked_operations = work.tracked_operations
        self.untracked_operations = work.untracked_operations

    def add(self, seconds: float, work: BatchCost, formula: float) -> None:
        """Take in a batch whose time tells the utilization."""
        self.batches += 1
        self.seconds += seconds
        self.flops += work.total
        self.ideal_seconds += work.ideal_seconds
        self.hardware_ideal_seconds += work.hardware_ideal_seconds
        if formula and work.total:
            self.formula_ideal_seconds += work.ideal_seconds * formula / work.total


# dataclasses.astuple copies deeply, at forty times the cost.
_ALL = attrgetter(*(field.name for field in fields(_Tally)))


class Flops(PerfCallback):
    """Counts the FLOPs of the real batches and logs the utilization of the hardware.

    Keys: ``mfu`` and ``hfu`` (fractions of the peak, over the time since the last report, waiting
    for data included; counted, warm-up and validation batches left out), ``batch_flops`` (model
    FLOPs of one batch over all ranks, forward and backward, 2 a multiply-add, attention in full),
    ``actual_batches_per_sec``, ``max_batches_per_sec``, ``total_flops`` (peak FLOP/s of all
    devices), ``tflops_per_device``, ``tracked_operations`` and ``untracked_operations`` (operator
    calls a batch), and with a formula ``batch_flops_from_formula`` and ``mfu_from_formula``. Other
    stages than training have theirs, of their own batches, under the stage's name
    (``validate/mfu``).

    FLOPs come from the module's ``flops_per_batch`` if it has one, else from counting each new
    shape of batch once; that happens at the first batch whatever the schedule says.

    Args:
        schedule: When to report.
        peak_flops: FLOP/s of one device, ``"measure"`` to time a matrix product, or None to look
            the device up.
        formula: Set beside the counted FLOPs: a function of the batch that returns this rank's, the
            name of a formula (``"palm"``, ``"megatron"``, ``"nanogpt"``) for a transformer whose
            sizes the module's ``config`` or hyperparameters give, or a mapping with its ``kind``
            and its ``config``.

    Raises:
        ConfigError: A peak that is not positive, a schedule that is none.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Flops
        >>> trainer = L.Trainer(callbacks=[Flops(schedule="every 10ba")], logger=False)
    """

    reports = True

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        peak_flops: float | str | None = None,
        formula: Callable[[Any], float] | str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.schedule = as_schedule(schedule, default=Every("5ba"))
        if peak_flops is not None:
            check_peak(peak_flops, "peak_flops")
        if not (formula is None or callable(formula) or isinstance(formula, str | dict)):
            problem = "is neither a function of the batch nor the name of a formula"
            raise ConfigError("formula", formula, problem, "'palm'")
        self.peak_flops = peak_flops
        self.formula = formula
        self._formula: Callable[[Any], float] | None = None
        #: What was reported last, by key.
        self.metrics: dict[str, float] = {}
        self._tallies: dict[str, _Tally] = {}
        # The formula's FLOPs of batches that are not in a tally yet.
        self._by_formula: deque[float] = deque()
        self._timed: set[str] = set()
        self._trigger = ReportTrigger(self.schedule)

    @property
    @override
    def quiet_until(self) -> float:
        return self._trigger.quiet_until

    @override
    def prepare(self, context: RunContext) -> None:
        self._tallies, self._by_formula, self._timed = {}, deque(), set()
        if self.formula is not None:
            self._formula = formula_for(self.formula, context.module)
        self._trigger.setup(context)
        context.meter.require(self.peak_flops, "peak_flops")

    @override
    def close(self, context: RunContext, reason: str) -> None:
        self._trigger.close()

    @override
    def on_start(self, context: RunContext) -> None:
        self._tallies[context.stage] = _Tally()
        self._trigger.start(context)

    @override
    def overrides(self, verb: str) -> bool:
        return super().overrides(verb) and (verb != "after_batch" or self._formula is not None)

    @override
    def after_batch(self, context: RunContext, batch: Any) -> None:
        if self._formula is not None and context.stage == "train":
            self._by_formula.append(float(self._formula(batch)))

    @override
    def after_batches(self, context: RunContext, batches: Sequence[BatchRecord]) -> None:
        tally = self._tallies[context.stage]
        formulas = self._by_formula if context.stage == "train" else deque()
        for seconds, _, _, work, slowed, first in batches:
            formula = formulas.popleft() if formulas else 0.0
            if work is not None:
                tally.see(work, formula)
                if not (slowed or first):
                    tally.add(seconds, work, formula)

    @override
    def due(self, context: RunContext, at_end: bool) -> bool:
        if at_end or context.nested:
            return at_end
        return self._trigger.due(context) or context.first_batch

    @override
    def collect(self, context: RunContext, at_end: bool) -> Report | None:
        wanted = self._trigger.consume_request() or context.first_batch or at_end
        tally = self._tallies[context.stage]
        self._tallies[context.stage] = _Tally()
        if not tally.batch_flops:  # nothing is known, or a GPU has come to nothing since
            return None
        return Report(_ALL(tally), context.stage, context.step, at_end, {"wanted": wanted})

    @override
    def publish(self, context: RunContext, report: Report, rows: Rows) -> None:
        stage = report.stage
        done = stage == "train" and report.at_end and stage in self._timed
        if done or not report.own["wanted"]:
            return
        found = utilization(rows)
        if "mfu" in found:
            self._timed.add(stage)
        context.meter.peaks.warn_if_above_peak(found.get("mfu", 0.0))
        if found:
            prefix = "" if stage == "train" else f"{stage}/"
            self.metrics = {prefix + key: value for key, value in found.items()}
            context.log(self.metrics, report.step)


def utilization(ranks: Rows) -> dict[str, float]:
    """All of Flops' metrics from the fields of one tally a rank; what none knows is left out."""
    total, least = _Tally(*sum_over_ranks(ranks)), _Tally(*min_over_ranks(ranks))
    found = {
        "batch_flops": total.batch_flops,
        "tracked_operations": total.tracked_operations,
        "untracked_operations": total.untracked_operations,
    }
    if total.batch_formula_flops:
        found["batch_flops_from_formula"] = total.batch_formula_flops
    if least.peak > 0:
        found["total_flops"] = total.peak
        found["max_batches_per_sec"] = total.peak / total.batch_flops
    if least.seconds > 0:
        found |= _rates(_Tally(*sum_of_rates(ranks)), len(ranks))
    return found


def _rates(per_second: _Tally, ranks: int) -> dict[str, float]:
    found = {
        "actual_batches_per_sec": per_second.batches,
        "tflops_per_device": per_second.flops / 1e12,
        "mfu": per_second.ideal_seconds,
        "hfu": per_second.hardware_ideal_seconds,
        "mfu_from_formula": per_second.formula_ideal_seconds,
    }
    return {key: value / ranks for key, value in found.items() if value > 0}
