"""Batches of each stage on this rank: their samples and tokens, and running totals."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import nan
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_perf.errors import let_through, warn
from lightning_perf.flops.batch import checked_count, counter_for, get_num_samples, get_num_tokens
from lightning_perf.run.compat import rank_zero_info

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from lightning_perf.flops.peaks import BatchCost
    from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceTimer

#: Records kept at most until they are folded.
MOST_RECORDS = 1000
#: The last timed batches, from which the usual step time is computed, and the most that one of them
#: counts, in medians: a recompilation is not usual.
_USUAL, _OUTLIER = 100, 4
#: How much a step time in proportion to the FLOPs weighs beside the timed steps: as much as steps
#: whose FLOPs have this variance, in squares of their mean. Few or similar steps give no slope.
_PROPORTIONAL = 0.1
#: The last steps, which are compared with earlier ones, and the ratio and the seconds by which they
#: then differ.
_LATEST, _CHANGED, _LEAST_CHANGE = 20, 1.4, 1e-3
#: Seconds that the end of a run waits for the device to complete its last batches.
DEVICE_TIMEOUT = 10.0

_ALL_SLOWED = (
    "lightning_perf: FLOPs were counted in every batch of stage {} after the first, which slows "
    "batches down. Throughput is a lower bound, and MFU is not reported."
)


_DEFINE = (
    "define get_num_{}_in_batch(batch) -> int on the LightningModule or the LightningDataModule."
)

_Counter = Callable[[Any], int]
_INFERRED: dict[str, _Counter] = {
    "get_num_samples_in_batch": get_num_samples,
    "get_num_tokens_in_batch": get_num_tokens,
}


class BatchRecord(NamedTuple):
    """One batch."""

    seconds: float
    #: None where they could not be counted.
    samples: int | None
    tokens: int | None
    #: Its FLOPs; None where they are unknown.
    cost: BatchCost | None
    #: Whether counting the FLOPs slowed it down.
    slowed: bool
    #: Whether it was the first of its stage, and of its epoch.
    first: bool
    begins_epoch: bool
    #: Seconds between the end of the previous batch and its step, where FLOPs are counted.
    waiting: float = 0.0
    #: The least and most seconds that counting took of it; None if they are unknown.
    counting: tuple[float, float] | None = None

    @property
    def timed(self) -> bool:
        """Whether its time is that of training."""
        return not (self.slowed or self.first)


class Sums(NamedTuple):
    """Running totals of batches, without the first of a stage.

    A batch that FLOP counting slowed down counts with the usual step time of its FLOPs, if counting
    explains the difference, and with its own waiting time. The names are those of the columns, with
    ``_`` for ``/``.
    """

    batch_seconds: float = 0.0
    batch_count: int = 0
    batch_samples: float = 0
    batch_tokens: float = 0
    flops_model: float = 0.0
    flops_ideal_seconds: float = 0.0
    flops_hardware_ideal_seconds: float = 0.0
    flops_causal_ideal_seconds: float = 0.0
    #: Seconds of batches with known FLOPs, and of skipped ones.
    flops_seconds: float = 0.0
    flops_batches: int = 0
    batch_uncounted_samples: int = 0
    batch_uncounted_tokens: int = 0
    flops_uncounted_batches: int = 0

    def plus(self, record: BatchRecord, seconds: float) -> Sums:
        """These totals and a batch, which counts with ``seconds``."""
        samples, tokens, cost = record.samples, record.tokens, record.cost
        skipped = cost is None and samples == 0  # by Lightning
        flops = (
            (0.0, 0.0, 0.0, 0.0, seconds if skipped else 0.0, 0)
            if cost is None
            else (
                cost.total, cost.ideal_seconds, cost.hardware_ideal_seconds,
                cost.causal_ideal_seconds, seconds, 1,
            )
        )  # fmt: skip
        unknown = samples is None, tokens is None, cost is None and not skipped
        return Sums(*map(add, self, (seconds, 1, samples or 0, tokens or 0, *flops, *unknown)))

    def since(self, earlier: Sums) -> Sums:
        """The increase since earlier totals."""
        return Sums(*map(sub, self, earlier))

    def shared(self, ranks: int) -> Sums:
        """This rank's part, where ranks share the samples and tokens of a batch."""
        samples, tokens = self.batch_samples / ranks, self.batch_tokens / ranks
        return self._replace(batch_samples=samples, batch_tokens=tokens)


