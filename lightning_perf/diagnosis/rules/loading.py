"""Rules about loading data, and what other numbers of DataLoader workers would give."""

from __future__ import annotations

from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.diagnosis.rules import LEAST, PROMISE, Impact, stretch_of, without_none
from lightning_perf.diagnosis.rules.ranks import behind_workers, by_category, late_rank
from lightning_perf.diagnosis.signals import COMPUTE, FETCH, RESTART, RUNNING, SAMPLER, WARM_UP
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from lightning_perf.diagnosis.rules.lateness import Lateness
    from lightning_perf.diagnosis.signals import Loader, Setup, Signals
    from lightning_perf.diagnosis.stats import Numbers

#: The cost of a worker per batch: the transfer to the main process.
_HANDOVER = 0.5e-3
#: Seconds that starting and ending a worker takes, assumed where it is not measured: one alone took
#: 46 ms on an idle machine, and each of 7 took 20 ms there, and 38 ms of CPU time.
_START = 0.04
#: The speed of CPUs that compute all at once, and if more processes compute than there are CPUs.
#: Measured on 2 CPUs: a batch of 7.0 ms then took 7.9, and 8.8 ms of loading 10.1 to 10.4 ms; two
#: workers and a training thread used 85 and 88 % of the CPUs, as batches have an order.
_ALL_BUSY, _CROWDED = 0.87, 0.74
#: The part of the usual time of starting an epoch from which on the first start was measured:
#: Lightning may fetch the first batch before training begins.
_MEASURED = 0.1
_DRAWN = (
    "The sampler runs in the main process, where DataLoader workers do not hide it: make it "
    "faster, or let it iterate over indices that were prepared before."
)
_COPIED = (
    "No workers are advised: the dataset or its collate_fn refers to the LightningModule, of which "
    "a worker has a copy that training does not update. Make the loading itself faster, such as by "
    "larger batches for the module, or pass only what training does not change."
)
_SHARDS = (
    " The dataset is iterable: it must divide its items among the workers, and one without a shard "
    "of its own loads nothing."
)


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


def _passed(
    signals: Signals, slow: stats.Slow, windows: NDArray[np.intp], seconds: Numbers
) -> Impact:
    """Training waited for data in some windows, and no longer does."""
    loader, start = signals.setup.loader, signals.windows[0].first.batch
    workers = 0 if loader is None else loader.num_workers
    begin, end = signals.windows[windows[0]].first.batch, signals.windows[windows[-1]].last.batch
    margin = float(signals.counts[windows[0]])
    if signals.series is not None and signals.loading_stalls is not None:
        found = signals.loading_stalls.stalls.positions + signals.dropped + start
        found = found[(begin - margin <= found) & (found < end + margin)]
        parts = np.split(found, np.flatnonzero(np.diff(found) > 2 * max(workers, 1)) + 1)
        if len(longest := max(parts, key=len)):  # others are stalls
            begin, end = int(longest[0]), int(longest[-1]) + 1
            begin = start if begin - start <= WARM_UP else begin  # which has no stalls
            margin = 0.1 * (end - begin)
    begins = windows[0] == 0
    if not begins and signals.series is None:
        margin = inf
    stretch = stretch_of(signals, begin, end, margin)
    advice = (
        f"Only {stretch} waited for data, {duration(slow.usual + slow.longer)} per batch "
        f"({duration(float(seconds.sum()))} in all), and others {duration(slow.usual)}. This is "
        "over: later epochs gain nothing."
    )
    if begins:
        advice += " A cache that fills does so; the share falls with the length of the run."
        if loader is not None and not workers:
            advice += " Workers can shorten it in a new run."
    else:
        advice += " Look for what used storage, the network or the CPUs then."
    return Impact(
        seconds, 1.0, FETCH, "dataloader_next", advice=advice, saves=0.0, whole_run=True,
        evidence={"first_batch": float(begin), "last_batch": float(end - 1)},
        certain=1 - signals.more_foreign(seconds > 0) if workers else 1.0, highest="warning",
    )  # fmt: skip


def _of_all_ranks(
    signals: Signals, waits: Numbers, lateness: Lateness
) -> tuple[Numbers, dict[str, Numbers] | None, str]:
    """The waits of a rank and those of the ranks that wait for it: the sum, its parts, and advice.

    The sum is by window, the parts by category.
    """
    late, others = late_rank(signals, lateness)
    if late is None or not behind_workers(signals, late, others):
        return waits, None, ""
    within = {} if signals.on_device else by_category(signals, others, late.ranks)
    if within:
        within["dataloader_next"] = within["dataloader_next"] + waits
    text = (
        f" The other ranks wait for {late.name}; their workers may be as slow, or not: follow this "
        f"on all ranks. If it gains nothing, compare the storage and the data of {late.name}."
    )
    return waits + others, within, text


