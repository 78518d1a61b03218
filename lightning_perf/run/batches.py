"""Running totals of batches: time, samples, tokens and FLOPs of each stage on this rank."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import islice
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lightning_perf.run.flop_meter import BatchCost
    from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceTimer

    #: Seconds, samples and tokens of one batch (None where they could not be counted), its FLOPs
    #: (None where they are unknown), whether counting them slowed it down, and whether it was the
    #: first of its stage and of its epoch. A plain tuple, since one is made per batch.
    BatchRecord = tuple[float, int | None, int | None, BatchCost | None, bool, bool, bool]

#: Records kept at most until they are folded.
_MOST_RECORDS = 1000
#: Seconds that the end of a run waits for the device to complete its last batches.
_DEVICE_TIMEOUT = 10.0

_ALL_SLOWED = (
    "lightning_perf: FLOPs were counted in every batch of stage {} after the first, which slows "
    "batches down. Throughput is a lower bound, and MFU is not reported."
)

#: Running totals of batches whose time counts: neither the first of a stage nor slowed by counting.
TIMED = (
    "batch/seconds",
    "batch/count",
    "batch/samples",
    "batch/tokens",
    "flops/model",
    "flops/ideal_seconds",
    "flops/hardware_ideal_seconds",
    "flops/seconds",
    "flops/batches",
    "batch/uncounted_samples",
    "batch/uncounted_tokens",
    "flops/uncounted_batches",
)
#: Of the last batch with known FLOPs, whatever its time.
LAST = ("flops/tracked_operations", "flops/untracked_operations")
#: Running totals of all batches with known FLOPs.
KNOWN = ("flops/known_batches", "flops/known", "flops/known_ideal_seconds")


class _Stage:
    """The totals of one stage, and the records that are not in them yet."""

    __slots__ = ("edges", "known", "last_cost", "late", "records", "slowed", "untimed")

    def __init__(self, size: int) -> None:
        #: Batches with known FLOPs, and the cost of the last one.
        self.known = 0
        self.last_cost: BatchCost | None = None
        #: The FLOPs and ideal seconds of batches whose time does not count.
        self.untimed = 0.0, 0.0
        #: Totals after each of the latest batches: a rolling window is the difference of two.
        self.edges: deque[tuple[float, ...]] = deque([(0.0,) * len(TIMED)], maxlen=size + 1)
        #: The latest batches that counting slowed down, without their FLOPs.
        self.slowed: deque[BatchRecord] = deque(maxlen=max(size, 1))
        self.records: list[BatchRecord] = []
        #: Records that wait for their device times.
        self.late: deque[tuple[BatchRecord, DeviceBatchTime]] = deque()


class BatchTotals:
    """The signal of batches: collects one record per batch and folds them at reports.

    Where the device has a clock of its own, a timer times batches there.
    """

    columns = (*TIMED, *KNOWN, *LAST)
    gauges = frozenset(LAST)

    def __init__(self, timer: DeviceTimer | None = None, sharing: int = 1) -> None:
        self.timer, self.sharing = timer, sharing
        self._rolling = 0
        self._stages: defaultdict[str, _Stage] = defaultdict(lambda: _Stage(self._rolling))
        #: Receives the records of a stage when they are folded.
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
        found = self._stages[stage]
        if len(found.records) + len(found.late) >= _MOST_RECORDS:
            self.fold(stage)  # without this batch, which listeners may not have seen yet
        if timed is None:
            found.records.append(record)
        else:
            found.late.append((record, timed))

    def fold(self, stage: str) -> None:
        """Update the totals with the batches that the device has completed."""
        found = self._stages[stage]
        if self.timer is not None:
            self.timer.read()
            found.records += _resolved(found.late, self.timer.failed)
        if records := found.records:
            found.records = []
            for listener in self.listeners:
                listener(stage, records)
            _add(found, records)

    def end_stage(self, stage: str) -> None:
        """Drop batches of a stage that the device has not finished by its end."""
        self.fold(stage)
        found = self._stages[stage]
        found.late.clear()
        if found.slowed and not found.edges[-1][1] and stage not in self._explained:
            self._explained.add(stage)
            rank_zero_info(_ALL_SLOWED.format(stage))

    def wait(self) -> None:
        """Wait a bounded time for the device to complete the last batches."""
        if self.timer is not None:
            self.timer.wait(_DEVICE_TIMEOUT)

    def totals(self, stage: str) -> Sequence[float]:
        """The totals of a stage since the run began."""
        found = self._stages[stage]
        totals, cost = self._part(found.edges[-1]), found.last_cost
        operations = (cost.tracked_operations, cost.untracked_operations) if cost else (0, 0)
        flops, ideal = found.edges[-1][4:6]
        known = found.known, flops + found.untimed[0], ideal + found.untimed[1]
        return (*totals, *known, *operations)

    def last_batches(self, stage: str, size: int) -> tuple[float, ...]:
        """The sums of ``TIMED`` over the last batches of a stage, ``size`` at most.

        A stage without a timed batch gives those that were slowed down, without their FLOPs.
        """
        edges = self._stages[stage].edges
        if not edges[-1][1]:
            slowed = _Stage(size)
            _add(slowed, self._stages[stage].slowed)
            edges = slowed.edges
        first = next(islice(edges, max(len(edges) - 1 - size, 0), None))
        return self._part([last - early for last, early in zip(edges[-1], first, strict=True)])

    def _part(self, totals: Sequence[float]) -> tuple[float, ...]:
        """Totals with this rank's part of the samples and tokens of batches that ranks share."""
        seconds, count, samples, tokens, *rest = totals
        return (seconds, count, samples / self.sharing, tokens / self.sharing, *rest)


