"""Rules about time outside of the model: data, callbacks, loggers, checkpoints, validation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_perf.diagnosis.rules import PROMISE, Impact, called, without_none
from lightning_perf.diagnosis.signals import (
    COMPILE,
    COMPUTE,
    FETCH,
    GC,
    RESTART,
    RUNNING,
    STRATEGY,
)
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lightning_perf.diagnosis.signals import Loader, Setup, Signals
    from lightning_perf.timing.totals import Action

#: The cost of a worker per batch: the transfer to the main process.
_HANDOVER = 0.5e-3
#: The speed of CPUs that compute all at once, and if more processes compute than there are CPUs.
#: Measured on 2 CPUs: a batch of 7.0 ms then took 7.9, and 8.8 ms of loading 10.1 to 10.4 ms; two
#: workers and a training thread used 85 and 88 % of the CPUs, as batches have an order.
_ALL_BUSY, _CROWDED = 0.87, 0.74
#: Categories of the computation of metrics, and of the steps of learning rate schedulers.
_METRICS, _SCHEDULERS = "reduce_metrics", "step_lr_schedulers"
#: Methods of loggers that Lightning calls at this interval.
_AT_INTERVALS = (".log_metrics", ".save")
#: Methods of a class in a text.
_LISTED = 5
#: Lightning's own progress bars, which have a refresh rate.
_BARS = ("TQDMProgressBar", "RichProgressBar")


class Workers(NamedTuple):
    """When more workers are advised, and how many."""

    #: Percent of the CPUs in use by training from which on loading is CPU work, and no wait for
    #: disks.
    busy: float
    #: Workers per CPU if loading does not need CPUs.
    per_cpu: int
    #: The share of a step by which advice shortens it: of the first workers; of more of them, since
    #: shorter waits may be those for their handover; and of those that share CPUs with threads of
    #: torch: 8 and 14 % were promised to runs that then were 11 % slower, and 15 % gave 8 %.
    first: float
    more: float
    contested: float
    #: Percent of the CPUs that other programs use from which on the advice names them, and promises
    #: a bound.
    named: float


def input_bound(signals: Signals, least: Workers) -> Iterable[Impact]:
    """Batches are not ready when training needs them, except stalls of single batches."""
    stalls, excess = signals.stalls
    waits = signals.waits
    if len(stalls.positions) and signals.phase_of(excess) == "dataloader_next":
        waits = np.maximum(waits - excess, 0.0)
    wait, loader = signals.per_batch(waits), signals.setup.loader
    workers = None if loader is None else loader.num_workers
    saves: float | None = None
    advised: int | None = None
    advice = (
        f"Each batch is waited for {duration(wait)}. Load batches in the background: "
        "the training data does not come from a DataLoader."
    )
    if loader is not None:
        advice, saves, advised = _faster_loader(signals, loader, wait, least)
    evidence = without_none(
        wait_seconds=wait, step_seconds=signals.step_seconds,
        cpu_percent=signals.average("system/cpu_util_simple"),
        iowait_percent=signals.average("system/cpu_iowait"), num_workers=workers,
        advised_workers=advised, usable_cpus=signals.setup.cpus,
    )  # fmt: skip
    if (signals.foreign or 0.0) > least.named:
        evidence["foreign_percent"] = signals.foreign or 0.0
    yield Impact(
        waits, culprit=FETCH, phase="dataloader_next", evidence=evidence, advice=advice,
        saves=saves, certain=signals.cpus_left if workers else 1.0,
    )  # fmt: skip


def _cpu_seconds(signals: Signals) -> float | None:
    """CPU seconds of a batch, of training and loading on a node; None if unknown."""
    setup, used = signals.setup, signals.average("system/process_cpu")
    if used is not None:
        return used / 100 * signals.step_seconds
    if RUNNING not in signals.actions or (setup.loader is not None and setup.loader.num_workers):
        return None
    seconds = signals.actions[RUNNING].seconds
    if setup.device == "cpu":  # torch's other threads compute beside the training thread
        others = min(setup.threads, setup.cpus) - 1
        seconds = seconds + others * sum(signals.category(name) for name in COMPUTE)
    return signals.per_batch(seconds)


def _loads_on_cpu(signals: Signals, loader: Loader, wait: float) -> bool:
    """Whether the training thread itself loads, and mostly computes in this time."""
    if RUNNING not in signals.actions or loader.num_workers:
        return False
    asleep = signals.wall - signals.actions[RUNNING].seconds - signals.waiting
    return signals.per_batch(asleep) < 0.5 * wait


def _speed(setup: Setup, workers: int, free: float) -> float:
    """The speed of CPUs if so many workers compute beside training on so many free CPUs."""
    spare = free - workers - _computing(setup)
    return 1.0 if spare > 0.5 else _ALL_BUSY if spare > -0.5 else _CROWDED


def _computing(setup: Setup) -> int:
    """Threads of training that compute on CPUs."""
    return min(setup.threads, setup.cpus) if setup.device == "cpu" else 1


def _slowed_by_workers(
    setup: Setup, step: float, rest: float, floor: float, own: float, free: float
) -> float:
    """Seconds of a batch if threads of torch wait for the one that shares its CPU with a worker.

    Args:
        setup: With the threads.
        step: Seconds of a batch now.
        rest: Of these, seconds without waiting for it.
        floor: The fewest seconds with workers.
        own: CPU seconds of a batch, the loading included.
        free: CPUs that other programs leave to those that load.
    """
    threads = _computing(setup)
    if threads < 2:
        return floor
    if floor > rest + _HANDOVER:  # there are too few CPUs
        return max(step, floor)
    if threads < free:
        return floor
    # All threads compute for a part of the time, and one for the rest.
    computing = max(own - (step - rest), 0.0) / rest
    return floor + (step - rest) * min(max((computing - 1) / (threads - 1), 0.0), 1.0)


def _faster_loader(
    signals: Signals, loader: Loader, wait: float, least: Workers
) -> tuple[str, float | None, int | None]:
    """DataLoader settings that hide the loading, the part of the wait that they save, workers."""
    setup, step = signals.setup, signals.step_seconds
    rest = max(step - wait, 1e-6)
    # Workers that start, or that validation waits for, do not load batches of training.
    apart = signals.per_batch(signals.restarts.seconds + signals.category("validation"))
    fetch = loader.num_workers * (step - apart) or wait  # of one worker
    # Workers need CPUs that the model and other programs use, too.
    foreign, own = signals.foreign or 0.0, _cpu_seconds(signals) or 0.0
    shared = foreign > least.named
    busy = (signals.average("system/cpu_util_simple") or 0.0) - foreign
    needs_cpu = busy >= least.busy or _loads_on_cpu(signals, loader, wait)
    most = max(setup.cpus if needs_cpu else least.per_cpu * setup.cpus, 1)
    # What is promised is a bound: a fair scheduler also gives a part of what others use now.
    on_cpus = own / max(setup.cpus * (1 - foreign / 100), 1e-6)
    floor = max(rest + _HANDOVER, on_cpus)
    worthwhile = least.more if loader.num_workers else least.first
    # Loading that waits for disks needs no CPU.
    free = setup.cpus * (1 - foreign / 100) if needs_cpu else np.inf
    slowed = _slowed_by_workers(setup, step, rest, floor, own, free)
    contested = slowed > floor
    if contested:
        # From all to none of the idle CPU time can be used.
        floor, worthwhile, free = (floor + slowed) / 2, least.contested, np.inf

    def with_workers(count: int) -> float:
        slower = _speed(setup, loader.num_workers, free) / _speed(setup, count, free)
        return slower * max(floor, apart + fetch / count)

    # A tenth more than needed: workers do not finish in step.
    needed = min(max(ceil(1.1 * fetch / max(floor - apart, 1e-6)), 1), most)
    # Those with a CPU of their own, unless more are faster.
    workers = int(min(needed, max(free - _computing(setup) + 0.5, 1)))
    if with_workers(workers) > 1.1 * with_workers(needed):
        workers = needed
    # Nothing loads the first batch of an epoch ahead.
    first = fetch / setup.batches_per_epoch if setup.batches_per_epoch else 0.0
    faster = with_workers(workers) + (0.0 if loader.num_workers else first)
    batch = f"a batch of {loader.batch_size}" if loader.batch_size else "a batch"
    item = f", {duration(fetch / loader.batch_size)} per item" if loader.batch_size else ""
    # If training waits for the handover only, workers load faster than it asks.
    worker = "a worker up to " if loader.num_workers else ""
    measured = (
        f"Loading {batch} takes {worker}{duration(fetch)}{item}; without waiting, a batch takes "
        f"{duration(rest)}"
    )
    if workers > loader.num_workers and faster < (1 - worthwhile) * step:
        hides = "hides the loading" if faster <= 1.1 * rest + _HANDOVER else "loads faster"
        shards = (
            " The dataset is iterable: it must divide its items among the workers, and one without "
            "a shard of its own loads nothing."
        )
        bound = "at most " if shared else ""
        beside = f", and other programs use {foreign:.0f}% of them" if shared else ""
        advice = (
            f"{measured}. num_workers={workers} {hides}: {bound}{PROMISE}. {setup.cpus} CPUs are "
            f"usable{beside}.{shards if loader.iterable and workers > 1 else ''}"
        )
        return advice, (step - faster) / wait, workers
    why = f"with num_workers={loader.num_workers} and {setup.cpus} usable CPUs"
    more = "would not help"
    less = "load less per batch, or prepare the data ahead of training (decoded, resized, cached)"
    if setup.batches_per_epoch == 1:
        less = "an epoch has one batch, and workers load ahead within an epoch. Use longer epochs"
    elif floor >= (1 - worthwhile) * step and shared:
        more = "help for certain only if loading waits, as for a network"
        less = f"other programs use {foreign:.0f}% of the CPUs. End them first, or {less}"
    elif contested:
        more = f"are not advised: they share the {counted(setup.cpus, 'CPU')} with torch's threads"
    elif on_cpus >= (1 - worthwhile) * step or workers == most:
        more = f"are not advised, because training uses the {counted(setup.cpus, 'CPU')}"
        if not needs_cpu and workers == most:
            more = f"than {most} are not advised, because {least.per_cpu} share a CPU then"
    none = f" {_no_workers(signals)}." if loader.num_workers else ""
    return f"{measured} ({why}). More workers {more}: {less}.{none}", None, None


def _no_workers(signals: Signals) -> str:
    """When loading without workers is faster: how long it may take is not measured with them."""
    cost = signals.per_batch(signals.waits + signals.restarts.seconds)
    return f"num_workers=0 is faster if it loads a batch in less than {duration(cost)}"


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


def epoch_restart(signals: Signals) -> Iterable[Impact]:
    """The first fetch of an epoch takes longer than usual, such as with new workers in each."""
    seconds, epochs = signals.restarts
    if epochs.sum() < 2:
        return
    loader = signals.setup.loader
    per_epoch = float(seconds.sum() / epochs.sum())
    advice = f"An epoch begins with {duration(per_epoch)} of waiting"
    workers = 0 if loader is None else loader.num_workers
    if signals.setup.reloads:
        often = "reload it less often (reload_dataloaders_every_n_epochs)"
        advice += f" for a new DataLoader: {often}."
    elif loader is not None and workers and not loader.persistent_workers:
        advice += f" for {workers} new workers: set persistent_workers=True in the DataLoader."
    else:
        advice += ". Use longer epochs."
    if workers:
        advice += f" {_no_workers(signals)}."
    slowest = max((row for row in signals.rows("dataloader_next") if row.name in RESTART),
                  key=signals.seconds)  # fmt: skip
    yield Impact(
        seconds, float(epochs.sum()), slowest.name, "dataloader_next", advice=advice,
        whole_run=True,
        evidence={"epochs": float(epochs.sum()), "seconds_per_epoch": per_epoch},
    )  # fmt: skip


class _Hooks(NamedTuple):
    """What one class does that takes time, the most costly first: one method, or all of them."""

    owner: str
    #: Seconds by method, without the windows of the warm-up.
    costs: Mapping[Action, float]
    #: Calls of the most costly one.
    calls: float
    #: What takes how long, as in a sentence.
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
        cost = float(signals.steady(signals.actions[row].seconds).sum())
        if cost and (dot or row.category == _SCHEDULERS) and not lightning:
            classes[owner][row] = cost
    for owner, costs in classes.items():
        rows = sorted(costs, key=costs.__getitem__, reverse=True)
        slowest, total = rows[0], sum(costs.values())
        rows = rows[:1] if costs[slowest] >= named * total else rows
        within = signals.within(rows)
        if _METRICS in within:  # the rank that is late waits least for the others
            within[_METRICS] = np.minimum(within[_METRICS], signals.shared(_METRICS))
        seconds = sum(within.values(), signals.nothing)
        calls = max(float(signals.steady(signals.actions[slowest].calls).sum()), 1.0)
        culprit = slowest.name
        if len(rows) == 1:
            per_call = float(signals.steady(seconds).sum()) / calls
            takes = f"{called(culprit)} takes {duration(per_call)} per call"
            evidence: dict[str, float | str] = {"calls": calls, "seconds_per_call": per_call}
        else:
            parts = [(row.name.partition(".")[2], costs[row] / total) for row in rows[:_LISTED]]
            split = ", ".join(f"{name} {share:.0%}" for name, share in parts)
            culprit = f"{culprit.partition('.')[0]} ({len(rows)} {kind})"
            takes = f"{culprit} takes {duration(signals.per_batch(seconds))} per batch ({split})"
            evidence = {kind: split}
        events = calls if calls < 0.5 * signals.steady(signals.counts).sum() else None
        impact = Impact(
            seconds, events, culprit, slowest.category, evidence=evidence, within=within
        )
        yield _Hooks(owner, {row: costs[row] for row in rows}, calls, takes, impact)


def callback_bound(signals: Signals, named: float) -> Iterable[Impact]:
    """Hooks of a callback or of the module, or a metric, take long: one impact per class.

    The culprit is a hook if it takes a share ``named`` of the class's time.
    """
    for hooks in _hooks(signals, "hooks", named, "callbacks", "other", _METRICS, _SCHEDULERS):
        advice = "Call its work less often, or move it off the training thread."
        if hooks.owner in signals.setup.ours:
            less = "record or report less often (schedule), or leave it out"
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
        regular = least * asked <= calls - epochs <= most * asked
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
    seconds = signals.category("checkpoint")
    saves = max(float(signals.total(writes).calls.sum()), 1.0)
    per_checkpoint = float(seconds.sum() / saves)
    interval = signals.batches / saves
    times = max(min(signals.share(seconds) / aim, saves / left), 2)
    rarer = max(round(interval * times), 2)
    slowest = max(rows, key=signals.seconds).name
    advice = (
        f"A checkpoint takes {duration(per_checkpoint)} and is written every "
        f"{counted(round(interval), 'batch')}. Every {rarer} batches gives {PROMISE} "
        "(ModelCheckpoint(every_n_train_steps=...)); save_weights_only=True writes less."
    )
    evidence = {
        "checkpoints": saves, "seconds_per_checkpoint": per_checkpoint, "batches_between": interval,
        "advised_batches_between": float(rarer),
    }  # fmt: skip
    yield Impact(
        seconds, saves, slowest.removeprefix("checkpoint writing (").removesuffix(")"),
        "checkpoint", evidence=evidence, advice=advice, saves=1 - interval / rarer, whole_run=True,
    )  # fmt: skip


def validation_bound(signals: Signals) -> Iterable[Impact]:
    """Validation takes long; the culprit is its largest part."""
    seconds = signals.category("validation")
    if not seconds.any():
        return
    # Checkpoints that are written meanwhile are apart.
    rows = [r for r in signals.actions if r.stage == "validate" and r.category != "checkpoint"]
    costs = {name: float(seconds.sum()) for name, seconds in signals.within(rows).items()}
    compilations = [r for r in signals.actions if (r.stage, r.category) == (COMPILE, "validation")]
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
        advice = (
            f"{culprit} takes {duration(signals.seconds(slowest) / max(calls, 1.0))} per call in "
            f"validation: do its work less often. {advice}"
        )
    yield Impact(  # too rare for a bootstrap
        seconds, 1.0, culprit, "validation", advice=advice, saves=0.5, whole_run=True,
        on_host=False, evidence={
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
