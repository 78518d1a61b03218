"""The input of rules: the windows of a run, and further measurements of rank 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from lightning_perf.diagnosis import stats
from lightning_perf.timing.clock import QUEUE
from lightning_perf.timing.totals import CATEGORIES, Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis.stats import Numbers

#: Pseudo-stages of costs: collections, by where they ran, and compilation.
GC, COMPILE = "gc", "compile"
#: Time in which the training thread was ready to run but had no CPU.
WAITING = Action(QUEUE, "", "waiting")
#: The CPU time of the training thread.
RUNNING = Action(QUEUE, "", "running")
#: Categories of a batch's own work.
COMPUTE = ("forward", "backward", "optimizer_step")
#: Categories of the time of batches. Nested validation is between them.
IN_BATCHES = tuple(name for name in CATEGORIES if name != "validation")
#: Hooks that callbacks and modules run before the first batch.
BEFORE = (".on_train_start", ".on_train_epoch_start")
#: The name of the parts of categories in which ranks wait for one another, and their columns: the
#: whole wait, and what of it is the exchange itself.
WAITS = "waits"
_WAITS = {
    "other": ("waits/start", "waits/exchange/start"),
    "forward": ("waits/forward", "waits/exchange/forward"),
    "backward": ("waits/backward", "waits/exchange"),
    "reduce_metrics": ("timings/reduce_metrics", "timings/reduce_metrics"),
    "validation": ("waits/validation", "waits/validation"),
}
#: The same by the GPU's clock.
_DEVICE_WAITS = {
    "other": ("waits/device/start", "waits/exchange/start"),
    "backward": ("waits/device/backward", "waits/exchange"),
    "reduce_metrics": _WAITS["reduce_metrics"],
}
#: The column of the exchange by that of the whole wait.
EXCHANGES = dict((*_WAITS.values(), *_DEVICE_WAITS.values()))
#: Batches of the warm-up: what callbacks after ours do in the first one is part of the second.
WARM_UP = 2
#: Categories in which long batches have rules of their own.
NAMED = ("callbacks", "logging", "checkpoint")
#: Hooks after the exchange of gradients: ranks wait next at the start of the following batch.
_AFTER_GRADIENTS = (
    ".on_after_backward", ".on_before_optimizer_step", ".configure_gradient_clipping",
    ".on_train_batch_end",
)  # fmt: skip
#: Windows, as calls, in which one of our own profilers recorded.
RECORDING = Action("recorder", "", "recording")
#: The squares of the seconds of collections, as seconds.
SQUARES = Action("gc squares", "", "squares")
#: The number of batches after which checkpoints were written, as calls; files are not counted.
SAVES = Action("checkpoints", "", "saves")
#: Stages of costs that are part of others.
_APART = (GC, COMPILE, QUEUE, RECORDING.stage, SQUARES.stage, SAVES.stage)
#: Names of the fetches of batches, and of further costs of an epoch.
FETCH, RESTART = "train_dataloader_next", ("iter", "first fetch")
#: The beginning of the names of drawing indices, in the main process, within usual fetches.
SAMPLER = "sampler "
#: The end of the names of classes whose methods are collectives.
STRATEGY = "Strategy"
#: The column of batches that were timed on the device.
_DEVICE_BATCHES = "timings/device/batches"
#: Percent of the CPUs in use above which threads wait for one.
FULL = 90.0
#: Actions that occur in fewer than this share of batches are rare: not in each of them.
_RARE = 0.9
#: An action has a category to itself if all in it takes as long but for this part.
_ALONE = 0.2
#: Steps of the optimizer per stall, up to which the steps are the stalls.
_STEPS_PER_STALL = 2
#: The number of batches among which a stall is far longer than most.
_BESIDE = 20
#: If more than this share of stalls follow another one at once, they are slow batches in series.
_IN_SERIES = 0.8
#: The first of some events sets something up if it takes this many times as long as a later one.
_SET_UP = 3.0
#: The part of the usual time of events that one has at least.
_WORKS = 0.1
#: The share of the time that two ranks may wait for each other by chance at one point.
_CHANCE = 0.06
#: If waiting for batches may be this share of the time of stalls, they are stalls of workers.
_WAITED = 0.8


class Unknown(Exception):
    """A rule cannot decide; the message says why."""


@dataclass(frozen=True, slots=True)
class Loader:
    """The settings of a DataLoader."""

    num_workers: int = 0
    batch_size: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    #: Whether its dataset is an IterableDataset, which divides its items among workers itself.
    iterable: bool = False
    #: The class of the user's sampler; empty if it is torch's.
    sampler: str = ""
    #: Whether it does all of the loading: there is no other one, and its iterator is torch's.
    alone: bool = True
    #: Whether the dataset or what collates its items refers to the LightningModule.
    uses_module: bool = False
    #: Batches that each worker loads ahead.
    prefetch_factor: int = 2


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of the Trainer and the machine, for advice."""

    device: str = "cpu"
    world_size: int = 1
    #: CPUs that this process may use, and threads that torch uses.
    cpus: int = 1
    threads: int = 1
    precision: str = "32-true"
    #: FLOP/s of products in this precision and in float32, where both were measured.
    peak_flops: float | None = None
    float32_peak_flops: float | None = None
    compiled: bool = False
    log_every_n_steps: int = 50
    batches_per_epoch: int | None = None
    automatic_optimization: bool = True
    #: Optimizer steps per batch: less than 1 with accumulated gradients.
    steps_per_batch: float = 1.0
    #: The class names of callbacks that write checkpoints, and whether all leave optimizers out.
    savers: frozenset[str] = frozenset()
    weights_only: bool = False
    #: Whether each epoch has a new DataLoader.
    reloads: bool = False
    loader: Loader | None = None
    validation_loader: Loader | None = None
    #: Class names of our own callbacks.
    ours: frozenset[str] = frozenset()