class RollingBatches:
    """The signal of a stage's last batches: each rank takes differences before it sends."""

    def __init__(self, batches: BatchTotals, size: int) -> None:
        self._batches, self._size = batches, size
        self.columns = tuple(f"rolling_{size}/{name}" for name in TIMED)
        self.gauges = frozenset(self.columns)

    def totals(self, stage: str) -> Sequence[float]:
        """The sums over the last batches."""
        return self._batches.last_batches(stage, self._size)


def _add(stage: _Stage, records: Iterable[BatchRecord]) -> None:
    (
        seconds, count, samples, tokens, model, ideal, hardware_ideal, known_seconds, known,
        no_samples, no_tokens, no_flops,
    ) = stage.edges[-1]  # fmt: skip
    edges = stage.edges
    for spent, batch_samples, batch_tokens, cost, slowed, first, begins in records:
        if cost is not None:
            stage.known += 1
            stage.last_cost = cost
        if slowed or first:
            if cost is not None:
                flops, seconds_at_peak = stage.untimed
                stage.untimed = flops + cost.total, seconds_at_peak + cost.ideal_seconds
            if spent and not first:
                stage.slowed.append(
                    (spent, batch_samples, batch_tokens, None, False, False, begins)
                )
            continue
        seconds += spent
        count += 1
        if batch_samples is None:
            no_samples += 1
        else:
            samples += batch_samples
        if batch_tokens is None:
            no_tokens += 1
        else:
            tokens += batch_tokens
        if cost is None and batch_samples == 0:  # Lightning skipped the batch
            known_seconds += spent
        elif cost is None:
            no_flops += 1
        else:
            model += cost.total
            ideal += cost.ideal_seconds
            hardware_ideal += cost.hardware_ideal_seconds
            known_seconds += spent
            known += 1
        edges.append((
            seconds, count, samples, tokens, model, ideal, hardware_ideal, known_seconds, known,
            no_samples, no_tokens, no_flops,
        ))  # fmt: skip


def _resolved(
    late: deque[tuple[BatchRecord, DeviceBatchTime]], failed: bool
) -> Iterator[BatchRecord]:
    """The batches whose device time is known or does not matter, up to the first other one."""
    while late:
        (host, samples, tokens, cost, slowed, first, begins), timed = late[0]
        if not (timed.known or slowed or first or failed):
            return
        late.popleft()
        # Where the device's time is unknown, the host's must not replace it.
        known = timed.known and timed.whole
        seconds = timed.seconds if known else host if failed else 0.0
        slowed = slowed or not (known or failed)
        yield seconds, samples, tokens, cost, slowed, first, begins
