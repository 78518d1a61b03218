"""Rules about the course of step times: warm-up, pauses, stalls, slowdown, compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules.base import LEAST, Impact, judge
from lightning_perf.diagnosis.signals import COMPILE, COMPUTE, GC, Signals, Unknown
from lightning_perf.diagnosis.verdicts import Verdict
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.diagnosis.stats import Numbers


class Warmup:
    """The first step takes many times as long as the others, in a run that is short."""

    code, threshold, ratio, least = "warmup", 0.05, 10.0, 0.4

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The first batch against the median."""
        first, wall = signals.first_step, float(signals.wall.sum())
        if first is None or not len(signals.steps):
            raise Unknown("the time of the first step is not known")
        median = float(np.nanmedian(signals.steps))
        # The start of the data pipeline has a rule of its own.
        lost = first - median - float(signals.restarts.seconds[:1].sum())
        share = lost / wall if wall else 0.0
        # What the thread waited for a CPU meanwhile, more than usual, was not the warm-up's.
        usually = signals.counts[:1] * signals.per_batch(signals.waiting)
        certain = lost - float(np.maximum(signals.waiting[:1] - usually, 0.0).sum())
        if first < self.ratio * median or certain < max(self.threshold * wall, self.least):
            return
        usual = signals.start or 1
        phase = None
        if len(signals.windows) > usual:
            over = {
                name: signals.category(name)[0]
                - signals.counts[0] * signals.per_batch(signals.category(name))
                for name in CATEGORIES
            }
            phase = max(over, key=over.__getitem__)
        compiled = signals.total([row for row in signals.actions if row.stage == COMPILE])
        evidence = {
            "first_step_seconds": first,
            "median_step_seconds": median,
            "compile_seconds": float(compiled.seconds.sum()),
        }
        advice = (
            f"The first step takes {duration(first)}, the others {duration(median)}. Its share "
            "falls with the length of the run; to compare speeds, leave it out."
        )
        if evidence["compile_seconds"] > 0.5 * first:
            advice += " Most of it is compilation, which torch.compile's cache can save."
        severity = "critical" if share >= 0.2 else "warning"
        yield Verdict(self.code, severity, share, phase=phase, evidence=evidence, advice=advice)