def follows_gradients(row: Action) -> bool:
    """Whether ranks wait for an action at the start of the next batch."""
    if row.category in ("logging", "checkpoint"):
        return True
    return row.name.rstrip(")").endswith(_AFTER_GRADIENTS)


def shared_waits(ranks: int) -> float:
    """The part of a rank's waits that each other rank has as well, on average.

    When one of the ``ranks - 1`` others is late, this rank and ``ranks - 2`` others wait for it.
    """
    return (ranks - 2) / (ranks - 1)


Ratio = TypeVar("Ratio", float, "Numbers")


def least_work(ratio: Ratio) -> Ratio:
    """How many times as much work explains a time that is longer by a ratio."""
    return 1 + 0.7 * (ratio - 1)


class Series(NamedTuple):
    """Seconds and calls of one cause in each window."""

    seconds: Numbers
    calls: Numbers


class Step(NamedTuple):
    """One batch; NaN for what does not count."""

    seconds: float
    flops: float
    begins_epoch: bool


class SetUp(NamedTuple):
    """What the first of some events takes beyond the others."""

    #: Seconds of the first one, and of a later one.
    first: float
    usual: float
    #: The difference, in the window of the first one.
    extra: Numbers


class Events(NamedTuple):
    """Validations, or checkpoints."""

    #: The batches that they follow, without one after the last batch.
    positions: NDArray[np.intp]
    #: Seconds of each, also of one after the last batch; empty if unknown.
    seconds: Numbers
    #: What the first one takes beyond later ones; None if it is like them.
    set_up: SetUp | None

    @property
    def usual(self) -> Numbers:
        """Seconds of each, without what the first one sets up."""
        first = self.set_up
        return self.seconds if first is None else np.append(first.usual, self.seconds[1:])


class Stalled(NamedTuple):
    """Batches that take far longer than others in one category."""

    #: Empty if it is unknown.
    category: str
    stalls: stats.Stalls
    #: Their excess in each window that no rare event and no wait for other ranks explains. Rare
    #: events have names: checkpoints, callbacks and loggers that work occasionally, steps of the
    #: optimizer after accumulated batches, collections, compilations and starts of epochs.
    excess: Numbers