def input_bound(signals: Signals, least: Workers, lateness: Lateness) -> Iterable[Impact]:
    """Batches are not ready when training needs them, except stalls of single batches.

    What ranks wait for one whose workers are late counts, too: theirs may be as slow.
    """
    waits, step, stalled = signals.waits, signals.step_seconds, signals.loading_stalls
    if stalled is not None and stalled.category and signals.series is None:
        waits = np.maximum(waits - stalled.excess, 0.0)
    drawing, loader = signals.drawn * waits, signals.setup.loader
    waits = waits - drawing
    waits, within, behind = _of_all_ranks(signals, waits, lateness)
    slow = stats.slow(waits, signals.counts, LEAST, ratio=3.0)
    passed = None
    if slow is not None:
        passed = slow.passed(signals.counts)
        slow = slow._replace(longer=signals.series or slow.longer)
    if slow is not None and passed is not None:
        if not (signals.start and passed[0][-1] == 0):  # that is the warm-up
            yield _passed(signals, slow, *passed)
        waits, step, slow = waits - passed[1], step - signals.per_batch(passed[1]), None
    wait, workers = signals.per_batch(waits), 0 if loader is None else loader.num_workers
    sampler = signals.slowest(signals.samplers)
    if sampler is not None:
        draws = signals.per_batch(drawing)
        # The longer training waits for workers, the likelier a faster sampler waits for them, too.
        certain = max(1 - wait / draws, 0.0) if workers and draws else 1.0
        yield Impact(
            drawing, culprit=sampler.name, phase="dataloader_next", certain=certain,
            advice=f"Drawing indices takes {duration(draws)} per batch. {_DRAWN}",
        )  # fmt: skip
    if slow is not None:  # what hides the loading of slow batches hides that of others
        step, wait = step - wait + slow.usual + slow.longer, slow.usual + slow.longer
    saves: float | None = None
    advised: int | None = None
    advice = (
        f"Each batch is waited for {duration(wait)}. Load batches in the background: "
        "the training data does not come from a DataLoader."
    )
    if loader is not None and not loader.alone:
        advice = (
            f"Each batch is waited for {duration(wait)}. How much of it more workers hide is not "
            "known: there are several DataLoaders, or code of your own works on batches in the "
            "main process, as an __iter__ around theirs. Time each of them alone."
        )
    elif loader is not None:
        loading = _Loading(signals, loader, wait, step, least)
        advice, saves = loading.advice(), loading.saves
        advised = None if saves is None else loading.best
    evidence = without_none(
        wait_seconds=wait, step_seconds=step,
        cpu_percent=signals.average("system/cpu_util_simple"),
        iowait_percent=signals.average("system/cpu_iowait"),
        num_workers=None if loader is None else workers,
        advised_workers=advised, usable_cpus=signals.setup.cpus,
    )  # fmt: skip
    if (signals.foreign or 0.0) > least.named:
        evidence["foreign_percent"] = signals.foreign or 0.0
    yield Impact(
        waits, None if slow is None else float(len(slow.stretches)), FETCH, "dataloader_next",
        evidence=evidence, advice=advice + behind, saves=saves, whole_run=slow is not None,
        certain=signals.cpus_left if workers else 1.0, within=within,
    )  # fmt: skip