#: The columns of `Sums`.
TIMED = tuple(name.replace("_", "/", 1) for name in Sums._fields)
#: Columns of the last batch with known FLOPs, timed or not.
LAST = ("flops/tracked_operations", "flops/untracked_operations")
#: Running totals of all batches with known FLOPs.
KNOWN = ("flops/known_batches", "flops/known", "flops/known_ideal_seconds")


class _Stage:
    """The totals of one stage, and the records that are not in them yet."""

    def __init__(self, size: int) -> None:
        #: Batches with known FLOPs, and the cost of the last one.
        self.known = 0
        self.last_cost: BatchCost | None = None
        #: Their FLOPs and ideal seconds.
        self.known_flops = self.known_ideal_seconds = 0.0
        #: Totals after each of the latest batches: a rolling window is the difference of two.
        self.edges = deque([Sums()], maxlen=size + 1)
        #: Seconds of the latest steps.
        self.steps: deque[float] = deque(maxlen=_USUAL)
        #: Their FLOPs; NaN where they are unknown.
        self.flops: deque[float] = deque(maxlen=_USUAL)
        #: Their median at the last change, or when it was first known.
        self.median = 0.0
        #: Batches that were slowed down before any step was timed.
        self.slowed: deque[BatchRecord] = deque(maxlen=MOST_RECORDS)
        self.records: list[BatchRecord] = []
        #: Records that wait for their device times.
        self.late: deque[tuple[BatchRecord, DeviceBatchTime]] = deque()


class BatchTotals:
    """The signal of batches: collects one record per batch and folds them at reports.

    If the device has a clock of its own, ``timer`` times batches there. ``on_change`` is called
    with the stage when its step time has changed.
    """

    columns = (*TIMED, *KNOWN, *LAST)
    gauges = frozenset(LAST)

    def __init__(
        self, timer: DeviceTimer | None = None, on_change: Callable[[str], None] | None = None
    ) -> None:
        self.timer, self._on_change = timer, on_change
        #: How many ranks train on each batch.
        self.sharing = 1
        self._rolling = 0
        #: The totals of each stage.
        self.stages: defaultdict[str, _Stage] = defaultdict(lambda: _Stage(self._rolling))
        #: Receives the records of a stage when they are folded, with the times that count.
        self.listeners: list[Callable[[str, Sequence[BatchRecord]], None]] = []
        #: Whether any callback reads the totals.
        self.wanted = False
        self._explained: set[str] = set()

    def start(self) -> BatchTotals:
        """Collect from now on."""
        self.wanted = True
        if self.timer is not None:
            self.timer.wanted = True
        return self

    def rolling(self, size: int) -> RollingBatches:
        """The signal of the last ``size`` batches; to be requested before training starts."""
        self._rolling = max(self._rolling, size)
        return RollingBatches(self, size)

    def end_batch(
        self, stage: str, record: BatchRecord, timed: DeviceBatchTime | None = None
    ) -> None:
        """Keep the record of a batch, with its time by the host's clock and on the device."""
        if not self.wanted:
            return
        totals = self.stages[stage]
        if len(totals.records) + len(totals.late) >= MOST_RECORDS:
            self.fold(stage)  # without this batch, which listeners may not have seen yet
        if timed is None:
            totals.records.append(record)
        else:
            totals.late.append((record, timed))

    def fold(self, stage: str) -> None:
        """Update the totals with the batches that the device has completed."""
        totals = self.stages[stage]
        if self.timer is not None:
            self.timer.read()
            totals.records += _resolved(totals.late, self.timer.failed)
        if records := totals.records:
            totals.records = []
            corrected = _add(totals, records)
            for listener in self.listeners:
                listener(stage, corrected)
            # Tracers and profilers slow steps down, too.
            traced = sys.gettrace() or sys.getprofile()
            if self._on_change and not traced and _changed(totals):
                self._on_change(stage)

    def end_stage(self, stage: str) -> None:
        """Drop batches of a stage that the device has not finished by its end."""
        self.fold(stage)
        totals = self.stages[stage]
        totals.late.clear()
        if any(each.seconds for each in totals.slowed) and stage not in self._explained:
            self._explained.add(stage)
            rank_zero_info(_ALL_SLOWED.format(stage))

    def wait(self) -> None:
        """Wait a bounded time for the device to complete the last batches."""
        if self.timer is not None:
            self.timer.wait(DEVICE_TIMEOUT)

    def totals(self, stage: str) -> Sequence[float]:
        """The totals of a stage since the run began."""
        totals = self.stages[stage]
        sums, cost = totals.edges[-1], totals.last_cost
        operations = (cost.tracked_operations, cost.untracked_operations) if cost else (0, 0)
        known = totals.known, totals.known_flops, totals.known_ideal_seconds
        return (*sums.shared(self.sharing), *known, *operations)


