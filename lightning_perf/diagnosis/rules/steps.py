"""Rules about changes of the step time: warm-up, pauses, stalls, slowdown, compilation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules import LEAST, Impact, Verdict, called, stretch_of, without_none
from lightning_perf.diagnosis.rules.ranks import waited_for
from lightning_perf.diagnosis.signals import (
    BEFORE,
    COMPILE,
    COMPUTE,
    GC,
    IN_BATCHES,
    RUNNING,
    SQUARES,
    Series,
    Signals,
    Stalled,
    Unknown,
    least_work,
)
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from lightning_perf.diagnosis.rules.lateness import Lateness
    from lightning_perf.diagnosis.stats import Numbers

#: A few stalls count from these mean seconds on; how certain it is that they come again.
_LONG, _AGAIN = 1.0, 0.05
#: Advice on what is over.
_FADES = "Its share falls with the length of the run; to compare speeds, leave it out."
#: Categories below this share of a batch are too noisy to compare.
_PART = 0.05
#: Blocks of batches in which slow stretches are searched; the blocks and slow batches of one, the
#: number of those that recur, and the part of their batches that is slow.
_BLOCKS, _FEWEST, _STRETCH, _RECUR, _MOSTLY = 200, 2, 12, 3, 0.7


def warmup(signals: Signals, share: float, seconds: float, ratio: float) -> Iterable[Impact]:
    """The first batches, with what runs before them, take long; so does a first event.

    They take more than usual batches by ``ratio - 1`` times the median, by a share of the run, and
    by some seconds. Events are validations and checkpoints.
    """
    first, wall = signals.first_step, float(signals.wall.sum())
    if first is None or not np.isfinite(signals.steps).any():
        raise Unknown("the first batch or the others were not timed")
    least = max(share * wall, seconds)
    yield from _first_events(signals, least)
    if not signals.start:
        return
    # Without what comes again: usual batches, hooks that run in each epoch, and its start.
    median = float(np.nanmedian(signals.steps))
    parts = [name for name in IN_BATCHES if name not in COMPUTE]
    calls = {row: _first_call(signals.actions[row]) for row in signals.rows(*parts)}
    hooks = [row for row in calls if "." in row.name]
    hook = max(hooks, key=lambda row: calls[row][1], default=None)
    took = float(sum(signals.spent[name][0] for name in IN_BATCHES))
    again = sum(
        float(signals.actions[row].seconds[0]) - calls[row][1]
        for row in hooks
        if row.name.endswith(BEFORE)
    )
    lost = took - float(signals.counts[0]) * median - again - float(signals.restarts.seconds[0])
    # Waiting for a CPU meanwhile, beyond the usual wait, is not part of the warm-up.
    usually = signals.counts[0] * signals.per_batch(signals.waiting)
    certain = lost - max(float(signals.waiting[0]) - usually, 0.0)
    if lost < (ratio - 1) * median or certain < least:
        return
    costs = {name: signals.category(name) for name in IN_BATCHES}
    over = {n: cost[0] - signals.counts[0] * signals.per_batch(cost) for n, cost in costs.items()}
    phase: str | None = max(over, key=over.__getitem__)
    compilations = [r for r in signals.actions if (r.stage, r.category) == (COMPILE, "forward")]
    compiling = float(signals.total(compilations).seconds[0])
    evidence = {
        "first_step_seconds": first, "median_step_seconds": median, "compile_seconds": compiling,
    }  # fmt: skip
    culprit = None
    if hook is not None and calls[hook][1] > lost / 2:
        culprit, phase = hook.name, hook.category
        when = "before" if culprit.endswith(BEFORE) else "in"
        advice = f"{culprit} takes {duration(calls[hook][0])} {when} the first batch. {_FADES}"
    else:
        takes = f"The first batch takes {duration(first)}"
        if first - median < lost / 2:
            takes = f"The first two batches, with what runs before them, take {duration(took)}"
        advice = f"{takes}, the others {duration(median)}. {_FADES}"
    if compiling > 0.5 * lost:
        advice += " Most of it is compilation, which torch.compile's cache can save."
    yield Impact(
        np.where(np.arange(len(signals.windows)) > 0, 0.0, lost), 1.0, culprit, phase, None,
        evidence, advice, whole_run=True, on_host=False, inferred=True, highest="warning",
        within={},
    )  # fmt: skip


def _first_events(signals: Signals, least: float) -> Iterable[Impact]:
    """What the first validation and the first checkpoint take beyond later ones."""
    for name in ("validation", "checkpoint"):
        found = signals.events[name].set_up
        if found is not None and found.extra.sum() >= least:
            advice = (
                f"The first {name} takes {duration(found.first)}, the others "
                f"{duration(found.usual)}. {_FADES}"
            )
            yield Impact(
                found.extra, 1.0, phase=name, advice=advice, whole_run=True, highest="warning",
                inferred=True,
            )  # fmt: skip


def _first_call(hook: Series) -> tuple[float, float]:
    """Seconds of a hook in the first window, and how many more they are than those of usual calls.

    Without later calls, several in the first window are usual.
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
        seconds, times, "torch.compile", "forward", advice=advice, number=times,
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
        number=count if culprit else None, certain=1 - 1 / count,  # a single one may not come again
        within={name: kept * values for name, values in signals.within(rows).items()},
    )  # fmt: skip