class _Loading:
    """What a batch takes with a number of DataLoader workers. All times are seconds per batch.

    Workers load while training computes, as far as there are CPUs for both.
    """

    def __init__(
        self, signals: Signals, loader: Loader, wait: float, step: float, limits: Workers
    ) -> None:
        setup, self._loader, self._wait, self._limits = signals.setup, loader, wait, limits
        self._setup, self._signals = setup, signals
        #: The time now, and without waiting for the batch.
        self.step = step
        self.rest = max(self.step - wait, 1e-6)
        # Workers that start, or that validation waits for, do not load batches of training.
        self._apart = signals.per_batch(signals.restarts.seconds + signals.category("validation"))
        #: The time of one worker for a batch.
        self.fetch = loader.num_workers * (self.step - self._apart) or wait
        # Workers need CPUs that the model and other programs use, too.
        self._foreign = signals.foreign or 0.0
        busy = (signals.average("system/cpu_util_simple") or 0.0) - self._foreign
        self._needs_cpu = busy >= limits.busy or _loads_on_cpu(signals, loader, wait)
        # Loading that waits for disks needs no CPU.
        left = setup.cpus * (1 - self._foreign / 100)
        self._free = left if self._needs_cpu else inf
        self._most = max(setup.cpus if self._needs_cpu else limits.per_cpu * setup.cpus, 1)
        own = _cpu_seconds(signals) or 0.0
        # What is promised is a bound: a fair scheduler also gives a part of what others use now.
        self._on_cpus = own / max(left, 1e-6)
        self._floor = max(self.rest + _HANDOVER, self._on_cpus)
        self._worthwhile = limits.more if loader.num_workers else limits.first
        slowed = self._beside_threads(own)
        #: Whether workers take CPUs from threads of torch.
        self._contested = slowed > self._floor
        if self._contested:
            # From all to none of the idle CPU time can be used.
            self._floor, self._free = (self._floor + slowed) / 2, inf
            self._worthwhile = limits.contested

    def _beside_threads(self, own: float) -> float:
        """The time if threads of torch wait for the one that shares its CPU with a worker.

        ``own`` are the CPU seconds of a batch, the loading included.
        """
        threads = _computing(self._setup)
        if threads < 2:
            return self._floor
        if self._floor > self.rest + _HANDOVER:  # there are too few CPUs
            return max(self.step, self._floor)
        if threads < self._free:
            return self._floor
        # All threads compute for a part of the time, and one for the rest.
        waited = self.step - self.rest
        computing = max(own - waited, 0.0) / self.rest
        return self._floor + waited * min(max((computing - 1) / (threads - 1), 0.0), 1.0)

    def seconds(self, workers: int) -> float:
        """The time with so many workers."""
        slower = self._speed(self._loader.num_workers) / self._speed(workers)
        return slower * max(self._floor, self._apart + self.fetch / workers)

    def _speed(self, workers: int) -> float:
        """The speed of CPUs if so many workers compute beside training."""
        spare = self._free - workers - _computing(self._setup)
        return 1.0 if spare > 0.5 else _ALL_BUSY if spare > -0.5 else _CROWDED

    @cached_property
    def best(self) -> int:
        """The number of workers that hides the loading, or is the fastest."""
        # A tenth more than needed: workers do not finish in step.
        needed = max(ceil(1.1 * self.fetch / max(self._floor - self._apart, 1e-6)), 1)
        needed = min(needed, self._most)
        # Those with a CPU of their own, unless more are faster.
        alone = int(min(needed, max(self._free - _computing(self._setup) + 0.5, 1)))
        return needed if self.seconds(alone) > 1.1 * self.seconds(needed) else alone

    @cached_property
    def saves(self) -> float | None:
        """The part of the wait that the best number saves; None if it is not worthwhile."""
        workers, copied = self._loader.num_workers, self._loader.uses_module
        if copied or self.best <= workers or not self._is_worthwhile(self.advised):
            return None
        return (self.step - self.advised) / self._wait

    @property
    def advised(self) -> float:
        """The time with the best number of workers."""
        workers, batches = self._loader.num_workers, self._setup.batches_per_epoch
        # Nothing loads the first batch of an epoch ahead.
        begin = 0.0 if workers else self.fetch
        if self._setup.reloads:
            begin += _START * (self.best - workers)
        return self.seconds(self.best) + (begin / batches if batches else 0.0)

    def _is_worthwhile(self, seconds: float) -> bool:
        return seconds < (1 - self._worthwhile) * self.step

    def advice(self) -> str:
        """The settings to change, with what was measured."""
        if self._loader.uses_module:
            return f"{_COPIED} {self._measured()}"
        return self._no_more() if self.saves is None else self._more()

    def _measured(self) -> str:
        loader, size = self._loader, self._loader.batch_size
        batch = f"a batch of {size}" if size else "a batch"
        item = f", {duration(self.fetch / size)} per item" if size else ""
        # If training waits for the handover only, workers load faster than it asks.
        worker = "a worker up to " if loader.num_workers else ""
        return (
            f"Loading {batch} takes {worker}{duration(self.fetch)}{item}; without waiting, a batch "
            f"takes {duration(self.rest)}."
        )

    def _more(self) -> str:
        faster, cpus = self.advised <= 1.1 * self.rest + _HANDOVER, self._setup.cpus
        bound = beside = keep = start = ""
        if self._foreign > self._limits.named:
            bound, beside = "at most ", f", and other programs use {self._foreign:.0f}% of them"
        if self._setup.reloads:
            start = f" Starting a worker is assumed to take {duration(_START)}, in each epoch."
        elif self._signals.restarts.calls.sum() > 1 and not self._loader.persistent_workers:
            keep = ", persistent_workers=True"
        return (
            f"num_workers={self.best}{keep} {'hides the loading' if faster else 'loads faster'}: "
            f"{bound}{PROMISE}. {self._measured()} {cpus} CPUs are usable{beside}.{start}"
            f"{_SHARDS if self._loader.iterable and self.best > 1 else ''}"
        )

    def _no_more(self) -> str:
        workers, cpus = self._loader.num_workers, counted(self._setup.cpus, "CPU")
        more = "would not help"
        less = (
            "load less per batch, or prepare the data ahead of training (decoded, resized, cached)"
        )
        if self._setup.batches_per_epoch == 1:
            less = (
                "an epoch has one batch, and workers load ahead within an epoch. Use longer epochs"
            )
        elif self._foreign > self._limits.named and not self._is_worthwhile(self._floor):
            more = "help for certain only if loading waits, as for a network"
            less = f"other programs use {self._foreign:.0f}% of the CPUs. End them first, or {less}"
        elif self._contested:
            more = f"are not advised: they share the {cpus} with torch's threads"
        elif not self._is_worthwhile(self._on_cpus) or self.best == self._most:
            more = f"are not advised, because training uses the {cpus}"
            if not self._needs_cpu and self.best == self._most:
                each = self._limits.per_cpu
                more = f"than {self._most} are not advised, because {each} share a CPU then"
        none = f" {_without_workers(self._signals)}." if workers else ""
        why = f"with num_workers={workers} and {self._setup.cpus} usable CPUs"
        return f"More workers {more} ({why}): {less}. {self._measured()}{none}"


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