class RollingBatches:
    """The signal of a stage's last batches: each rank takes differences before it sends."""

    def __init__(self, batches: BatchTotals, size: int) -> None:
        self._batches, self._size = batches, size
        self.columns = tuple(f"rolling_{size}/{name}" for name in TIMED)
        self.gauges = frozenset(self.columns)

    def totals(self, stage: str) -> Sequence[float]:
        """The sums over the last batches.

        A stage without a timed batch gives those that were slowed down, without their FLOPs.
        """
        totals, size = self._batches.stages[stage], self._size
        edges = totals.edges
        first = edges[max(len(edges) - 1 - size, 0)]
        latest = edges[-1].since(first)
        for record in [each for each in totals.slowed if each.seconds][-size:]:
            latest = latest.plus(record._replace(cost=None), record.seconds)
        return latest.shared(self._batches.sharing)


def _add(stage: _Stage, records: Iterable[BatchRecord]) -> list[BatchRecord]:
    """Add batches, and return them with the seconds that count; NaN where they are unknown."""
    for record in records:
        cost = record.cost
        if cost is not None:
            stage.known += 1
            stage.known_flops += cost.total
            stage.known_ideal_seconds += cost.ideal_seconds
            stage.last_cost = cost
        if record.timed:
            stage.steps.append(record.seconds - record.waiting)
            stage.flops.append(nan if cost is None else cost.total)
    if stage.steps:
        fitted = cache(partial(_fitted, stage.steps, stage.flops))
        usual = partial(_usual, fitted)
        corrected = [_corrected(record, usual) for record in (*stage.slowed, *records)]
        for record in corrected:
            # A batch that was counted and skipped would make the FLOPs of the window unknown.
            unknown = record.slowed and record.cost is None and stage.known
            if not (record.first or unknown):
                stage.edges.append(stage.edges[-1].plus(record, record.seconds))
        corrected = corrected[len(stage.slowed) :]
        stage.slowed.clear()
        return corrected
    stage.slowed.extend(record for record in records if not record.first)
    return [each if each.first else each._replace(seconds=nan) for each in records]


def _changed(stage: _Stage) -> bool:
    """Whether the latest steps take longer than the earlier ones, or shorter."""
    latest, before = np.array(stage.steps)[-_LATEST:], stage.median
    if len(latest) < _LATEST:
        return False
    now = float(np.median(latest))
    within = before / _CHANGED <= now <= before * _CHANGED or abs(now - before) < _LEAST_CHANGE
    changed = before > 0 and not within
    if changed or not before:
        stage.median = now
    return changed


class _Fitted(NamedTuple):
    """The mean time of steps, that of those with known FLOPs and their FLOPs, and the slope."""

    all_seconds: float
    seconds: float
    flops: float
    slope: float


def _fitted(steps: Collection[float], flops: Collection[float]) -> _Fitted:
    """Fit the time of a step to its FLOPs; long steps of few FLOPs count up to a limit.

    The slope is between 0, where FLOPs take no time, and that where nothing else does.
    """
    seconds, work = np.array(steps), np.array(flops)
    known = ~np.isnan(work)
    limit, usual = _OUTLIER * np.median(seconds), np.median(work[known]) if any(known) else 0.0
    # A step with more FLOPs than others may take longer.
    larger = np.maximum(np.nan_to_num(work) / usual, 1.0) if usual > 0 else 1.0
    seconds = np.minimum(seconds, limit * larger)
    everything = float(seconds.mean())
    if usual <= 0:
        return _Fitted(everything, everything, 0.0, 0.0)
    seconds, work = seconds[known], work[known]
    mean, total = float(seconds.mean()), float(work.mean())
    moved, prior = work - total, _PROPORTIONAL * total**2
    slope = (moved @ seconds + prior * mean / total) / (moved @ moved + prior)
    return _Fitted(everything, mean, total, min(max(float(slope), 0.0), mean / total))


def _usual(fitted: Callable[[], _Fitted], cost: BatchCost | None) -> float:
    """The usual time of a step of this cost."""
    found = fitted()
    if cost is None:
        return found.all_seconds
    return found.seconds + found.slope * (cost.total - found.flops)


