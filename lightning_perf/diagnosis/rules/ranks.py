"""Rules on several ranks: the rank that the others wait for, and communication."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules import LEAST, Impact
from lightning_perf.diagnosis.rules.lateness import (
    PHASES,
    Lateness,
    Straggler,
    Work,
    lost_seconds,
    straggler_of,
    waiting_points,
    work_of,
)
from lightning_perf.diagnosis.signals import NAMED, STRATEGY, WAITS, Unknown, follows_gradients
from lightning_perf.diagnosis.stats import equal, fewest
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.diagnosis.stats import Numbers
    from lightning_perf.timing.totals import Action

#: A rank that is late occasionally, or by little, is named if it explains this share of all waits.
_MOST = 0.5
#: The share of the wall time from which on a callback, logger or checkpoint has a verdict.
_HAS_VERDICT = 0.02
#: The part of mutual waits that may be due to chance: no two batches take exactly as long.
_CHANCE = 0.25
#: The quantile of optimizer steps that is a usual one, and the fewest steps that tell.
_USUAL, _FEWEST_STEPS = 0.25, 3
#: A straggler of a part of the run is late by this many times what the others wait for it later.
_PASSED = 3.0
#: Seconds that a thread waits for a CPU that another program holds, at most: a time slice of Linux.
_TIME_SLICE = 4e-3


def _windows(signals: Signals) -> Sequence[Window]:
    """Windows of several ranks with their waits; none for a single rank."""
    if not signals.windows or signals.windows[0].world_size == 1:
        return ()
    if "waits/exchange" not in signals.windows[0].columns:
        raise Unknown("how long ranks wait for each other is not measured")
    return signals.windows


def _taken(signals: Signals) -> float:
    """The share of the CPUs that other programs take from ranks that compute on them."""
    return 1 - signals.cpus_left if signals.setup.device == "cpu" else 0.0


def waited_for(signals: Signals, least: Lateness) -> tuple[Straggler | None, Numbers]:
    """The straggler, and the seconds in each window that ranks wait for it.

    Without one, those that they wait for one another, beyond the exchange of gradients: even work
    would save them.
    """
    windows = _windows(signals)
    if not windows:
        return None, signals.nothing
    works = {number: work_of(each) for number, each in enumerate(windows) if each.batches}
    mutual = sum(signals.mutual.values(), signals.nothing)
    late, seconds = _late_in(signals, works, least)
    named = [] if signals.on_device else _named_costs(signals)
    if named:
        # They have verdicts of their own: another rank may be late elsewhere.
        other, others = _late_in(signals, _without_costs(signals, works, named), least)
        if other is not None or (late is not None and windows[0].rank in late.ranks):
            late, seconds = other, others
    return (None, mutual) if late is None else (late, seconds)


def _late_in(
    signals: Signals, works: Mapping[int, Work], least: Lateness
) -> tuple[Straggler | None, Numbers]:
    """The straggler, and the seconds that ranks wait for it, given the work in windows."""
    steady = [work for number, work in works.items() if number >= signals.start]
    late, seconds = straggler_of(steady, least), signals.nothing
    if late is None:
        return None, seconds
    mutual = signals.nothing
    for number, work in works.items():
        mutual[number] = work.waits.sum(axis=1).mean()
        found = lost_seconds(work.beside_others(late.ranks), work.wall / work.batches)
        seconds[number] = work.batches * max(found, 0.0)
    explained = (1 - len(late.ranks) / len(steady[0].own)) * late.share
    known = late.chronic and late.share >= least.once
    if not known and explained < _MOST * signals.share(mutual):
        return None, signals.nothing
    return late, late.seconds / max(signals.per_batch(seconds), 1e-12) * seconds


def _named_costs(signals: Signals) -> list[Action]:
    """The callbacks, loggers and checkpoints of this rank that have verdicts."""
    return [
        row
        for row in signals.rows(*NAMED)
        if signals.share(signals.actions[row].seconds) >= _HAS_VERDICT
    ]


def _without_costs(
    signals: Signals, works: Mapping[int, Work], rows: Sequence[Action]
) -> dict[int, Work]:
    """The work in windows without some costs of this rank, and what others wait for them."""
    early, late = (
        sum(
            signals.delaying([r for r in rows if follows_gradients(r) is follows]).values(),
            signals.nothing,
        )
        for follows in (False, True)
    )
    return {
        number: _without_seconds(work, signals.windows[0].rank, early[number], late[number])
        for number, work in works.items()
    }


def _without_seconds(work: Work, rank: int, early: float, late: float) -> Work:
    """The work in a window without seconds in callbacks of a rank, by when ranks wait for them."""
    own, waits, at = work.own.copy(), work.waits.copy(), list(PHASES).index("callback")
    own[rank, at] = max(own[rank, at] - early - late, 0.0)
    others = np.arange(len(own)) != rank
    start = waiting_points(PHASES).index("waits/start")
    for seconds, points in ((late, [start]), (early, range(start + 1))):
        left = np.full(len(own) - 1, seconds)
        for point in points:
            waited = np.minimum(waits[others, point], left)
            waits[others, point] -= waited
            left -= waited
        # What they do not wait for, they spend as well.
        own[others, at] = np.maximum(own[others, at] - left, 0.0)
    return replace(work, own=own, waits=waits)


def behind_workers(signals: Signals, late: Straggler, seconds: Numbers) -> bool:
    """Whether a rank is late because it waits for its DataLoader workers, as `input_bound` says.

    Those of the others may be as slow: once one rank has no batches ahead, the others, which wait
    for it, keep theirs. A single stall is of this rank.
    """
    loader = signals.setup.loader
    workers = loader is not None and loader.num_workers > 0
    return workers and late.phase == "input" and not _is_one_event(signals, seconds)


def _reports(signals: Signals) -> int:
    """The number of windows after the warm-up that have batches."""
    return int(np.count_nonzero(signals.steady(signals.counts)))


def late_rank(signals: Signals, least: Lateness) -> tuple[Straggler | None, Numbers]:
    """What `waited_for` gives, also with few windows.

    A rank is then named if it is late in all of them, and in most optimizer steps.
    """
    few = bool(signals.start) and _reports(signals) < least.fewest
    if few:
        least = replace(least, fewest=1, chronic=1.0)
    late, seconds = waited_for(signals, least)
    if few and late is not None and not (late.chronic and _is_usual(signals, seconds)):
        return None, sum(signals.mutual.values(), signals.nothing)
    return late, seconds


def straggler(signals: Signals, least: Lateness) -> Iterable[Impact]:
    """One rank makes the others wait, or another one each time."""
    if not _windows(signals):
        return
    count = _reports(signals)
    reports, few = counted(count, "report"), count < least.fewest
    too_few = f"{reports} after the warm-up, and comparing ranks needs {least.fewest}"
    if few and not signals.start:
        raise Unknown(too_few)
    late, seconds = late_rank(signals, least)
    if late is None and not signals.on_device:
        # What ranks wait for named costs of this one is in their verdicts.
        named = signals.lost(signals.delaying(_named_costs(signals)))
        seconds = np.maximum(seconds - named[WAITS], 0.0)
    # With other programs on the CPUs, any rank is late occasionally: by a time slice, and by what
    # it waits for a CPU.
    taken, queue = _taken(signals), signals.per_batch(signals.waiting)
    wait, once = signals.per_batch(seconds), _is_one_event(signals, seconds)
    certain = max(1 - taken * (_TIME_SLICE + queue) / max(wait, 1e-12), 0.0)
    if late is None:
        phase, evidence, advice = _turns(signals, seconds)
        within = {} if signals.on_device else {WAITS: seconds}
        if few:
            advice = (
                f"Ranks wait for one another. {too_few}: a smaller log_every_n_steps tells whether "
                "it is for one rank."
            )
            yield Impact(
                seconds, phase=phase, advice=advice, on_host=False, highest="info", within=within,
                certain=fewest(1) if once else 1.0,
            )  # fmt: skip
            raise Unknown(too_few)
        yield Impact(
            seconds, 1.0 if once else None, phase=phase, evidence=evidence, advice=advice,
            on_host=False, within=within, certain=fewest(1) if once else (1 - _CHANCE) * certain,
        )  # fmt: skip
        return
    if late.seconds < LEAST or behind_workers(signals, late, seconds):
        return
    # One that is late often is so by itself.
    again = max(1 - taken, min(certain, fewest(equal(signals.steady(seconds)))))
    if once:
        again = fewest(1)
    passed = None if late.chronic or once else _passed(signals, seconds, least.fewest)
    if passed is not None:
        yield _over(signals, late, *passed, again)
        return
    yield _named(signals, late, seconds, once, certain if few else 1.0 if late.chronic else again)


def _named(
    signals: Signals, late: Straggler, seconds: Numbers, once: bool, certain: float
) -> Impact:
    """The verdict on ranks that the others wait for."""
    who, several = late.name, len(late.ranks) > 1
    which, its = ("which are", "their") if several else ("which is", "its")
    evidence = {
        "waited_seconds": late.seconds,
        "node": float(late.node),
        "slow_in": "most windows" if late.chronic else "one place" if once else "some windows",
    }
    if several:
        evidence["ranks"] = ", ".join(map(str, late.ranks))
    node = f", all of node {late.node}" if _is_node(signals, late) else ""
    advice = (
        f"The other ranks wait {duration(late.seconds)} per batch for {who}{node}, {which} slow in "
        f"{late.phase}. Compare {its} machine, {its} share of the data and {its} callbacks with "
        "those of the others."
    )
    if once and not late.chronic:
        longest = duration(float(signals.steady(seconds).max()))
        advice = (
            f"The other ranks waited {longest} for {who}{node} once, in {late.phase}. Look for "
            f"other programs and slow storage on {its} machine."
        )
    return Impact(
        seconds, 1.0, who, late.phase, late.rank, evidence, advice, on_host=False,
        certain=certain, inferred=True,
        within={} if signals.on_device else by_category(signals, seconds, late.ranks),
    )  # fmt: skip


def _passed(signals: Signals, seconds: Numbers, fewest: int) -> tuple[int, int, Numbers] | None:
    """The windows in which ranks waited for one that is no longer late, and how much longer.

    They have a first one and an end. None if fewer windows than a number follow.
    """
    steady, counts = signals.steady(seconds), signals.steady(signals.counts)
    slow = stats.slow(steady, counts, LEAST, _PASSED)
    passed = None if slow is None else slow.passed(counts)
    if passed is None:
        return None
    begin, end = int(passed[0][0]), int(passed[0][-1]) + 1
    if np.count_nonzero(counts[end:]) < fewest:
        return None
    start = signals.start
    return begin + start, end + start, np.append(signals.nothing[:start], passed[1])


def _over(
    signals: Signals, late: Straggler, begin: int, end: int, seconds: Numbers, certain: float
) -> Impact:
    """The verdict on ranks that were late in a stretch of windows, and no longer are."""
    each = seconds[begin:end].sum() / signals.counts[begin:end].sum()
    first = signals.windows[0 if begin == signals.start else begin].first.batch
    last = signals.windows[end - 1].last.batch - 1
    was, its = ("were", "their") if len(late.ranks) > 1 else ("was", "its")
    return Impact(
        seconds, 1.0, late.name, late.phase, late.rank,
        {"node": float(late.node), "first_batch": float(first), "last_batch": float(last)},
        f"The other ranks waited {duration(each)} per batch for {late.name}, which {was} slow in "
        f"{late.phase}, in batches {first} to {last}. This is over: the rest of the run gains "
        f"nothing. Look for other programs, heat and slow storage on {its} machine then.",
        0.0, on_host=False, certain=certain, inferred=True, highest="warning",
        within={} if signals.on_device else by_category(signals, seconds, late.ranks),
    )  # fmt: skip


def _is_node(signals: Signals, late: Straggler) -> bool:
    """Whether several late ranks are all of one node, of several."""
    nodes = signals.windows[0]["waits/node_rank"]
    there: list[int] = np.flatnonzero(nodes == late.node).tolist()
    return len(nodes) > len(there) > 1 and there == [*late.ranks]


def _turns(signals: Signals, seconds: Numbers) -> tuple[str, dict[str, float | str], str]:
    """The phase, evidence and advice if ranks wait for one another, and none is named."""
    start = "Ranks wait for one another, "  # how long is in the verdict, which may get less
    metrics = signals.mutual.get("reduce_metrics", signals.nothing)
    if metrics.sum() > seconds.sum() / 2:  # a metric's own work is not told from waiting
        advice = (
            f"{start}most of it in metrics: one of them begins to exchange values later, or its "
            "compute takes longer."
        )
        return "reduce_metrics", {}, advice
    advice = (
        f"{start}and no rank causes most of it. Look for batches that take longer on one rank "
        "than on the others: give all ranks samples of similar length at the same time. "
        "Otherwise, other programs or the network delay them at random."
    )
    return "backward", {"slow_in": "changing ranks"}, advice


def _is_usual(signals: Signals, seconds: Numbers) -> bool:
    """Whether ranks wait in usual optimizer steps, and not mostly in a part that takes longer.

    While gradients accumulate, they wait once per optimizer step, and not in each batch.
    """
    batches = signals.within_epochs[signals.warm_steps :]
    last = np.flatnonzero(signals.by_batch("optimizer_step"))
    if not len(last):  # unknown
        last = np.arange(len(batches))
    if len(last) < _FEWEST_STEPS:
        return False
    begins, batches = np.append(0, last[:-1] + 1), batches[: last[-1] + 1]
    known = np.add.reduceat(np.isfinite(batches).astype(float), begins)
    steps = np.add.reduceat(np.nan_to_num(batches), begins)[known > 0] / known[known > 0]
    if not len(steps):
        return False
    longer = known[known > 0] @ np.maximum(steps - np.quantile(steps, _USUAL), 0.0)
    return bool(longer < signals.steady(seconds).sum() / 2)


def _is_one_event(signals: Signals, seconds: Numbers) -> bool:
    """Whether most of what ranks wait is at one place of the run, which may not come again.

    A place is a batch, or what a window has beside its batches, such as hooks at the end of the
    last epoch. What ranks wait in a window is where it takes longer than usual.
    """
    steps = signals.steps
    windows, number = signals.windows_of(np.arange(len(steps))), len(signals.windows)
    usual = np.median(steps[np.isfinite(steps)]) if np.isfinite(steps).any() else 0.0
    longer = np.nan_to_num(np.maximum(steps - usual, 0.0))
    beside = signals.wall - np.bincount(windows, np.nan_to_num(steps), number)
    places = np.append(longer, np.maximum(beside, 0.0))
    windows = np.append(windows, np.arange(number))
    seconds = np.where(np.arange(number) < signals.start, 0.0, seconds)
    part = seconds / np.maximum(np.bincount(windows, places, number), 1e-12)
    return bool((part[windows] * places).max() > seconds.sum() / 2)


def by_category(signals: Signals, seconds: Numbers, ranks: Sequence[int]) -> dict[str, Numbers]:
    """Seconds that ranks lose by late ones, by category: own work of these, and others' waits."""
    own = {
        name: np.maximum(
            work[:, ranks].mean(axis=1) - np.median(np.delete(work, ranks, axis=1), axis=1), 0.0
        )
        for name, work in signals.work.items()
    }
    if signals.windows[0].rank in ranks:  # its callbacks may have verdicts of their own
        for name, each in signals.delaying(_named_costs(signals)).items():
            own[name] = np.maximum(own[name] - each / len(ranks), 0.0)
    part = seconds * len(ranks) / signals.windows[0].world_size
    # It may have spent more only at the point where the others wait, and not in all.
    ratio = np.minimum(part / np.maximum(sum(own.values(), signals.nothing), 1e-12), 1.0)
    within = {name: ratio * each for name, each in own.items()}
    return within | {WAITS: seconds - sum(within.values(), signals.nothing)}