def periodic_stall(signals: Signals, fewest: int, alike: float) -> Iterable[Impact]:
    """Some batches take many times as long as others in a category, and no named event explains it.

    Fewer than ``fewest`` count if each takes seconds, and may not come again. They are further
    optimizer steps if the numbers of both differ by a share ``alike`` at most.
    """
    for each in signals.stalls:
        count = len(each.stalls.positions)
        if count >= fewest and signals.series_of(each) is None:
            yield _stall(signals, each, alike)
        elif 0 < count < fewest and each.excess.sum() >= count * _LONG:
            yield replace(_stall(signals, each, alike), certain=_AGAIN)
    yield from _last_batch(signals)


def _last_batch(signals: Signals) -> Iterable[Impact]:
    """The batch that an exception or Ctrl-C ended, or the fetch after the last batch."""
    for phase in ("dataloader_next", "to_device", *COMPUTE):
        if (took := signals.after_last(phase)) >= _LONG:
            seconds = signals.nothing
            seconds[-1] = took
            advice = (
                f"After the last batch that ended, {phase} took {duration(took)}. Look there for "
                "what held up the run."
            )
            yield Impact(seconds, 1.0, phase=phase, advice=advice, certain=_AGAIN)


def _stall(signals: Signals, stalled: Stalled, alike: float) -> Impact:
    """The impact of stalls in one category."""
    phase, stalls, excess = stalled
    count = len(stalls.positions)
    per_stall = float(excess.sum() / count)
    evidence = without_none(
        stalls=float(count), seconds_per_stall=per_stall, period_batches=stalls.period
    )
    if stalls.period is not None and (more := _further_steps(signals, count, alike)):
        advice = (
            f"Every {stalls.period:.0f} batches one has a further {more}, which takes "
            f"{duration(per_stall)}: this is the module's own work, in manual optimization."
        )
        return Impact(
            excess, float(count), None, phase or None, evidence=evidence, advice=advice,
            on_host=False, highest="info",
        )  # fmt: skip
    where = f", in {phase}" if phase else ""
    period, look = f"{stalls.period or 0:.0f}", "Look for work that is done at this interval"
    shown = f'PyTorch(schedule="at 100ba for {period}ba") records one of them.'
    often = f"every {period} batches"
    if stalls.period is None:
        often = {1: "once", 2: "twice"}.get(count, "at irregular intervals")
        look = "Look for other programs and slow storage"
        shown = "PyTorch(schedule=OnSlowBatch()) records the batches after a slow one."
    advice = (
        f"A batch takes {duration(per_stall)} longer than usual {often}{where}. {look}; {shown}"
    )
    if phase == "dataloader_next":
        advice += " DataLoader workers with a higher prefetch_factor load such batches ahead."
    return Impact(
        excess, float(count), None, phase or None, evidence=evidence, advice=advice, on_host=False
    )


