"""Rules about changes of the step time: warm-up, pauses, stalls, slowdown, compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules import LEAST, Impact, Verdict, called, without_none
from lightning_perf.diagnosis.signals import (
    COMPILE,
    COMPUTE,
    GC,
    IN_BATCHES,
    RUNNING,
    SQUARES,
    Series,
    Signals,
    Unknown,
    least_work,
)
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_perf.diagnosis.stats import Numbers

#: Hooks that callbacks and modules run once before the first batch.
_BEFORE = (".on_train_start", ".on_train_epoch_start")
#: Categories below this share of a batch are too noisy to compare.
_PART = 0.05


def warmup(signals: Signals, share: float, seconds: float, ratio: float) -> Iterable[Impact]:
    """The first batch, with what callbacks do before it, takes ``ratio`` times the median.

    And more than this by a share of the run, and by some seconds.
    """
    first, wall = signals.first_step, float(signals.wall.sum())
    if first is None or not np.isfinite(signals.steps).any():
        raise Unknown("the first batch or the others were not timed")
    median = float(np.nanmedian(signals.steps))
    # Hooks that run before it are not part of it. What they take in each epoch is no warm-up.
    hooks = [row for row in signals.rows("callbacks", "other") if row.name.endswith(_BEFORE)]
    calls = {row: _first_call(signals.actions[row]) for row in hooks}
    before = sum(extra for _, extra in calls.values())
    hook = max(hooks, key=lambda row: calls[row][1], default=None)
    # The start of the data pipeline has a rule of its own.
    lost = before + first - median - float(signals.restarts.seconds[:1].sum())
    # Waiting for a CPU meanwhile, beyond the usual wait, is not part of the warm-up.
    usually = signals.counts[:1] * signals.per_batch(signals.waiting)
    certain = lost - float(np.maximum(signals.waiting[:1] - usually, 0.0).sum())
    if before + first < ratio * median or certain < max(share * wall, seconds):
        return
    over = dict.fromkeys(IN_BATCHES, 0.0)
    if len(signals.windows) > (signals.start or 1):
        batches, categories = signals.counts[0], {n: signals.category(n) for n in IN_BATCHES}
        over = {n: cost[0] - batches * signals.per_batch(cost) for n, cost in categories.items()}
    phase = max(over, key=over.__getitem__) if any(over.values()) else None
    compilations = [r for r in signals.actions if (r.stage, r.category) == (COMPILE, "forward")]
    compiling = float(signals.total(compilations).seconds[:1].sum())
    evidence = {
        "first_step_seconds": first, "median_step_seconds": median, "compile_seconds": compiling,
    }  # fmt: skip
    fades = "Its share falls with the length of the run; to compare speeds, leave it out."
    culprit = None
    if hook is not None and before > lost / 2:
        culprit, phase = hook.name, hook.category
        advice = f"{culprit} takes {duration(calls[hook][0])} before the first batch. {fades}"
    else:
        advice = f"The first batch takes {duration(first)}, the others {duration(median)}. {fades}"
    if compiling > 0.5 * first:
        advice += " Most of it is compilation, which torch.compile's cache can save."
    yield Impact(
        np.where(np.arange(len(signals.windows)) > 0, 0.0, lost), 1.0, culprit, phase, None,
        evidence, advice, whole_run=True, on_host=False, inferred=True, highest="warning",
        within={},
    )  # fmt: skip


def _first_call(hook: Series) -> tuple[float, float]:
    """Seconds of a hook's first call, and how many more they are than those of a usual one.

    Further calls in the first window take as long as later ones. Without these, all are usual.
    """
    seconds, calls = hook
    first = 0 if calls[0] > 1 and not calls[1:].any() else 1
    usual = float(seconds[first:].sum() / max(calls[first:].sum(), 1.0))
    extra = max(float(seconds[0] - usual * calls[0]), 0.0)
    return usual + extra, extra


def recompile(signals: Signals, fewest: float) -> Iterable[Impact]:
    """The module is compiled some times after the warm-up."""
    rows = [row for row in signals.actions if row.stage == COMPILE]
    seconds, calls = signals.total(rows)
    times = float(signals.steady(calls).sum())
    if times < fewest:
        return
    advice = (
        "The module was compiled again as the shapes or values of its inputs changed. Pad "
        "batches to a few sizes, or use torch.compile(dynamic=True); TORCH_LOGS=recompiles "
        "prints each cause."
    )
    yield Impact(
        seconds, times, "torch.compile", "forward", advice=advice,
        evidence={"compilations": times, "compile_seconds": float(seconds.sum())},
        within=signals.within(rows),
    )  # fmt: skip


def gc_pauses(signals: Signals, named: float) -> Iterable[Impact]:
    """Python's garbage collector pauses training, on any thread.

    What it interrupts for a share ``named`` of its time is the culprit.
    """
    rows = [row for row in signals.actions if row.stage == GC]
    most = signals.slowest(rows)
    if most is None:
        return
    # A profiler of ours collects, and makes more objects to collect.
    kept = ~signals.recorded
    seconds, calls = (kept * values for values in signals.total(rows))
    total, count = float(seconds.sum()), max(float(calls.sum()), 1.0)
    known = [row for row in signals.actions if row == SQUARES]
    squares = float((kept * signals.total(known).seconds).sum())
    if squares > 0:
        # So many of equal length: short ones beside a few long ones do not count.
        count = min(count, max(float(round(total**2 / squares)), 1.0))
    per_collection = total / count
    own = signals.steady(kept * signals.actions[most].seconds).sum()
    share = float(own / (signals.steady(seconds).sum() or 1.0))
    advice = (
        f"A collection takes {duration(per_collection)}; {share:.0%} of the time is during "
        f"{called(most.name)}. Do not call gc.collect() there; keep fewer Python objects alive, "
        "call gc.freeze() after set-up, or raise gc.set_threshold()."
    )
    events = count if count < 0.5 * signals.batches else None
    evidence: dict[str, float | str] = {
        "collections": count, "seconds_per_collection": per_collection, "mostly_in": most.name,
    }  # fmt: skip
    culprit, phase = (most.name, most.category) if share >= named else (None, None)
    yield Impact(
        seconds, events, culprit, phase, evidence=evidence, advice=advice,
        certain=1 - 1 / count,  # a single one may not come again
        within={name: kept * values for name, values in signals.within(rows).items()},
    )  # fmt: skip


def periodic_stall(signals: Signals, fewest: int, alike: float) -> Iterable[Impact]:
    """Some batches take many times as long as the others, and no named event explains it.

    They are further optimizer steps if the numbers of both differ by a share ``alike`` at most.
    """
    stalls, excess = signals.stalls
    count = len(stalls.positions)
    if count < fewest or signals.series is not None:
        return
    phase = signals.phase_of(excess)
    if phase in ("callbacks", "logging", "checkpoint"):
        return  # the rules on callbacks, loggers and checkpoints name it
    per_stall = float(excess.sum() / count)
    evidence = without_none(
        stalls=float(count), seconds_per_stall=per_stall, period_batches=stalls.period
    )
    if stalls.period is not None and (more := _further_steps(signals, count, alike)):
        advice = (
            f"Every {stalls.period:.0f} batches one has a further {more}, which takes "
            f"{duration(per_stall)}: this is the module's own work, in manual optimization."
        )
        yield Impact(
            excess, float(count), None, phase, evidence=evidence, advice=advice, on_host=False,
            highest="info",
        )  # fmt: skip
        return
    where = f", in {phase}" if phase else ""
    advice = f"A batch takes {duration(per_stall)} longer than usual"
    if stalls.period is None:
        advice += (
            f" at irregular intervals{where}. Look for other programs and slow storage; "
            "PyTorch(schedule=OnSlowBatch()) records the batches after a slow one."
        )
    else:
        period = f"{stalls.period:.0f}"
        advice += (
            f" every {period} batches{where}. Look for work that is done at this interval; "
            f'PyTorch(schedule="at 100ba for {period}ba") records one of them.'
        )
    yield Impact(excess, float(count), None, phase, evidence=evidence, advice=advice, on_host=False)


def _further_steps(signals: Signals, stalls: int, alike: float) -> str:
    """What manual optimization does in as many batches as there are stalls, beyond all others."""
    if signals.setup.automatic_optimization:
        return ""
    for category, step in (("optimizer_step", "optimizer step"), ("backward", "backward")):
        calls = float(signals.total(signals.rows(category)).calls.sum())
        if abs(calls % max(signals.batches, 1) - stalls) <= alike * stalls:
            return step
    return ""


def slowdown(signals: Signals, ratio: float, sustained: int, varies: float) -> Iterable[Impact]:
    """A change to longer batches, without stalls, unless they do more work from then on.

    Longer by a ratio, with a number of batches before and after. The speed of a CPU may vary up to
    the ratio ``varies`` without a warning.
    """
    steps = signals.within_epochs
    measured = np.flatnonzero(np.isfinite(steps))
    if len(measured) < 2 * sustained:
        batches = counted(len(measured), "measured batch")
        raise Unknown(f"{batches}, and a slowdown needs {2 * sustained}")
    change = stats.change_point(steps[measured], ratio, sustained)
    if change is None:
        return
    # If steps became slower gradually, the first quarter is the original level.
    early = float(np.median(steps[measured[: max(change.start // 4, stats.FEWEST_STEPS)]]))
    gradual = early * ratio**0.5 < change.before
    before, after = min(early, change.before), change.after
    at = int(measured[change.start]) + signals.dropped  # of this process
    window = int(np.searchsorted(np.cumsum(signals.counts), at, side="right"))
    if _more_work(signals, window, measured[change.start], before, after):
        return
    slower = measured[0 if gradual else change.start :]
    over = np.minimum(steps[slower] - before, after)
    lost = np.bincount(
        np.searchsorted(np.cumsum(signals.counts), slower + signals.dropped, side="right")
        .clip(0, len(signals.windows) - 1),
        weights=over, minlength=len(signals.windows),
    )  # fmt: skip
    if after - before < LEAST:
        return
    if _growth(signals, signals.waiting, window) > 0.5 * (after - before):
        return  # other programs took the CPU: `cpu-saturated` reports it
    grown = {name: _growth(signals, signals.category(name), window) for name in IN_BATCHES}
    slower_cpu = _is_slower_cpu(signals, grown, window)
    phase, culprit = (None, None) if slower_cpu else _changed(signals, grown, window)
    batch = signals.windows[0].first.batch + at  # a resumed run does not start at 0
    evidence = without_none(
        batch=float(batch), before_seconds=before, after_seconds=after,
        cpu_percent=signals.average("system/cpu_util_simple"),
    )  # fmt: skip
    where = f" The time went to {culprit or phase}." if phase else ""
    look = "Look for state that grows, for throttling, and for other programs on the machine."
    if slower_cpu:
        look = (
            "All its parts take longer alike, and need a CPU for longer: it is slower (its clock, "
            "heat, other programs or virtual machines), or the items are larger."
        )
    advice = (
        f"From batch {batch} on, a batch takes {duration(after)} instead of "
        f"{duration(before)}.{where} {look}"
    )
    grown = {name: max(seconds, 0.0) for name, seconds in grown.items()}
    total = sum(grown.values())
    yield Impact(
        np.maximum(lost, 0.0), 1.0, culprit, phase, None, evidence, advice, whole_run=True,
        on_host=False, inferred=True,
        within={n: part / total * np.maximum(lost, 0.0) for n, part in grown.items() if total},
        highest="info" if slower_cpu and after < varies * before else "critical",
    )  # fmt: skip


def _is_slower_cpu(signals: Signals, grown: Mapping[str, float], window: int) -> bool:
    """Whether all parts of a batch grew alike, while the thread ran or waited for a CPU."""
    usual = {name: signals.per_batch(signals.category(name)) for name in grown}
    total = sum(grown.values())
    parts = [name for name in grown if usual[name] >= _PART * sum(usual.values())]
    if RUNNING not in signals.actions:
        return False
    awake = signals.actions[RUNNING].seconds + signals.waiting
    return (
        _growth(signals, awake, window) >= 0.5 * total
        and len(parts) > 1
        and all(grown[n] / usual[n] >= 0.5 * total / sum(usual.values()) for n in parts)
    )


def _more_work(signals: Signals, window: int, at: int, before: float, after: float) -> bool:
    """Whether batches do more work after a window, and a position, so that they take longer.

    They have more FLOPs, tokens or samples, or more steps of optimizers.
    """
    more = least_work(after / before)
    steps = signals.total(signals.rows("optimizer_step"))
    each = float(steps.seconds.sum() / max(steps.calls.sum(), 1.0))
    if each * _growth(signals, steps.calls, window) >= (more - 1) * before:
        return True
    if signals.flops[at:].any():
        earlier, later = signals.flops[:at], signals.flops[at:]
        if np.isfinite(earlier).any() and np.isfinite(later).any():
            least = more * float(np.nanmedian(earlier))
            if 0 < least <= float(np.nanmedian(later)):
                return True
    for name in ("batch/tokens", "batch/samples"):
        amounts, counts = signals.column(name), signals.column("batch/count")
        if amounts is None or counts is None:
            continue
        early, late = (
            amounts[part].sum() / max(counts[part].sum(), 1.0)
            for part in (slice(signals.start, window), slice(window, None))
        )
        if early and late / early >= more:
            return True
    return False


def _changed(
    signals: Signals, grown: Mapping[str, float], window: int
) -> tuple[str | None, str | None]:
    """The category, and the named action in it, that grew most at a window."""
    phase = max(grown, key=grown.__getitem__)
    if grown[phase] <= 0:
        return None, None
    rows = signals.rows(phase)
    named = {row.name: _growth(signals, signals.actions[row].seconds, window) for row in rows}
    culprit = max(named, key=named.__getitem__, default="")
    is_most = "." in culprit and named[culprit] >= 0.5 * grown[phase]
    return phase, culprit if is_most else None


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


def compute_bound(signals: Signals, share: float, low_mfu: float) -> Iterable[Verdict]:
    """The model's own work takes a share of the time, at a low MFU, with free CPUs."""
    if signals.mfu is None:
        raise Unknown("the MFU needs SpeedMonitor or Flops, and FLOPs that can be counted")
    own = sum(signals.share(signals.category(name)) for name in COMPUTE)
    own -= signals.share(signals.waiting)
    if own < share or signals.mfu >= low_mfu:
        return
    setup, phase = signals.setup, max(COMPUTE, key=signals.typical)
    tips = ["fused=True in the optimizer"] if phase == "optimizer_step" else []
    if setup.device == "cuda" and setup.precision.startswith("32"):
        tips.append('precision="bf16-mixed"')
    if not setup.compiled:
        tips.append("torch.compile")
    tips.append("a larger batch size")
    advice = (
        f"The model's own work takes {own:.0%} of the time, {phase} most, at {signals.mfu:.1%} "
        f"of the hardware's peak. Try {' or '.join(tips)}. "
        'PyTorch(schedule="at 0.5dur for 3ba", with_stack=True) records which functions take it.'
    )
    yield Verdict(
        "compute-bound", "info", phase=phase, advice=advice,
        evidence={"compute_share": own, "mfu_share": signals.mfu},
    )  # fmt: skip