def communication_bound(signals: Signals) -> Iterable[Impact]:
    """All ranks wait for gradients in each batch: the minimum wait, which no late rank explains.

    Or for what the module itself exchanges: metrics, and what it gathers.
    """
    windows = _windows(signals)
    if not windows:
        return
    rows = [
        row for row in signals.rows("reduce_metrics") if row.name.split(".")[0].endswith(STRATEGY)
    ]
    if most := signals.slowest(rows):
        seconds, calls = signals.total(rows)
        advice = (
            f"All ranks exchange values in {most.name}, {calls.sum() / signals.batches:.3g} times "
            "per batch: call self.all_gather and self.log(..., sync_dist=True) less often, or with "
            "less."
        )
        seconds = np.minimum(seconds, signals.shared("reduce_metrics"))
        yield Impact(seconds, None, most.name, most.category, advice=advice, on_host=False)
    seconds = np.array([window.least("waits/exchange") for window in windows])
    advice = (
        "Gradients are exchanged more slowly than computed: accumulate_grad_batches, larger "
        "batches, bf16 gradients (a DDP communication hook) or a faster network."
    )
    scheduling = _taken(signals) * _TIME_SLICE / max(signals.per_batch(seconds), 1e-12)
    yield Impact(
        seconds, phase="backward", advice=advice, on_host=False, certain=max(1 - scheduling, 0.0)
    )