def _further_steps(signals: Signals, stalls: int, alike: float) -> str:
    """What manual optimization does in as many batches as there are stalls, beyond all others."""
    if signals.setup.automatic_optimization:
        return ""
    for category, step in (("optimizer_step", "optimizer step"), ("backward", "backward")):
        calls = float(signals.total(signals.rows(category)).calls.sum())
        if abs(calls % max(signals.batches, 1) - stalls) <= alike * stalls:
            return step
    return ""


def slowdown(
    signals: Signals, ratio: float, sustained: int, varies: float, named: float, late: Lateness
) -> Iterable[Impact]:
    """A change to longer batches, without stalls, unless they do more work.

    Longer by a ratio, with a number of batches before and after; or by the ratio ``varies``, up to
    which the speed of a CPU may vary without a warning, in some stretches. It is critical only if
    it is not over, and has the number of batches. There is no warning if other programs use a
    share ``named`` of the CPUs more in the stretches. What ranks wait for ``late`` ones does not
    count.
    """
    steps = signals.after_loading
    measured = np.flatnonzero(np.isfinite(steps))
    if len(measured) < 2 * sustained:
        batches = counted(len(measured), "measured batch")
        raise Unknown(f"{batches}, and a slowdown needs {2 * sustained}")
    change = _change(steps[measured], ratio, sustained, varies)
    if change is None:
        return
    before, after, stretches = change.before, change.after, change.stretches
    continues = len(stretches) == 1 and not change.over
    at, size = measured + signals.dropped, len(signals.windows)  # of this process
    windows = signals.windows_of(measured)
    excess = np.minimum(steps[measured] - before, after)
    lost = np.maximum(np.bincount(windows, change.counted * excess, size), 0.0)
    # Which batches are slow, and the part of each window.
    slow = np.isin(np.arange(len(steps)), measured[np.concatenate(stretches)])
    usual = np.isin(np.arange(len(steps)), measured[change.usual])
    each = np.maximum(np.bincount(windows, minlength=size), 1)
    part: Numbers = np.bincount(windows, slow[measured], size) / each
    if after - before < LEAST or _more_work(signals, part, usual, slow, before, after):
        return
    # What other programs and late ranks take is reported by `cpu-saturated` and `straggler`.
    others = (signals.waiting, waited_for(signals, late)[1])
    taken, waited = (_growth(signals, each, part) / (after - before) for each in others)
    if max(taken, waited) > 0.5:
        return
    lost *= 1 - max(waited, 0.0)
    grown = {name: _growth(signals, signals.category(name), part) for name in IN_BATCHES}
    if not continues and sum(grown.values()) < 0.5 * (after - before):
        return  # windows do not show it
    slower_cpu = _is_slower_cpu(signals, grown, part)
    phase, culprit = (None, None) if slower_cpu else _changed(signals, grown, part)
    at += signals.windows[0].first.batch  # a resumed run does not start at 0
    first = int(at[stretches[0][0]])
    evidence = without_none(
        batch=float(first), before_seconds=before if continues else None,
        after_seconds=after if continues else None,
        cpu_percent=signals.average("system/cpu_util_simple"),
    )  # fmt: skip
    foreign = 0.0 if continues else signals.more_foreign(part > 0)
    grows = "state that grows, for " if continues else ""
    look = f"Look for {grows}throttling, and for other programs on the machine."
    if foreign >= named:
        look = f"Other programs used {foreign:.0%} more of the CPUs then."
    elif slower_cpu:
        look = (
            "All its parts take longer alike, and need a CPU for longer: it is slower (its clock, "
            "heat, other programs or virtual machines), or the items are larger."
        )
    as_usual = foreign >= named or (slower_cpu and after < varies * before)
    advice = f"{duration(after)} instead of {duration(before)}."
    advice += f" The time went to {culprit or phase}." if phase else ""
    if continues:
        advice = f"From batch {first} on, a batch takes {advice}"
    else:
        names = " and ".join(
            stretch_of(signals, int(at[each[0]]), int(at[each[-1]]) + 1, 0.1 * len(each))
            for each in stretches
        )
        if len(stretches) >= _RECUR:
            length = f"{np.median([len(each) for each in stretches]):.0f} batches"
            names = f"{len(stretches)} stretches of about {length}, the first from batch {first} on"
        again = ", but may come again" if len(stretches) > 1 else ""
        advice = (
            f"In {names}, a batch took {advice} They took {duration(float(lost.sum()))} longer in "
            f"all.{f' This is over{again}.' if change.over else ''}"
        )
    is_lasting = not change.over and slow.sum() >= sustained
    grown = {name: max(seconds, 0.0) for name, seconds in grown.items()}
    total = sum(grown.values())
    yield Impact(
        lost, 1.0, culprit, phase, None, evidence, f"{advice} {look}", 0.0 if change.over else None,
        whole_run=True, on_host=False, inferred=True,
        highest="info" if as_usual else "critical" if is_lasting else "warning",
        within={n: part / total * lost for n, part in grown.items() if total},
    )  # fmt: skip