def _computing(setup: Setup) -> int:
    """Threads of training that compute on CPUs."""
    return min(setup.threads, setup.cpus) if setup.device == "cpu" else 1


def _ahead(signals: Signals) -> float:
    """Seconds per epoch in which samplers draw what workers load ahead, at its start."""
    seconds, calls = signals.total(signals.samplers)
    loader = signals.setup.loader
    ahead = 0 if loader is None else loader.prefetch_factor * loader.num_workers
    return float(ahead * seconds.sum() / max(calls.sum(), 1.0))


def _without_workers(signals: Signals) -> str:
    """When loading without workers is faster: how long it may take is not measured with them."""
    seconds, epochs = signals.restarts
    starts = np.maximum(seconds - _ahead(signals) * epochs, 0.0)
    cost = signals.per_batch((1 - signals.drawn) * signals.waits + starts)
    return f"num_workers=0 is faster if it loads a batch in less than {duration(cost)}"


def epoch_restart(signals: Signals) -> Iterable[Impact]:
    """The first fetch of an epoch takes longer than usual, such as with new workers in each."""
    seconds, epochs = signals.restarts
    if epochs.sum() < 2:
        return
    loader = signals.setup.loader
    per_epoch = float(seconds.sum() / epochs.sum())
    if epochs[0] == 1 and seconds[0] < _MEASURED * per_epoch:
        per_epoch = float(seconds.sum() / (epochs.sum() - 1))
    advice, saves = f"An epoch begins with {duration(per_epoch)} of waiting", None
    workers = 0 if loader is None else loader.num_workers
    slowest = max((row for row in signals.rows("dataloader_next") if row.name in RESTART),
                  key=signals.seconds)  # fmt: skip
    sampler = signals.slowest(signals.samplers)
    if sampler is not None and _ahead(signals) > per_epoch / 2:
        slowest = sampler
        advice += f", mostly for the indices of the batches that workers load ahead. {_DRAWN}"
    elif signals.setup.reloads:
        often = "reload it less often (reload_dataloaders_every_n_epochs)"
        advice += f" for a new DataLoader: {often}."
    elif loader and workers and not (loader.persistent_workers or loader.uses_module):
        first = f" or the first indices of {SAMPLER}{loader.sampler}" if loader.sampler else ""
        keep = "set persistent_workers=True in the DataLoader"
        keep += ", or make the sampler start faster" if first else ""
        if loader.iterable:  # which workers iterate anew in each epoch, also if they persist
            keep += ", and prepare in the dataset's constructor what its __iter__ does first"
        else:
            keep += f", for {PROMISE} at best"
            saves = 1 - seconds[0] / float(seconds.sum())  # the first epoch starts them in any case
        advice += f" for {counted(workers, 'new worker')}{first}: {keep}."
    else:
        advice += ". Use longer epochs."
    if workers:
        advice += f" {_without_workers(signals)}."
    yield Impact(
        seconds, float(epochs.sum()), slowest.name, "dataloader_next", advice=advice,
        saves=saves, whole_run=True,
        evidence={"epochs": float(epochs.sum()), "seconds_per_epoch": per_epoch},
    )  # fmt: skip
