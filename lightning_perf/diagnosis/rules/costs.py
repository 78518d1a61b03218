"""Rules about time outside of the model: transfers, callbacks, loggers, checkpoints, validation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules import PROMISE, Impact, called, without_none
from lightning_perf.diagnosis.signals import BEFORE, COMPILE, COMPUTE, GC, STRATEGY
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lightning_perf.diagnosis.signals import SetUp, Setup, Signals
    from lightning_perf.diagnosis.stats import Numbers
    from lightning_perf.timing.totals import Action

#: Categories of the computation of metrics, and of the steps of learning rate schedulers.
_METRICS, _SCHEDULERS = "reduce_metrics", "step_lr_schedulers"
#: Methods of loggers that Lightning calls at this interval.
_AT_INTERVALS = (".log_metrics", ".save")
#: The part of a method's time in few batches from which on it works in these alone.
_AT_TIMES = 0.9
#: Intervals between checkpoints, and sums of seconds, are alike if they differ by this part.
_ALIKE = 0.2
#: The number of events of equal cost below which one of them takes most of the time.
_TWO = 1.5
#: Methods of a class in a text.
_LISTED = 5
#: What follows our hook in the last batch is after its end, by which batches are divided.
_BATCH_END = (".on_train_batch_end", ".log_metrics")
#: Lightning's own progress bars, which have a refresh rate.
_BARS = ("TQDMProgressBar", "RichProgressBar")


def transfer_bound(signals: Signals) -> Iterable[Impact]:
    """Moving batches takes long, by the clock of the host, or of the GPU if that is longer."""
    seconds = signals.shared("to_device")
    device = signals.column("timings/device/to_device")
    if device is not None:
        seconds = np.maximum(seconds, device / signals.setup.world_size)
    loader, on_gpu = signals.setup.loader, signals.setup.device == "cuda"
    advice = "Transform batches in the dataset, on the workers, not while they are moved."
    if on_gpu and loader is not None and not loader.pin_memory:
        advice = "Set pin_memory=True in the DataLoader: copies then overlap with compute."
    elif on_gpu:
        advice = "Move less: smaller dtypes (uint8 images), and transforms on the device."
    hook = signals.slowest(signals.rows("to_device"))
    evidence = without_none(pin_memory=None if loader is None else str(loader.pin_memory))
    yield Impact(
        seconds, culprit=hook and hook.name, phase="to_device", evidence=evidence, advice=advice,
        within=None if device is None else {},  # the host may do anything meanwhile
    )  # fmt: skip


class _Hooks(NamedTuple):
    """The methods of one class that take time, the most costly first: one of them, or all."""

    owner: str
    #: Seconds by method, without the windows of the warm-up.
    costs: Mapping[Action, float]
    #: Calls of the most costly one.
    calls: float
    #: Which method takes how long, as the start of a sentence.
    takes: str
    #: Without advice.
    impact: Impact


def _hooks(signals: Signals, kind: str, named: float, *categories: str) -> Iterator[_Hooks]:
    """The methods in some categories, by class; only the most costly if it is a share ``named``."""
    classes: defaultdict[str, dict[Action, float]] = defaultdict(dict)
    for row in signals.rows(*categories):
        owner, dot, _ = row.name.partition(".")
        # Without what Lightning itself does, such as broadcasts, and without communication.
        lightning = owner.endswith(("Trainer", STRATEGY))
        series = signals.actions[row]
        cost = float(signals.steady(series.seconds).sum())
        if row.name.endswith(BEFORE) and series.calls.sum() <= 1:
            continue  # a part of the warm-up
        if cost and (dot or row.category == _SCHEDULERS) and not lightning:
            classes[owner][row] = cost
    for owner, costs in classes.items():
        rows = sorted(costs, key=costs.__getitem__, reverse=True)
        slowest, total = rows[0], sum(costs.values())
        rows = rows[:1] if costs[slowest] >= named * total else rows
        within = signals.lost(signals.delaying(rows))
        seconds = sum(within.values(), signals.nothing)
        spent = sum(signals.lost(signals.within(rows)).values(), signals.nothing)
        calls = max(float(signals.steady(signals.actions[slowest].calls).sum()), 1.0)
        culprit, values = slowest.name, _by_batch(signals, rows)
        times = _Times(values, stats.stalls(values))
        if len(rows) == 1:
            per_call = float(signals.steady(spent).sum()) / calls
            per_call, often, worked = times.described() or (per_call, "per call", calls)
            takes = f"{called(culprit)} takes {duration(per_call)} {often}"
            evidence: dict[str, float | str] = {"calls": worked, "seconds_per_call": per_call}
        else:
            parts = [(row.name.partition(".")[2], costs[row] / total) for row in rows[:_LISTED]]
            split = ", ".join(f"{name} {share:.0%}" for name, share in parts)
            culprit = f"{culprit.partition('.')[0]} ({len(rows)} {kind})"
            takes = f"{culprit} takes {duration(signals.per_batch(spent))} per batch ({split})"
            evidence = {kind: split}
        events = calls if calls < 0.5 * signals.steady(signals.counts).sum() else None
        impact = Impact(
            seconds, events, culprit, slowest.category, evidence=evidence, within=within,
            number=times.number(signals, slowest.category, seconds, events),
        )  # fmt: skip
        yield _Hooks(owner, {row: costs[row] for row in rows}, calls, takes, impact)


def _by_batch(signals: Signals, rows: Sequence[Action]) -> Numbers:
    """Seconds of some methods in each batch after the warm-up; empty if that is not known.

    Only categories are measured by batch. The methods have all seconds of their category if it has
    little else, or those of its long batches if these are in the windows where the methods are.
    """
    category, rest = rows[0].category, signals.rows(rows[0].category)
    values = signals.by_batch(category)
    own, others = (
        signals.steady(signals.total(each).seconds)
        for each in (rows, [row for row in rest if row not in rows])
    )
    if others.sum() > (1 - _AT_TIMES) * own.sum():
        found = signals.long[category]
        at = signals.windows_of(found.positions + len(signals.phases) - len(values))
        long = signals.steady(np.bincount(at, found.excess, len(signals.windows)).astype(float))
        alike = [np.abs(each - long).sum() <= _ALIKE * each.sum() for each in (own, others)]
        if alike != [True, False]:
            return values[:0]
        values = np.bincount(found.positions, found.excess, len(values)).astype(float)
    if len(values) and rows[0].name.endswith(_BATCH_END):
        values, left = values.copy(), float(own.sum() - values.sum())
        values[-1] += max(min(left, signals.after_last(category)), 0.0)
    # What else follows the last batch is in none.
    known = signals.dropped or abs(values.sum() - own.sum()) <= _ALIKE * own.sum()
    return values if known and all(row in rest for row in rows) else values[:0]


class _Times(NamedTuple):
    """When some methods take their time, as far as it is known by batch."""

    #: Seconds in each batch; empty if they are not known.
    values: Numbers
    #: The batches in which they take long.
    long: stats.Stalls

    @property
    def period(self) -> float | None:
        """The number of batches between long ones, if these are in most of the run."""
        period = self.long.period
        known = period is not None and period * len(self.long.positions) >= len(self.values) / 2
        return period if known else None

    def number(
        self, signals: Signals, category: str, seconds: Numbers, calls: float | None
    ) -> float | None:
        """The number of events of equal cost, if it may vary, given seconds in each window.

        ``calls`` are those of the most costly method, if there are few.
        """
        if len(self.values):
            return inf if self.period is not None else stats.equal(self.values)
        if calls is None:
            return None
        if calls == signals.restarts.calls.sum() > 1:
            by_batch = np.append(signals.by_batch(category), signals.after_last(category))
            if not _single(by_batch):
                return inf  # in each epoch
        return min(stats.equal(signals.steady(seconds)), calls)

    def described(self) -> tuple[float, str, float] | None:
        """Seconds at a time, how often, and how many times; None without few long batches."""
        count, excess = len(self.long.positions), float(self.long.excess.sum())
        if not count or excess <= _AT_TIMES * self.values.sum():
            return None
        often = f"in {count} of {counted(len(self.values), 'batch')}"
        if self.period is not None:
            often = f"every {self.period:.0f} batches"
        return excess / count, often, float(count)


def callback_bound(signals: Signals, named: float) -> Iterable[Impact]:
    """Hooks of a callback or of the module, or a metric, take long: one impact per class.

    The culprit is a hook if it takes a share ``named`` of the class's time.
    """
    for hooks in _hooks(signals, "hooks", named, "callbacks", "other", _METRICS, _SCHEDULERS):
        advice = "Call its work less often, or move it off the training thread."
        if hooks.owner in signals.setup.ours:
            less = "record or report less often (schedule, log_every_n_steps), or leave it out"
            advice = f"It is lightning_perf's own: {less}."
        elif hooks.owner in _BARS:
            advice = "Raise its refresh_rate."
        yield replace(hooks.impact, advice=f"{hooks.takes}. {advice}")


def logger_bound(
    signals: Signals, named: float, aim: float, left: int, follows: tuple[float, float]
) -> Iterable[Impact]:
    """Writing metrics takes long: one impact per logger.

    The culprit is a method if it takes a share ``named`` of the logger's time. The advice aims at a
    share of the time, and leaves some reports in a run of this length. Calls follow
    `log_every_n_steps` if their number per batch at which Lightning logs is between two: callbacks
    log at these batches, too.
    """
    least, most = follows
    every = signals.setup.log_every_n_steps
    batches, epochs = (
        float(signals.steady(values).sum()) for values in (signals.counts, signals.restarts.calls)
    )
    asked = batches / max(every, 1)
    for hooks in _hooks(signals, "methods", named, "logging"):
        slowest, calls, saves = next(iter(hooks.costs)), hooks.calls, None
        # Lightning logs at ends of epochs as well.
        regular = asked >= 1 and least * asked <= calls - epochs <= most * asked
        if regular and slowest.name.endswith(_AT_INTERVALS):
            share = signals.share(hooks.impact.seconds)
            rarer = max(min(round(share / aim), int(asked / left)), 2) * every
            rare = [cost for r, cost in hooks.costs.items() if r.name.endswith(_AT_INTERVALS)]
            saves = sum(rare) / sum(hooks.costs.values())
            saves *= (1 - epochs / calls) * (1 - every / rarer)
            advice = f"Trainer(log_every_n_steps={rarer}) instead of {every} gives {PROMISE}."
        else:
            advice = (
                f"{slowest.name} is called {calls:.0f} times in {counted(round(batches), 'batch')},"
                f" which Trainer(log_every_n_steps={every}) does not decide: log less often where "
                "it is called."
            )
        evidence = {**hooks.impact.evidence, "log_every_n_steps": float(every)}
        if saves is not None:
            evidence["advised_log_every_n_steps"] = float(rarer)
        yield replace(
            hooks.impact, advice=f"{hooks.takes}. {advice}", saves=saves, evidence=evidence
        )


def checkpoint_bound(signals: Signals, aim: float, left: int) -> Iterable[Impact]:
    """Writing checkpoints takes long; the culprit is the hook with the largest share.

    The advice aims at a share of the time, and leaves some checkpoints in a run of this length.
    """
    apart = ("", GC, COMPILE)
    rows = [r for r in signals.actions if r.category == "checkpoint" and r.stage not in apart]
    writes = [row for row in rows if row.name.startswith("checkpoint writing")]
    if not writes:
        return
    # With save_last=True or two callbacks several files are written at once.
    saves = max(min(signals.saves, float(signals.total(writes).calls.sum())), 1.0)
    events = signals.events["checkpoint"]
    own = _without_set_up(signals.total(rows).seconds, events.set_up)
    delaying = signals.delaying(rows)["checkpoint"]
    within = signals.lost({"checkpoint": np.minimum(own, delaying)})
    seconds = sum(within.values(), signals.nothing)
    per_checkpoint = float(own.sum() / saves)
    interval, often = _interval(signals, saves)
    times = max(min(signals.share(seconds) / aim, saves / left), 2)
    # ModelCheckpoint counts optimizer steps.
    per_batch = signals.setup.steps_per_batch
    steps = max(round(interval * times * per_batch), 1)
    rarer = round(steps / per_batch)
    slowest = max(rows, key=signals.seconds).name
    less = "" if signals.setup.weights_only else "; save_weights_only=True writes less"
    advice = f"A checkpoint takes {duration(per_checkpoint)} and is written {often}"
    origin = max(writes, key=signals.seconds).name
    if saves == 1:
        advice += f": its share falls with the length of the run{less}."
    elif any(f"({name}." in origin for name in signals.setup.savers):
        step = f"ModelCheckpoint(every_n_train_steps={steps})"
        advice += f". Every {rarer} batches gives {PROMISE} ({step}){less}."
    else:
        advice += f". Every {rarer} batches gives {PROMISE}: save less often there{less}."
    evidence = {
        "checkpoints": saves, "seconds_per_checkpoint": per_checkpoint, "batches_between": interval,
        "advised_every_n_train_steps": float(steps),
    }  # fmt: skip
    yield Impact(
        seconds, saves, slowest.removeprefix("checkpoint writing (").removesuffix(")"),
        "checkpoint", evidence=evidence, advice=advice, whole_run=True, within=within,
        saves=1 - interval / rarer if saves > 1 else None,
        number=1.0 if saves == 1 or _single(events.usual) else inf,
    )  # fmt: skip


def _interval(signals: Signals, saves: float) -> tuple[float, str]:
    """Batches between checkpoints, and how often they are written."""
    total, mean = counted(signals.batches, "batch"), signals.batches / saves
    if saves == 1:
        return mean, f"once in {total}"
    at, end = signals.events["checkpoint"].positions, len(signals.phases)
    if not signals.dropped and len(at) == saves - 1:
        at = np.append(at, end - 1)  # the last one follows the last batch
    gaps = np.diff(at)
    usual = float(np.median(gaps)) if len(gaps) else mean
    regular = np.all(np.abs(gaps - usual) <= _ALIKE * usual)
    if not regular or (len(at) and end - at[-1] > (1 + _ALIKE) * usual):
        return mean, f"{saves:.0f} times in {total}"
    return usual, f"every {counted(round(usual), 'batch')}"


def _single(costs: Numbers) -> bool:
    """Whether one of some events takes most of the time: it may not come again."""
    return bool(costs.any()) and stats.equal(costs) < _TWO


def _without_set_up(seconds: Numbers, first: SetUp | None) -> Numbers:
    """Seconds of events without what the first of them sets up, which is part of the warm-up."""
    return seconds if first is None else np.maximum(seconds - first.extra, 0.0)


def validation_bound(signals: Signals) -> Iterable[Impact]:
    """Validation takes long; the culprit is its largest part."""
    if not signals.spent["validation"].any():
        return
    events = signals.events["validation"]
    seconds = _without_set_up(signals.shared("validation"), events.set_up)
    within = {"validation": seconds}
    # Checkpoints that are written meanwhile are apart.
    rows = [r for r in signals.actions if r.stage == "validate" and r.category != "checkpoint"]
    costs = {name: float(seconds.sum()) for name, seconds in signals.within(rows).items()}
    compilations = [r for r in signals.actions if (r.stage, r.category) == (COMPILE, "validation")]
    # Ranks that wait for a late one validate no longer.
    if "reduce_metrics" in costs and "validation" in signals.mutual:
        costs["reduce_metrics"] = float(signals.exchanged("validation").sum())
    if "forward" in costs:
        costs["forward"] -= float(signals.total(compilations).seconds.sum())
    phase = max(costs, key=costs.__getitem__, default="validation")
    culprit = f"validate.{phase}"
    advice = (
        "Validate half as often (val_check_interval, check_val_every_n_epoch) or on half as many "
        f"batches (limit_val_batches): {PROMISE}, validation included."
    )
    if phase == "dataloader_next":
        starts = sum(signals.seconds(row) for row in rows if row.name == "iter")
        advice += _faster_validation(signals.setup, starts > costs[phase] / 2)
    # A callback, a logger or a hook of the module that makes up the time.
    named = [row for row in rows if row.category == phase and "." in row.name]
    slowest = max(named, key=signals.seconds, default=None)
    if phase not in COMPUTE and slowest and signals.seconds(slowest) > costs[phase] / 2:
        culprit, calls = slowest.name, float(signals.actions[slowest].calls.sum())
        took = _without_set_up(signals.actions[slowest].seconds, events.set_up).sum()
        takes = f"{culprit} takes {duration(float(took) / max(calls, 1.0))} per call"
        remedy = ": do its work less often."
        if culprit.partition(".")[0].endswith(STRATEGY):
            remedy = (
                ", in which ranks exchange values and wait for one another: compare their "
                "validation data and callbacks, or use sync_dist=True less often."
            )
        advice = f"{takes} in validation{remedy} {advice}"
        # What it takes on this rank alone, others wait for.
        longer = signals.own_work("validation") - signals.work["validation"].min(axis=1)
        seconds += np.minimum(signals.actions[slowest].seconds, longer)
        within = signals.lost({"validation": seconds})
    yield Impact(  # too rare for a bootstrap
        seconds, 1.0, culprit, "validation", advice=advice, whole_run=True, on_host=False,
        highest="warning" if _single(events.usual) else "critical",
        saves=0.5, within=within, evidence={
            "mostly": phase, "windows_with_validation": float(np.count_nonzero(seconds)),
        },
    )  # fmt: skip


def _faster_validation(setup: Setup, starting: bool) -> str:
    """What to change in a validation's DataLoader that makes it wait."""
    loader, most = setup.validation_loader, "waiting for data"
    if loader is not None and starting:
        most = "creating the iterator of its DataLoader"
        if loader.num_workers and not loader.persistent_workers:
            remedy = "set persistent_workers=True in its DataLoader"
            most = f"starting {loader.num_workers} workers: {remedy}"
    elif loader is not None and loader.num_workers:
        most = f"waiting for its {loader.num_workers} DataLoader workers: use more of them"
    elif loader is not None and setup.device == "cpu" and 1 < setup.cpus <= setup.threads:
        most = "waiting for data: prepare it ahead of training"
    elif loader is not None:
        most = "waiting for data: give its DataLoader workers"
    return f" Most of it is {most}."