class _Change(NamedTuple):
    """Longer batches, from one of them on or in some stretches."""

    before: float
    after: float
    #: The positions of longer batches.
    stretches: list[NDArray[np.intp]]
    #: Whether no more are expected.
    over: bool
    #: Which batches count, and which are those before.
    counted: NDArray[np.bool_]
    usual: NDArray[np.bool_]


def _change(times: Numbers, ratio: float, sustained: int, varies: float) -> _Change | None:
    """What became longer in some seconds of batches; None if nothing."""
    stretches, number, found = _stretches(times, varies), np.arange(len(times)), None
    if stretches:
        due = min(stats.OVER * len(stretches[-1]), sustained)
        if len(stretches) >= _RECUR:  # the next one may be late
            due = 2.0 * max(later[0] - each[-1] for each, later in pairwise(stretches))
        found = _in_stretches(times, stretches, over=len(times) - stretches[-1][-1] > due)
        if found.over or len(stretches) > 1:
            return found
    change = stats.change_point(times, ratio, sustained)
    small = 0.0 if found is None else (found.after - found.before) / 2
    if change is None or change.after - change.before < small:
        return found
    back = stats.change_point(times[change.start :][::-1], ratio, sustained)
    if back is not None and 2 * back.before < change.before + change.after:
        return _in_stretches(times, [number[change.start : -back.start]], over=True)
    # If steps became slower gradually, the first quarter is the original level.
    quarter = max(change.start // 4, stats.FEWEST_STEPS)
    early = float(np.median(times[:quarter]))
    gradual = early * ratio**0.5 < change.before
    return _Change(
        min(early, change.before), change.after, [number[change.start :]], False,
        number >= (0 if gradual else change.start), number < (quarter if gradual else change.start),
    )  # fmt: skip


def _stretches(times: Numbers, varies: float) -> list[NDArray[np.intp]]:
    """The positions of seconds that are longer by a ratio, in each stretch of them."""
    size = max(stats.FEWEST_STEPS, len(times) // _BLOCKS)
    count = len(times) // size
    # Stalls do not change medians.
    sizes = np.full(count, float(size))
    medians = np.median(times[: count * size].reshape(count, size), axis=1)
    slow = stats.slow(sizes * medians, sizes, LEAST, varies)
    if slow is None or not len(blocks := slow.lasting(_FEWEST)):
        return []
    # They begin and end within the blocks beside them.
    parts = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
    longer = np.flatnonzero(times > slow.usual + stats.SLOW * slow.longer)
    found = (
        longer[np.isin(longer // size, np.r_[part[0] - 1, part, part[-1] + 1])] for part in parts
    )
    # Medians of batches that alternate are long at times, too.
    return [
        np.arange(each[0], each[-1] + 1)
        for each in found
        if len(each) >= _STRETCH and len(each) > _MOSTLY * np.ptp(each)
    ]


def _in_stretches(times: Numbers, stretches: list[NDArray[np.intp]], over: bool) -> _Change:
    slow = np.isin(np.arange(len(times)), np.concatenate(stretches))
    before, after = (float(np.median(times[part])) for part in (~slow, slow))
    return _Change(before, after, stretches, over, slow, ~slow)


def _is_slower_cpu(signals: Signals, grown: Mapping[str, float], part: Numbers) -> bool:
    """Whether all parts of a batch grew alike, while the thread ran or waited for a CPU."""
    usual = {name: signals.per_batch(signals.category(name)) for name in grown}
    total = sum(grown.values())
    parts = [name for name in grown if usual[name] >= _PART * sum(usual.values())]
    if RUNNING not in signals.actions:
        return False
    awake = signals.actions[RUNNING].seconds + signals.waiting
    return (
        _growth(signals, awake, part) >= 0.5 * total
        and len(parts) > 1
        and all(grown[n] / usual[n] >= 0.5 * total / sum(usual.values()) for n in parts)
    )


def _more_work(
    signals: Signals,
    part: Numbers,
    usual: NDArray[np.bool_],
    slow: NDArray[np.bool_],
    before: float,
    after: float,
) -> bool:
    """Whether slow batches, a part of each window, do more work than usual ones.

    They have more FLOPs, tokens or samples, or more steps of optimizers.
    """
    more = least_work(after / before)
    steps = signals.total(signals.rows("optimizer_step"))
    each = float(steps.seconds.sum() / max(steps.calls.sum(), 1.0))
    if each * _growth(signals, steps.calls, part) >= (more - 1) * before:
        return True
    if signals.flops.any():
        earlier, work = signals.flops[usual], signals.flops[slow]
        known = np.isfinite(earlier).any() and np.isfinite(work).any()
        if known and 0 < more * float(np.nanmedian(earlier)) <= float(np.nanmedian(work)):
            return True
    for name in ("batch/tokens", "batch/samples"):
        amounts, counts = signals.column(name), signals.column("batch/count")
        if amounts is None or counts is None:
            continue
        fewer, amount = (
            (weights * amounts).sum() / max((weights * counts).sum(), 1.0)
            for weights in (1 - part, part)
        )
        if fewer and amount / fewer >= more:
            return True
    return False


def _changed(
    signals: Signals, grown: Mapping[str, float], part: Numbers
) -> tuple[str | None, str | None]:
    """The category, and the named action in it, that grew most."""
    phase = max(grown, key=grown.__getitem__)
    if grown[phase] <= 0:
        return None, None
    rows = signals.rows(phase)
    named = {row.name: _growth(signals, signals.actions[row].seconds, part) for row in rows}
    culprit = max(named, key=named.__getitem__, default="")
    is_most = "." in culprit and named[culprit] >= 0.5 * grown[phase]
    return phase, culprit if is_most else None


def _growth(signals: Signals, seconds: Numbers, part: Numbers) -> float:
    """Seconds per batch of slow ones, which are a part of each window, less those of others.

    By a regression. The warm-up counts if all other windows are alike.
    """
    for kept in (slice(signals.start, None), slice(None)):
        counts = signals.counts[kept]
        more = part[kept] - (counts * part[kept]).sum() / max(counts.sum(), 1.0)
        spread = float((counts * more**2).sum())
        if spread > 1e-9:
            return float((more * seconds[kept]).sum() / spread)
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