class Recompile:
    """The module is compiled again and again."""

    code, threshold, fewest = "recompile", 0.05, 3

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in the compiler after the warm-up."""
        rows = [row for row in signals.actions if row.stage == COMPILE]
        if not rows:
            return
        seconds, calls = signals.total(rows)
        if signals.steady(calls).sum() < self.fewest:
            return
        times = float(signals.steady(calls).sum())
        evidence = {"compilations": times, "compile_seconds": float(seconds.sum())}
        advice = (
            "The module was compiled again as the shapes or values of its inputs changed. Pad "
            "batches to a few sizes, or use torch.compile(dynamic=True); TORCH_LOGS=recompiles "
            "prints each cause."
        )
        impact = Impact(
            seconds, times, "torch.compile", "forward", evidence=evidence, advice=advice
        )
        yield from judge(self.code, self.threshold, signals, impact)


class GcPauses:
    """Python's garbage collector stops training."""

    code, threshold = "gc-pauses", 0.03

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Time in collections, wherever they ran."""
        rows = [row for row in signals.actions if row.stage == GC]
        if not rows:
            return
        seconds, calls = signals.total(rows)
        most = max(rows, key=lambda row: signals.actions[row].seconds.sum())
        count = float(max(calls.sum(), 1.0))
        evidence: dict[str, float | str] = {
            "collections": count,
            "seconds_per_collection": float(seconds.sum() / count),
            "mostly_in": most.name,
        }
        advice = (
            f"Collections take {duration(signals.per_batch(seconds))} per batch, mostly during "
            f"{most.name}. Do not call gc.collect() there; keep fewer Python objects alive, call "
            "gc.freeze() after set-up, or raise gc.set_threshold()."
        )
        events = count if count < 0.5 * signals.batches else None
        impact = Impact(seconds, events, most.name, most.category, evidence=evidence, advice=advice)
        yield from judge(self.code, self.threshold, signals, impact)


class PeriodicStall:
    """Some batches take many times as long as the others, for a reason that has no name."""

    code, threshold, fewest, contiguous = "periodic-stall", 0.10, 3, 0.8

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """The excess over the median, without checkpoints and other named events."""
        found, excess = signals.stalls
        if len(found.positions) < self.fewest:
            return
        if np.mean(np.diff(found.positions) == 1) > self.contiguous:
            return  # a stretch of slow batches: not one now and then
        phase = signals.phase_of(excess)
        if phase in ("callbacks", "logging", "checkpoint"):
            return  # the rules on callbacks, loggers and checkpoints name it
        each = float(excess.sum() / len(found.positions))
        evidence: dict[str, float | str] = {
            "stalls": float(len(found.positions)),
            "seconds_per_stall": each,
            "period_batches": found.period if found.period is not None else "irregular",
        }
        often = f"every {found.period:.0f} batches" if found.period else "at irregular intervals"
        where = f", in {phase}" if phase else ""
        advice = (
            f"A batch takes {duration(each)} longer than usual {often}{where}. Look for work that "
            "is done at this interval; a trace of one such batch shows it "
            "(PyTorch(schedule=OnSlowBatch()))."
        )
        impact = Impact(
            excess, float(len(found.positions)), None, phase, evidence=evidence, advice=advice,
            on_host=False,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)


class Slowdown:
    """Steps take longer from some step on."""

    code, threshold, ratio, sustained = "slowdown", 0.10, 1.10, 50

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """A change point in step times, stalls left out, per token or sample if these grow."""
        steps = signals.within_epochs
        known = np.flatnonzero(np.isfinite(steps))
        if len(known) < 2 * self.sustained:
            raise Unknown(f"a slowdown needs {2 * self.sustained} steps")
        change = stats.change_point(steps[known], self.ratio, self.sustained)
        if change is None:
            return
        # Where steps became slower bit by bit, the first quarter is the level to return to.
        early = float(np.median(steps[known[: max(change.start // 4, stats.FEWEST_STEPS)]]))
        gradual = early * self.ratio**0.5 < change.before
        change = change._replace(before=min(early, change.before))
        at = int(known[change.start]) + signals.dropped
        ends = np.cumsum(signals.counts)
        window = int(np.searchsorted(ends, at, side="right"))
        if _more_work(signals, window, change.after / change.before):
            return
        slower = steps[known][0 if gradual else change.start :]
        lost = float(np.minimum(slower - change.before, change.after).sum())
        share = lost / float(signals.wall.sum() or 1.0)
        if share < self.threshold / 3 or change.after - change.before < LEAST:
            return
        waiting = _growth(signals, signals.waiting, window)
        if waiting > 0.5 * (change.after - change.before):
            return  # other programs took the CPU: cpu-saturated tells
        phase, culprit = _changed(signals, window)
        cpu = signals.average("system/cpu_util_simple")
        evidence: dict[str, float | str] = {
            "batch": float(at),
            "before_seconds": change.before,
            "after_seconds": change.after,
        }
        if cpu is not None:
            evidence["cpu_percent"] = cpu
        where = f" The time went to {culprit or phase}." if phase else ""
        advice = (
            f"From batch {at} on, a step takes {duration(change.after)} instead of "
            f"{duration(change.before)}.{where} Look for state that grows, for throttling, and "
            "for other programs on the machine."
        )
        severity = "info"
        if share >= self.threshold or change.after >= 2 * change.before:
            severity = "critical" if share >= 0.2 else "warning"
        yield Verdict(
            self.code, severity, share, culprit=culprit, phase=phase, evidence=evidence,
            advice=advice,
        )  # fmt: skip


def _more_work(signals: Signals, window: int, ratio: float) -> bool:
    """Whether batches hold more tokens or samples after a window, so that they take longer."""
    for name in ("batch/tokens", "batch/samples"):
        amounts, counts = signals.column(name), signals.column("batch/count")
        if amounts is None or counts is None:
            continue
        before, after = (
            amounts[part].sum() / max(counts[part].sum(), 1.0)
            for part in (slice(signals.start, window), slice(window, None))
        )
        if before and after / before >= 1 + 0.7 * (ratio - 1):
            return True
    return False


def _changed(signals: Signals, window: int) -> tuple[str | None, str | None]:
    """The category, and the named action in it, that grew most at a window."""
    over = {name: _growth(signals, signals.category(name), window) for name in CATEGORIES}
    phase = max(over, key=over.__getitem__)
    if over[phase] <= 0:
        return None, None
    rows = signals.rows(phase)
    named = {row.name: _growth(signals, signals.actions[row].seconds, window) for row in rows}
    culprit = max(named, key=named.__getitem__, default=None)
    if culprit is None or "." not in culprit or named[culprit] < 0.5 * over[phase]:
        culprit = None
    return phase, culprit


def _growth(signals: Signals, seconds: Numbers, window: int) -> float:
    """Seconds per batch after a window, less those before it."""
    counts = signals.counts
    for early, late in (
        (slice(signals.start, window), slice(window + 1, None)),
        (slice(0, window), slice(window, None)),
    ):
        if counts[early].sum() and counts[late].sum():
            before, after = (seconds[part].sum() / counts[part].sum() for part in (early, late))
            return float(after - before)
    return 0.0


class ComputeBound:
    """Nothing is in the way: the model's own work takes the time, below the hardware's peak."""

    code, threshold, low = "compute-bound", 0.8, 0.4

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Forward, backward and optimizer, where the MFU is known to be low and CPUs are free."""
        share = sum(signals.share(signals.category(name)) for name in COMPUTE)
        share -= signals.share(signals.waiting)
        if signals.mfu is None:
            raise Unknown("the MFU is not measured: add SpeedMonitor or Flops")
        if share < self.threshold or signals.mfu >= self.low:
            return
        setup = signals.setup
        tips = []
        if setup.device == "cuda" and setup.precision.startswith("32"):
            tips.append('precision="bf16-mixed"')
        if not setup.compiled:
            tips.append("torch.compile")
        tips.append("a larger batch size")
        evidence = {"compute_share": share, "mfu_share": signals.mfu}
        advice = (
            f"The model's own work takes {share:.0%} of the time, at {signals.mfu:.1%} of the "
            f"hardware's peak. Try {', '.join(tips)}."
        )
        phases = {name: signals.share(signals.category(name)) for name in COMPUTE}
        yield Verdict(
            self.code, "info", 0.0, phase=max(phases, key=phases.__getitem__), evidence=evidence,
            advice=advice,
        )  # fmt: skip