@dataclass(frozen=True)
class Signals:
    """Everything measured of a run so far.

    Example:
        >>> Signals(windows=[]).batches
        0
    """

    #: The windows of training, in order; the first one is the warm-up: the first batches, and
    #: what runs before them.
    windows: Sequence[Window]
    #: Seconds of the latest batches, in order; NaN for the first one and where they are unknown.
    steps: Numbers = field(default_factory=lambda: np.empty(0))
    #: Model FLOPs of the same batches; NaN where they are unknown. Empty if all are.
    flops: Numbers = field(default_factory=lambda: np.empty(0))
    #: Which of these batches were the first ones of their epochs.
    firsts: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    #: Batches before the first one in ``steps``.
    dropped: int = 0
    #: Seconds of the first batch of the run.
    first_step: float | None = None
    #: Model FLOPs utilization; None if unknown.
    mfu: float | None = None
    setup: Setup = Setup()
    #: Whether the training hung, which has a report of its own.
    hung: bool = False
    #: Seconds of each of ``CATEGORIES`` in the same batches as ``steps``; no rows if unknown.
    phases: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, len(CATEGORIES))))

    # -- windows ------------------------------------------------------------------------------

    @cached_property
    def batches(self) -> int:
        """Batches of all windows, on this rank."""
        return sum(window.batches for window in self.windows)

    @property
    def reached(self) -> tuple[int, bool]:
        """Batches of all windows, and whether the last one has what follows the last batch."""
        return self.batches, bool(self.windows) and self.windows[-1].at_end

    @cached_property
    def start(self) -> int:
        """The first window after the warm-up."""
        return 1 if self.counts[1:].any() else 0

    @cached_property
    def counts(self) -> Numbers:
        """Batches in each window."""
        return np.array([window.batches for window in self.windows], dtype=float)

    @property
    def nothing(self) -> Numbers:
        """0 seconds in each window."""
        return np.zeros(len(self.windows))

    @cached_property
    def wall(self) -> Numbers:
        """Wall seconds of each window, mean over ranks."""
        return sum(self.spent.values(), self.nothing)

    @cached_property
    def spent(self) -> dict[str, Numbers]:
        """Seconds of all categories in each window, mean over ranks, with all that is in them."""
        return {
            name: np.array([window.mean(f"timings/{name}") for window in self.windows])
            for name in CATEGORIES
        }

    def category(self, name: str) -> Numbers:
        """Seconds of a category in each window, without collections and compilations in it."""
        seconds = self.spent[name]
        for stage in (GC, COMPILE):
            rows = [row for row in self.actions if (row.stage, row.category) == (stage, name)]
            seconds = seconds - self.total(rows).seconds
        return np.maximum(seconds, 0.0)

    def shared(self, name: str) -> Numbers:
        """Seconds of a category that all ranks spend: a rank that spends more is a straggler."""
        least: Numbers = self.work[name].min(axis=1) + self.exchanged(name)
        return np.minimum(self.category(name), least)

    def exchanged(self, name: str) -> Numbers:
        """Seconds of a category in which ranks exchange values: the least wait of a rank."""
        if self.on_device or name not in self.mutual:
            return self.nothing
        return np.array([window.least(_WAITS[name][1]) for window in self.windows])

    @cached_property
    def on_device(self) -> bool:
        """Whether ranks wait by the GPU's clock: the host may do anything meanwhile."""
        return bool(self.windows) and "waits/device/backward" in self.windows[0].columns

    @cached_property
    def mutual(self) -> dict[str, Numbers]:
        """Seconds in each window that ranks wait for one another, by category, mean over ranks.

        Without the exchange of values itself. Empty if they are not measured.
        """
        return self._waited(lambda window, wait: window.mean(wait))

    @cached_property
    def _own_waits(self) -> dict[str, Numbers]:
        """The same of this rank alone, within batches."""
        waits = self._waited(lambda window, wait: window.own(wait))
        return {category: each for category, each in waits.items() if category != "validation"}

    def _waited(self, seconds: Callable[[Window, str], float]) -> dict[str, Numbers]:
        """The same, given what to take of a column of waiting."""
        if not self.windows or "waits/exchange" not in self.windows[0].columns:
            return {}
        names = _DEVICE_WAITS if self.on_device else _WAITS
        waits = {
            category: np.array([seconds(each, wait) - each.least(least) for each in self.windows])
            for category, (wait, least) in names.items()
        }
        return {category: np.maximum(each, 0.0) for category, each in waits.items()}

    @cached_property
    def work(self) -> dict[str, NDArray[np.float64]]:
        """Seconds by category in each window on each rank, without waiting for other ranks."""
        work = {
            name: np.array([window[f"timings/{name}"] for window in self.windows])
            for name in CATEGORIES
        }
        for name in () if self.on_device else self.mutual:
            work[name] -= [window[_WAITS[name][0]] for window in self.windows]
        return work

    def own_work(self, name: str) -> Numbers:
        """The same of a category on this rank."""
        rank = self.windows[0].rank if self.windows[0].world_size > 1 else 0
        return self.work[name][:, rank]

    def lost(self, within: Mapping[str, Numbers]) -> dict[str, Numbers]:
        """What all ranks lose by seconds of this one's actions, by category, mean over ranks.

        While it does what others do not, these wait for it. In collectives of metrics ranks wait
        as well: the last one least.
        """
        lost, waits = {}, self.nothing
        for name, seconds in within.items():
            if name == "reduce_metrics":
                lost[name] = np.minimum(seconds, self.shared(name))
                continue
            part = self.work[name].mean(axis=1) / np.maximum(self.own_work(name), 1e-12)
            lost[name] = np.minimum(part, 1.0) * seconds
            waits = waits + seconds - lost[name]
        return lost if self.on_device else lost | {WAITS: waits}

    def delaying(self, rows: Sequence[Action]) -> dict[str, Numbers]:
        """Seconds of some actions in each window, by category, without what no rank waits for.

        What this rank spends more than others is hidden as far as another one is later anyway.
        """
        within, parts = self.within(rows), self._waited_parts
        for row in rows:
            if row in parts:
                hidden = (1 - parts[row]) * self._excess(row)
                within[row.category] = within[row.category] - hidden
        return within

    @cached_property
    def _beyond_others(self) -> dict[str, Numbers]:
        """The part of this rank's work that not all ranks have, by category."""
        return {
            name: 1 - self.work[name].min(axis=1) / np.maximum(self.own_work(name), 1e-12)
            for name in (*NAMED, "other")
        }

    @cached_property
    def _waited_parts(self) -> dict[Action, Numbers]:
        """The part of this that others wait for in each window, by action.

        Late ones follow the exchange of gradients. All share what others wait: no second is in two.
        Empty if ranks do not wait both for gradients and at the start of batches.
        """
        waits = {
            name: np.array([window[column] for window in self.windows])
            for name, (column, _) in (_WAITS if self.mutual and not self.on_device else {}).items()
        }
        if not all(name in waits and waits[name].any() for name in ("other", "backward")):
            return {}
        rank, ranks = self.windows[0].rank, self.windows[0].world_size
        beyond = {
            name: np.maximum(each - [[window.least(_WAITS[name][1])] for window in self.windows], 0)
            for name, each in waits.items()
        }
        # What both wait may be by turns, or by chance.
        shared, chance = shared_waits(ranks), _CHANCE * self.wall[:, None]
        longer = {}
        for name, each in beyond.items():
            own, others = each[:, [rank]], np.delete(each, rank, axis=1)
            both = np.minimum(np.minimum(own, others), chance)
            longer[name] = np.maximum(others - shared * own - (1 - shared) * both, 0.0)
        works = [self.work[name] for name in self._beyond_others]
        more = np.sum([each - each.min(axis=1, keepdims=True) for each in works], axis=0)
        others = np.delete(more, rank, axis=1)
        rows = self.rows(*self._beyond_others)
        late = [row for row in rows if follows_gradients(row)]
        early = [row for row in rows if not follows_gradients(row)]
        every, excess = more[:, rank], sum(map(self._excess, late), self.nothing)
        found = every * self._part(every, others + sum(longer.values()))
        last = np.minimum(excess * self._part(excess, others + longer["other"]), found)
        parts = self._parts(late, excess, last, beyond["other"], others)
        waited = sum((parts[row] * self._excess(row) for row in late), self.nothing)
        waits, left = np.sum([*beyond.values()], axis=0), others - waited[:, None]
        return parts | self._parts(early, every - excess, found - last, waits, left)

    def _excess(self, row: Action) -> Numbers:
        """Seconds of an action in each window that not all ranks have."""
        return self._beyond_others[row.category] * self.actions[row].seconds

    def _parts(
        self, rows: Sequence[Action], excess: Numbers, found: Numbers, waits: Numbers, more: Numbers
    ) -> dict[Action, Numbers]:
        """The part of the excess of each action that others wait for, as they do for ``found``.

        Another rank that is late hides an action in the batches in which it occurs: as much in each
        as this rank waits in each of the rest. Ranks wait ``waits``, and others have ``more`` work.
        """
        rank, part = self.windows[0].rank, np.clip(found / np.maximum(excess, 1e-12), 0.0, 1.0)
        rare, rest = {}, {}
        for row in rows:
            own, often = self._excess(row), self._often(row)
            hidden = waits[:, rank] * often / np.maximum(1 - often, 1e-12)
            rare[row] = np.where(often < _RARE, np.maximum(own - hidden, part * own), 0.0)
            rest[row] = np.where(often < _RARE, 0.0, part * own)
        first, second = (sum(each.values(), self.nothing) for each in (rare, rest))
        limit = np.maximum(more + np.delete(waits, rank, axis=1), 0.0)
        most = np.maximum((first + second) * self._part(first + second, limit), found)
        of_rare = np.minimum(most / np.maximum(first, 1e-12), 1.0)
        of_rest = np.clip((most - first) / np.maximum(second, 1e-12), 0.0, 1.0)
        return {
            row: (of_rare * rare[row] + of_rest * rest[row]) / np.maximum(self._excess(row), 1e-12)
            for row in rows
        }

    def _often(self, row: Action) -> Numbers:
        """The part of the batches of each window in which an action takes its time."""
        seconds, calls = self.actions[row]
        total, batches = self._working[row.category]
        # A hook of each batch may work in few of them.
        alone = np.abs(total - seconds) <= _ALONE * seconds
        calls = np.where(alone, np.minimum(calls, batches), calls)
        often: Numbers = np.minimum(calls / np.maximum(self.counts, 1.0), 1.0)
        return often

    @cached_property
    def _working(self) -> dict[str, tuple[Numbers, Numbers]]:
        """Seconds of these categories in the batches of each window, and in how many, if equal."""
        windows = self.windows_of(np.arange(len(self.phases) + 1))
        working = {}
        for name in self._beyond_others:
            values = np.append(self.phases[:, CATEGORIES.index(name)], self.after_last(name))
            total, squares = (
                np.bincount(windows, each, len(self.windows)).astype(float)
                for each in (values, values**2)
            )
            working[name] = total, total**2 / np.maximum(squares, 1e-24)
        return working

    def _part(self, excess: Numbers, others: Numbers) -> Numbers:
        """The part of an excess within what each other rank waits or does meanwhile."""
        limit = others.min(axis=1)
        if self.windows[-1].at_end:  # no rank waits for what follows the last batch
            limit[-1] += inf if self.dropped else sum(map(self.after_last, self._beyond_others))
        found = np.minimum(excess, limit)
        # For what is in the last batch of a window they may wait in the next one.
        found[:-1] += np.minimum((excess - found)[:-1], (limit - found)[1:])
        part: Numbers = np.where(excess > 0, found / np.maximum(excess, 1e-12), 1.0)
        return part

    def column(self, name: str) -> Numbers | None:
        """A column's sum over ranks in each window; None if there is no such column."""
        if not self.windows or name not in self.windows[0].columns:
            return None
        return np.array([window.total(name) for window in self.windows])

    def average(
        self, name: str, latest: bool = False, among: NDArray[np.bool_] | None = None
    ) -> float | None:
        """The mean of a sensor over the run, its ``latest`` window, or the windows ``among``.

        None if it was not sampled. Its seconds are in ``NAME/seconds``; the sensors of a GPU share
        theirs.
        """
        values, seconds = self.column(name), self.column(f"{name}/seconds")
        if seconds is None:
            seconds = self.column(f"{name.rpartition('/')[0]}/seconds")
        if values is None or seconds is None:
            return None
        sampled = seconds > 0 if among is None else among & (seconds > 0)
        windows = np.flatnonzero(sampled)[-1:] if latest else np.flatnonzero(sampled)
        return float(values[windows].sum() / seconds[windows].sum()) if len(windows) else None

    @cached_property
    def foreign(self) -> float | None:
        """Percent of the CPUs that other programs use; None if unknown."""
        return self.foreign_among(None)

    def foreign_among(self, windows: NDArray[np.bool_] | None) -> float | None:
        """Percent of the CPUs that other programs use in some windows, or in all for None."""
        sensors = ("system/cpu_util_simple", "system/process_cpu")
        use, own = (self.average(name, among=windows) for name in sensors)
        if use is None or own is None:
            return None
        return max(use - own / max(self.setup.cpus, 1), 0.0)

    def more_foreign(self, windows: NDArray[np.bool_]) -> float:
        """The share of the CPUs that other programs use in some windows beyond that in others.

        What they use all the time does not make some batches slow.
        """
        within, apart = map(self.foreign_among, (windows, ~windows))
        return 0.0 if within is None or apart is None else max(within - apart, 0.0) / 100

    @property
    def cpus_left(self) -> float:
        """The share of the CPUs that other programs leave; 1 if no thread waits for one.

        How long threads and processes other than the training thread wait is not measured.
        """
        busy = self.average("system/cpu_util_simple") or 0.0
        return 1 - min((self.foreign or 0.0) / 100, 1.0) if busy >= FULL else 1.0

    def gpu_averages(self, name: str, latest: bool = False) -> list[float]:
        """The mean of a sensor of each GPU that was sampled, as `average`."""
        columns = self.windows[0].columns if self.windows else ()
        means = [self.average(column, latest) for column in columns if column.endswith(f"/{name}")]
        return [value for value in means if value is not None and isfinite(value)]

    def gpu_average(self, name: str) -> float | None:
        """The mean of a GPU sensor over the time and the GPUs; None if it was not sampled."""
        means = self.gpu_averages(name)
        return float(np.mean(means)) if means else None

    @cached_property
    def gpu_idle(self) -> float | None:
        """Share of the time in which the GPUs had no work; None if unknown, or without a GPU."""
        use = self.gpu_average("gpu_util") if self.setup.device == "cuda" else None
        return None if use is None else max(1 - use / 100, 0.0)

    # -- shares -------------------------------------------------------------------------------

    def steady(self, values: Numbers) -> Numbers:
        """Without the windows of the warm-up."""
        return values[self.start :]

    def share(self, seconds: Numbers) -> float:
        """Share of the wall time, warm-up excluded."""
        wall = self.steady(self.wall).sum()
        return float(self.steady(seconds).sum() / wall) if wall > 0 else 0.0

    def per_batch(self, seconds: Numbers) -> float:
        """Seconds per batch, warm-up excluded."""
        return float(self.steady(seconds).sum() / max(self.steady(self.counts).sum(), 1.0))

    def usual(self, name: str, seconds: Numbers) -> float:
        """The maximum of seconds in the warm-up that may come again, of a category.

        These are as many per batch as later, or as many as the longest later batch has: work of
        every 100th batch may be in the first one, too.
        """
        most = self.by_batch(name) if name in CATEGORIES else self.nothing[:0]
        return max(float(self.counts[0]) * self.per_batch(seconds), float(np.max(most, initial=0)))

    @property
    def warm_steps(self) -> int:
        """The number of batches in ``steps`` that are of the warm-up."""
        return max(WARM_UP - self.dropped, 0)

    def by_batch(self, name: str) -> Numbers:
        """Seconds of a category in each batch, warm-up excluded; empty if unknown."""
        return self.phases[self.warm_steps :, CATEGORIES.index(name)]

    @cached_property
    def long(self) -> dict[str, stats.Stalls]:
        """The batches after the warm-up in which a category takes far longer than in others."""
        return {name: stats.stalls(self.by_batch(name)) for name in IN_BATCHES}

    @cached_property
    def saves(self) -> float:
        """How often checkpoints were written; infinite if that is not known."""
        return float(self.actions[SAVES].calls.sum()) if SAVES in self.actions else inf

    def after_last(self, name: str) -> float:
        """Seconds of a category after the last batch of training; 0 if they are not known."""
        batches, ended = self.reached
        if not ended or len(self.phases) != batches:
            return 0.0
        own = sum(window.own(f"timings/{name}") for window in self.windows)
        return max(own - float(self.phases[:, CATEGORIES.index(name)].sum()), 0.0)

    @cached_property
    def events(self) -> dict[str, Events]:
        """The validations and the checkpoints of the run."""
        return {name: self._events(name) for name in ("validation", "checkpoint")}

    def _events(self, name: str) -> Events:
        """The events of a category.

        Hooks that write no checkpoint take little time beside those that do, and do not count.
        """
        values = self.phases[:, CATEGORIES.index(name)]
        most = min(self.saves if name == "checkpoint" else inf, float(np.count_nonzero(values)))
        largest = np.argsort(-values)[: int(most)]
        level = _WORKS * np.median(values[largest]) if len(largest) else 0.0
        at = np.sort(largest[values[largest] > level])
        if self.dropped:
            return Events(at, values[:0], None)
        seconds: Numbers = values[at]
        last, complete = self.after_last(name), name == "checkpoint" and len(at) == self.saves
        if not complete and last > (_WORKS * np.median(seconds) if len(at) else 0.0):
            seconds = np.append(seconds, last)
        return Events(at, seconds, self._set_up(at, seconds))

    def _set_up(self, at: NDArray[np.intp], seconds: Numbers) -> SetUp | None:
        if len(seconds) < 2:
            return None
        first, usual = float(seconds[0]), float(np.median(seconds[1:]))
        extra = self.nothing
        extra[self.windows_of(at[:1])] = first - usual
        return SetUp(first, usual, extra) if first > _SET_UP * usual else None

    @cached_property
    def step_seconds(self) -> float:
        """Wall seconds per batch, warm-up excluded."""
        return self.per_batch(self.wall)

    def typical(self, name: str) -> float:
        """Seconds of a category in a batch: the median of windows; of a GPU where it is timed."""
        device, batches = self.column(f"timings/device/{name}"), self.column(_DEVICE_BATCHES)
        seconds, counts = self.category(name), self.counts
        if device is not None and batches is not None and batches.any():
            seconds, counts = device, batches
        per_batch = seconds / np.maximum(counts, 1.0)
        return float(np.median(self.steady(per_batch)[self.steady(counts) > 0]))

    # -- named costs on rank 0 ----------------------------------------------------------------

    @cached_property
    def actions(self) -> dict[Action, Series]:
        """The cost of each named action in each window, without collections in it."""
        costs = [window.costs for window in self.windows]
        actions = {
            action: Series(*np.array([each.get(action, Cost(0.0, 0)) for each in costs], float).T)
            for action in dict.fromkeys(action for each in costs for action in each)
        }
        for own, (seconds, calls) in actions.items():
            collections = actions.get(Action(GC, own.category_in("train"), own.name))
            if collections is not None and own.stage not in _APART:
                actions[own] = Series(np.maximum(seconds - collections.seconds, 0.0), calls)
        return actions

    def total(self, rows: Sequence[Action]) -> Series:
        """The sum of some actions."""
        return Series(
            sum((self.actions[row].seconds for row in rows), self.nothing),
            sum((self.actions[row].calls for row in rows), self.nothing),
        )

    def within(self, rows: Sequence[Action]) -> dict[str, Numbers]:
        """Seconds of some actions in each window, by category."""
        names = dict.fromkeys(row.category for row in rows)
        return {n: self.total([row for row in rows if row.category == n]).seconds for n in names}

    def seconds(self, row: Action) -> float:
        """The total cost of a named action."""
        return float(self.actions[row].seconds.sum())

    def rows(self, *categories: str) -> list[Action]:
        """Named actions of some categories, without those that are part of validation."""
        return [
            row
            for row in self.actions
            if row.category in categories
            and row.category_in("train") == row.category
            and row.stage not in _APART
        ]

    def slowest(self, rows: Sequence[Action]) -> Action | None:
        """The action that cost most after the warm-up; None if none of them cost anything."""
        costs = {row: self.steady(self.actions[row].seconds).sum() for row in rows}
        return max(filter(costs.get, rows), key=costs.__getitem__, default=None)

    @cached_property
    def waiting(self) -> Numbers:
        """Seconds in each window in which the training thread was ready to run, but had no CPU."""
        return self.actions[WAITING].seconds if WAITING in self.actions else self.nothing

    @cached_property
    def asleep(self) -> dict[str, Numbers]:
        """The part of each category in which the training thread needed no CPU.

        This is known of windows. Computing does not sleep, unless it waits for other threads or
        ranks: then all categories may sleep, which changes no proportion, and counts as none.
        """
        setup = self.setup
        alone = setup.world_size == 1 and (setup.device != "cpu" or setup.threads == 1)
        host = [name for name in CATEGORIES if name not in (*COMPUTE, "validation")]
        part = self.nothing
        if RUNNING in self.actions and alone:
            slept = self.wall - self.actions[RUNNING].seconds - self.waiting
            spent = sum((self.spent[name] for name in host), self.nothing)
            part = np.clip(slept / np.maximum(spent, 1e-12), 0.0, 1.0)
        return dict.fromkeys(CATEGORIES, self.nothing) | dict.fromkeys(host, part)

    @cached_property
    def recordings(self) -> Numbers:
        """The windows so far in which one of our profilers recorded."""
        calls = self.actions[RECORDING].calls if RECORDING in self.actions else self.nothing
        return np.cumsum(calls)

    @cached_property
    def recorded(self) -> NDArray[np.bool_]:
        """The windows in which one of our profilers recorded, or handled a recording afterwards."""
        before = np.append(0.0, self.recordings)  # at each window's end
        recorded: NDArray[np.bool_] = before[1:] > np.append(0.0, before)[: len(before) - 1]
        return recorded

    # -- input ----------------------------------------------------------------------------------

    @cached_property
    def _starts(self) -> Series:
        """The cost of starting an epoch, beyond a usual fetch; calls are epochs.

        Without another fetch, in epochs of one batch, the first one is usual.
        """
        rows = [row for row in self.rows("dataloader_next") if row.name in RESTART]
        usual = self._fetches
        first = self.total([row for row in rows if row.name == "first fetch"])
        usual = usual if usual.calls.any() else first
        fetch = usual.seconds.sum() / max(usual.calls.sum(), 1.0)
        seconds = self.total(rows).seconds - fetch * first.calls
        return Series(np.maximum(seconds, 0.0), first.calls)

    @cached_property
    def restarts(self) -> Series:
        """The same without what the first one takes alone, which is part of the warm-up."""
        seconds, calls = self._starts
        later = float(calls[1:].sum())
        each = float(seconds[1:].sum() / max(later, 1.0))
        if self.start and calls[0] == 1 and (not later or seconds[0] > _SET_UP * each):
            seconds = np.append(each, seconds[1:])
        return Series(seconds, calls)

    @cached_property
    def samplers(self) -> list[Action]:
        """Samplers of the user's that drew the indices of batches."""
        return [row for row in self.rows("dataloader_next") if row.name.startswith(SAMPLER)]

    @cached_property
    def _fetches(self) -> Series:
        """The cost of usual fetches, with that of samplers."""
        fetches = self.total([row for row in self.rows("dataloader_next") if row.name == FETCH])
        return Series(fetches.seconds + self.total(self.samplers).seconds, fetches.calls)

    @cached_property
    def drawn(self) -> Numbers:
        """The part of usual fetches that samplers take."""
        drawn: Numbers = self.total(self.samplers).seconds / np.maximum(
            self._fetches.seconds, 1e-12
        )
        return drawn

    @cached_property
    def waits(self) -> Numbers:
        """Seconds of waiting for batches within epochs; those of a GPU, if they are fewer."""
        waits = np.maximum(self.shared("dataloader_next") - self._starts.seconds, 0.0)
        exposed, batches = self.column("timings/exposed_input"), self.column(_DEVICE_BATCHES)
        if exposed is None or batches is None or not batches.any():
            return waits
        return np.minimum(waits, self.counts * exposed / np.maximum(batches, 1.0))

    # -- steps ----------------------------------------------------------------------------------

    @cached_property
    def within_epochs(self) -> Numbers:
        """Seconds of batches, with NaN for the first batch of each epoch."""
        steps = self.steps.copy()
        steps[self.firsts] = np.nan
        return steps

    @cached_property
    def after_loading(self) -> Numbers:
        """The same without waiting for data, which has rules of its own, where that is known."""
        if not len(self.phases) or self.setup.device != "cpu":
            return self.within_epochs
        waits = self.phases[:, CATEGORIES.index("dataloader_next")]
        return np.maximum(self.within_epochs - waits, 0.0)

    @cached_property
    def stalls(self) -> list[Stalled]:
        """Batches that took far longer than others, by category.

        Batches with more FLOPs are left out, and categories with rules of their own.
        """
        steps = self.within_epochs.copy()
        steps[: self.warm_steps] = np.nan
        if not np.isfinite(steps).any():
            return []
        if np.isfinite(self.flops).any() and self.flops.any():
            longer = steps / np.nanmedian(steps)
            more = self.flops / max(float(np.nanmedian(self.flops)), 1.0)
            steps = np.where((longer > 1) & (more >= least_work(longer)), np.nan, steps)
        least, columns = 0.5 * float(np.nanmedian(steps)), enumerate(CATEGORIES)
        found = {
            name: stats.stalls(
                # Series of slow loading are searched elsewhere.
                np.where(np.isnan(steps), np.nan, self.phases[:, at]), least,
                0 if name == "dataloader_next" else _BESIDE,
            )
            for at, name in (columns if len(self.phases) else ())
            if name in IN_BATCHES
        }  # fmt: skip
        whole = stats.stalls(steps, beside=_BESIDE if found else 0)
        if sum(each.excess.sum() for each in found.values()) < 0.5 * whole.excess.sum():
            return [self._stalled("", stats.stalls(steps))]  # a GPU's, or in many parts
        return [self._stalled(name, each) for name, each in found.items() if name not in NAMED]

    def _stalled(self, category: str, stalls: stats.Stalls) -> Stalled:
        windows = self.windows_of(stalls.positions)
        excess = np.bincount(windows, stalls.excess, len(self.windows)).astype(float)
        rare = self._rare(len(stalls.positions))
        for costs in (rare, self._own_waits):
            excess -= costs.get(category, 0.0) if category else sum(costs.values(), self.nothing)
        return Stalled(category, stalls, np.maximum(excess, 0.0))

    @cached_property
    def loading_stalls(self) -> Stalled | None:
        """Those of loading, or of batches whose categories are unknown."""
        found = (each for each in self.stalls if each.category in ("", "dataloader_next"))
        return next(found, None)

    def windows_of(self, positions: NDArray[np.intp]) -> NDArray[np.intp]:
        """The windows of batches at some positions in ``steps``."""
        found = np.searchsorted(np.cumsum(self.counts), positions + self.dropped, side="right")
        return found.clip(0, max(len(self.windows) - 1, 0))

    @cached_property
    def series(self) -> float | None:
        """`series_of` for loading."""
        return None if self.loading_stalls is None else self.series_of(self.loading_stalls)

    def series_of(self, stalled: Stalled) -> float | None:
        """Seconds per batch of a series of slow batches, beyond the usual ones; None without one.

        Workers that are too slow deliver one batch each at the same time: the wait for all of them
        is in one batch.
        """
        stalls, excess = stalled.stalls, stalled.excess
        gaps, loader = np.diff(stalls.positions), self.setup.loader
        workers = 0 if loader is None else loader.num_workers
        waits = excess if stalled.category else np.minimum(self.waits, excess)
        loads = stalled.category in ("", "dataloader_next")
        waited = loads and waits.sum() >= _WAITED * excess.sum()
        apart = most = 1
        if waited and loader is not None and workers:
            # After a pause of training, all that was loaded meanwhile is ready or begun.
            apart, most = workers, workers * (2 + loader.prefetch_factor)
        together = gaps <= apart
        if not len(gaps) or np.median(gaps) > apart or np.mean(gaps <= most) <= _IN_SERIES:
            return None
        # Each of the series has as many batches after its last stall as between two of them.
        return float(stalls.excess.sum() / (np.mean(gaps[together]) * len(stalls.positions)))

    def _rare(self, stalls: int) -> dict[str, Numbers]:
        """Seconds per window of named events that do not occur in each batch, by category.

        Steps of the optimizer are such events if each of them stalls.
        """
        most = _RARE * max(self.counts.sum(), 1.0)
        limits = {"optimizer_step": min(most, _STEPS_PER_STALL * stalls)}
        rare = [
            row
            for row, series in self.actions.items()
            if (row.stage in (GC, COMPILE) and row.category != "validation")
            or row.category == "checkpoint"
            or (
                ("." in row.name or row.category in limits)
                and series.calls.sum() < limits.get(row.category, most)
            )
        ]
        return self.within([row for row in rare if row.stage != "validate"])