def _corrected(record: BatchRecord, usual: Callable[[BatchCost | None], float]) -> BatchRecord:
    """A batch with the time that it would take without counting, from that of a usual step."""
    if record.first or not record.slowed:
        return record
    # An estimate by FLOPs needs a limit: a step may take as long with few of them.
    seconds = usual(None if record.counting is None else record.cost) + record.waiting
    if record.counting is not None:
        least, most = (max(record.seconds - c, record.waiting) for c in reversed(record.counting))
        # A step that takes longer than usual even without counting is unlike the others: the
        # middle of its limits counts. Of one that cannot have taken as long, the most counts.
        seconds = min(seconds, most) if seconds >= least else (least + most) / 2
    return record._replace(seconds=max(seconds, 0.0))


def _resolved(
    late: deque[tuple[BatchRecord, DeviceBatchTime]], failed: bool
) -> Iterator[BatchRecord]:
    """The batches whose device time is known or does not matter, up to the first other one."""
    while late:
        record, timed = late[0]
        if not (timed.known or failed) and record.timed:
            return
        late.popleft()
        # Where the device's time is unknown, the host's must not replace it.
        known = timed.known and timed.whole
        seconds = timed.seconds if known else record.seconds if failed else 0.0
        slowed = record.slowed or not (known or failed)
        # The device has work in its queue while the host counts.
        counting = (0.0, record.counting[1]) if known and record.counting else None
        yield record._replace(seconds=seconds, slowed=slowed, counting=counting)


#: Batches of a stage that are compared with the batch size of its data loaders.
_TRIES = 2


class BatchCounter:
    """Counts the samples and tokens of a batch, with the user's functions or by inference.

    The first of ``owners`` that defines a function takes precedence. The batch size of the data
    loaders shows what else to count. A count that fails is None, with one warning for samples and
    one for tokens.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._samples = _find(owners, "get_num_samples_in_batch")
        self._tokens = _find(owners, "get_num_tokens_in_batch")
        self._infers = self._samples is get_num_samples
        self._use(self._samples)
        self._warned: set[str] = set()
        # By stage: what counts its samples.
        self._found: dict[str, _Counter] = {}
        self._stage = ""
        self._size: Callable[[], tuple[int | None, bool, bool]] = lambda: (None, False, False)
        # Batches that are compared with the size: one may be the last of its epoch.
        self._tries = 0

    def enter(self, stage: str, size: Callable[[], tuple[int | None, bool, bool]]) -> None:
        """Batches of a stage follow. ``size`` gives `run.compat.batch_size` during each of them."""
        if self._infers:
            self._stage, self._size = stage, size
            self._tries = 0 if stage in self._found else _TRIES
            self._use(self._found.get(stage, get_num_samples))

    def _use(self, counter: _Counter) -> None:
        self._samples = counter
        self._inferred = (counter, self._tokens) == (get_num_samples, get_num_tokens)

    def _choose(self, batch: Any) -> None:
        """Find out what counts the samples of this stage."""
        self._tries -= 1
        size, full, several = self._size()
        if not size:
            return
        if (counter := counter_for(batch, size, full, several)) is not None:
            self._tries, self._found[self._stage] = 0, counter
            self._use(counter)
        elif full and size > 1 and "size" not in self._warned:
            samples = self._try(self._samples, "samples", batch)
            if samples:
                self._warned.add("size")
                warn(
                    f"a batch counts as {samples} samples, but its data loader has batch_size="
                    f"{size}. If this is wrong, {_DEFINE.format('samples')}"
                )

    def count(self, batch: Any) -> tuple[int | None, int | None]:
        """Return the samples and tokens of a batch; None if unknown, 0 if not tracked."""
        if self._tries:
            self._choose(batch)
        if self._inferred and (type(batch) is list or type(batch) is tuple):
            # The common case, tensors of one length: same result as the general rules, but faster.
            try:
                for part in batch:
                    if type(part) is not Tensor or part.shape[0] != batch[0].shape[0]:
                        break
                else:
                    return batch[0].shape[0], 0
            except (IndexError, RuntimeError):  # no dimensions
                pass
        if batch is None:  # a batch that the data loader skips
            return 0, 0
        samples = self._try(self._samples, "samples", batch)
        return samples, self._try(self._tokens, "tokens", batch)

    def _try(self, counter: _Counter, what: str, batch: Any) -> int | None:
        try:
            return counter(batch)
        except Exception as error:
            let_through(error)
            if what not in self._warned:
                self._warned.add(what)
                warn(
                    f"cannot count the {what} of a batch ({type(error).__name__}: {error}): {what} "
                    f"per second are not reported. D{_DEFINE[1:].format(what)}"
                )
            return None


def _find(owners: list[object], name: str) -> _Counter:
    for owner in owners:
        counter = getattr(owner, name, None)
        if callable(counter):
            return lambda batch: checked_count(counter(batch), name)
    return _INFERRED[name]
