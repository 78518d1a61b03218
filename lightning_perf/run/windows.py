"""Windows: what all ranks measured between two reports, gathered once and handed to callbacks."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import filter as matching
from functools import partial
from itertools import pairwise
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from lightning_perf.core.window import LazyRows, Rows, Window
from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.run.collective import LAST, Gatherer
from lightning_perf.run.history import StageHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Timestamp
    from lightning_perf.core.window import Table
    from lightning_perf.run.context import RunContext
    from lightning_perf.run.window_callback import WindowCallback


class Signal(Protocol):
    """Something measured on each rank, as named columns of running totals.

    ``totals`` is called on the training thread, once per report. It must be cheap and change
    nothing.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The same names, in the same order, on every rank."""
        ...

    @property
    def gauges(self) -> frozenset[str]:
        """Columns that are not running totals: a window holds their value at its end."""
        ...

    def totals(self, stage: str) -> Sequence[float]:
        """The value of each column for a stage, since the run began."""
        ...


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """When and where the totals of a report were taken."""

    context: RunContext
    stage: str
    step: int
    stamp: Timestamp
    at_end: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Report:
    """What a report gathered."""

    snapshot: _Snapshot
    signals: Sequence[Signal]
    #: The totals of each rank.
    rows: Rows

    @property
    def names(self) -> list[str]:
        """The columns."""
        return [name for signal in self.signals for name in signal.columns]

    def window(self, start: _Snapshot, before: Rows | None, rank: int) -> Window:
        """All columns from ``start``, where the totals were ``before``, to this report."""
        names = self.names
        gauges = frozenset[str]().union(*(signal.gauges for signal in self.signals))
        at_end = [number for number, name in enumerate(names) if name in gauges]
        columns = {name: number for number, name in enumerate(names)}
        at = range(len(names))
        rows, totals = _rows(self.rows, at, None if before is None else (before, at), at_end)
        end = self.snapshot
        return Window(
            end.stage, end.step, start.stamp, end.stamp, end.at_end, rank, columns, rows, totals
        )


class _Subscription:
    """One callback's columns, and where its last window of each stage ended.

    Args:
        callback: Receives the windows.
        signals: Where the columns come from.
        names: The columns.
    """

    def __init__(
        self, callback: WindowCallback, signals: Sequence[Signal], names: Sequence[str]
    ) -> None:
        self.callback, self.signals, self.names = callback, signals, names
        self._columns = {name: number for number, name in enumerate(names)}
        gauges = frozenset[str]().union(*(signal.gauges for signal in signals))
        self._gauges = [number for number, name in enumerate(names) if name in gauges]
        self._stamps: dict[str, Timestamp] = {}
        # What was reported last, and where its columns are.
        self._before: dict[str, tuple[Rows, Sequence[int]]] = {}

    def enter(self, stage: str, stamp: Timestamp) -> None:
        """The first window of a stage begins here."""
        self._stamps.setdefault(stage, stamp)

    def receive(
        self, snapshot: _Snapshot, positions: Sequence[int], rows: Rows, rank: int
    ) -> Mapping[str, float]:
        """The metrics that the callback makes of its window.

        Args:
            snapshot: The window's end.
            positions: Where its columns are in the rows.
            rows: The totals of each rank.
            rank: This process's.
        """
        stage = snapshot.stage
        differences, totals = _rows(rows, positions, self._before.get(stage), self._gauges)
        first, self._stamps[stage] = self._stamps[stage], snapshot.stamp
        self._before[stage] = rows, positions
        window = Window(
            stage, snapshot.step, first, snapshot.stamp, snapshot.at_end, rank,
            self._columns, differences, totals,
        )  # fmt: skip
        return self.callback.call(self.callback.receive, window) or {}


#: The time of a report at the end of a stage within another one: ranks may have had other numbers
#: of batches.
_NESTED_END = -1


class _Layout(NamedTuple):
    """What is sent when certain callbacks are due."""

    #: The same on all ranks for the same callbacks.
    number: int
    signals: Sequence[Signal]
    #: For each callback, where its columns are in what is sent.
    positions: Sequence[Sequence[int]]
    #: Where the columns are in the last report, which has those of all callbacks.
    in_last: Sequence[int]


class _End(NamedTuple):
    """A window that a report ends."""

    subscription: _Subscription
    #: Whether this rank requested it.
    wanted: bool
    #: Where its columns are in the rows.
    positions: Sequence[int]


def _sent(due: Iterable[_Subscription]) -> tuple[list[Signal], dict[str, int]]:
    """The signals of some callbacks, and where each of their columns is in a report."""
    signals = {id(signal): signal for each in due for signal in each.signals}
    columns = (name for signal in signals.values() for name in signal.columns)
    return list(signals.values()), {name: number for number, name in enumerate(columns)}


def _rows(
    now: Rows,
    at: Sequence[int],
    before: tuple[Rows, Sequence[int]] | None,
    gauges: Sequence[int],
) -> tuple[Rows | LazyRows, Rows | LazyRows]:
    """Some columns, less those of an earlier report unless they are gauges; and in total."""
    if isinstance(now, np.ndarray):
        earlier = cast("tuple[Table, Sequence[int]] | None", before)
        return LazyRows(now, at, earlier, gauges), LazyRows(now, at)
    values = now[0]
    row = [values[position] for position in at]
    if before is None:
        return [row], [row]
    (last,), where = before
    found = [late - last[position] for late, position in zip(row, where, strict=True)]
    for column in gauges:
        found[column] = row[column]
    return [found], [row]


def _unknown_column(name: str, known: Iterable[str]) -> ConfigError:
    near = get_close_matches(name, list(known), n=1)
    return ConfigError("columns", name, "matches no column", repr(near[0] if near else "batch/*"))


class Windows:
    """Takes one snapshot per report, gathers it once, and hands each due callback its window.

    Args:
        trainer: Whose ranks take part. With several, all must construct this together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._gatherer = Gatherer(trainer)
        #: Reports that are on their way.
        self.pending: Collection[object] = self._gatherer.pending
        self._rank, self._alone = trainer.global_rank, trainer.world_size == 1
        self._sources: dict[str, Callable[[], Signal]] = {}
        self._signals: dict[str, Signal] = {}
        # By signal and stage: where its columns count from, and its totals at the last report.
        self._origins: dict[tuple[int, str], Sequence[float]] = {}
        self._reported: dict[tuple[int, str], Sequence[float]] = {}
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._failed: set[int] = set()
        self._subscriptions: list[_Subscription] = []
        #: Reports before this batch need no check, but where Lightning logs.
        self.quiet_until: float = 0
        # By stage: the step and time at its beginning, and the last reports of all signals.
        self._began: dict[str, tuple[int, Timestamp]] = {}
        self._recent: defaultdict[str, deque[_Report]] = defaultdict(partial(deque, maxlen=3))
        self._histories: defaultdict[str, StageHistory] = defaultdict(StageHistory)

    # -- set-up -------------------------------------------------------------------------------

    def offer(self, prefix: str, source: Callable[[], Signal]) -> None:
        """Offer a signal, which starts when a callback subscribes to one of its columns.

        Args:
            prefix: The first part of the columns' names, such as ``"timings"``.
            source: Starts the signal.
        """
        self._sources[prefix] = source

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers; all ranks call it together, at set-up."""
        return self._gatherer.largest(number)

    def subscribe(self, callback: WindowCallback, columns: Iterable[str]) -> None:
        """Deliver windows of some columns to a callback from now on.

        Args:
            callback: Receives them in ``on_window``.
            columns: Names, or patterns such as ``"timings/*"``.

        Raises:
            ConfigError: No signal has such a column.
        """
        if isinstance(columns, str) and columns:
            problem = "is one string, expected a tuple or list of names"
            raise ConfigError("columns", columns, problem, repr((columns,)))
        names, signals = dict[str, None](), dict[int, Signal]()
        for pattern in columns:
            signal = self._signal(pattern)
            found = matching(signal.columns, pattern)
            if not found:
                raise _unknown_column(pattern, signal.columns)
            names |= dict.fromkeys(found)
            signals[id(signal)] = signal
        self._subscriptions.append(_Subscription(callback, list(signals.values()), list(names)))

    def _signal(self, column: str) -> Signal:
        prefix = column.partition("/")[0]
        if prefix not in self._signals:
            if prefix not in self._sources:
                raise _unknown_column(column, [f"{each}/*" for each in self._sources])
            self._signals[prefix] = self._sources[prefix]()
        return self._signals[prefix]

    # -- stages and batches -------------------------------------------------------------------

    def enter(self, context: RunContext) -> None:
        """A stage begins."""
        self.quiet_until = 0
        stage = context.stage
        self._began.setdefault(stage, (context.step, context.timestamp))
        for subscription in self._subscriptions:
            subscription.enter(stage, context.timestamp)
        signals = {id(each): each for sub in self._subscriptions for each in sub.signals}
        for signal in signals.values():
            self._start(signal, stage)

    def _start(self, signal: Signal, stage: str) -> None:
        """Columns count from here, without what passed since the last report of the stage."""
        key, now = (id(signal), stage), self._totals(signal, stage)
        origin, reported = self._origins.get(key, now), self._reported.get(key, now)
        self._origins[key] = [
            0.0 if name in signal.gauges else first + value - last
            for name, first, value, last in zip(signal.columns, origin, now, reported, strict=True)
        ]

    def resume(self) -> None:
        """Another stage is the present one."""
        self.quiet_until = 0

    def poll(self) -> None:
        """Deliver what has arrived from other ranks."""
        self._gatherer.poll()

    def report(self, context: RunContext, at_end: bool) -> None:
        """Gather a snapshot for the callbacks that are due.

        What is due follows from what all ranks share, so every rank sends the same messages.

        Args:
            context: The run's.
            at_end: Whether the stage ends.
        """
        subscriptions = self._subscriptions
        due = [each for each in subscriptions if each.callback.window_due(context, at_end)]
        self.quiet_until = min(
            (each.callback.trigger.quiet_until for each in subscriptions), default=inf
        )
        if not due:
            return
        last = at_end and not context.nested
        if last:
            context.batches.wait()
        stage = context.stage
        context.batches.fold(stage)
        sent = subscriptions if last else due
        layout = self._layout(sent)
        values: list[float] = []
        for signal in layout.signals:
            key = id(signal), stage
            now = self._reported[key] = self._totals(signal, stage)
            values += [value - first for value, first in zip(now, self._origins[key], strict=True)]
        ends = [
            _End(each, at_end or each.callback.trigger.consume_request(), positions)
            for each, positions in zip(sent, layout.positions, strict=True)
            if each in due
        ]
        snapshot = _Snapshot(context, stage, context.step, context.timestamp, at_end)
        when = LAST if last else _NESTED_END if at_end else context.counters.batch
        deliver = partial(self._deliver, snapshot, ends, layout.signals)
        self._gatherer.gather((layout.number, when), values, deliver, layout.in_last)

    def _layout(self, due: Sequence[_Subscription]) -> _Layout:
        key = tuple(map(id, due))
        if key not in self._layouts:
            signals, positions = _sent(due)
            _, in_last = _sent(self._subscriptions)
            self._layouts[key] = _Layout(
                sum(1 << self._subscriptions.index(each) for each in due),
                signals,
                [[positions[name] for name in each.names] for each in due],
                [in_last[name] for name in positions],
            )
        return self._layouts[key]

    def _totals(self, signal: Signal, stage: str) -> Sequence[float]:
        if id(signal) not in self._failed:
            try:
                return signal.totals(stage)
            except Exception as error:
                self._failed.add(id(signal))
                name = signal.columns[0].partition("/")[0]
                warn(f"{name} is no longer measured ({describe(error)}). Training continues.")
        return [nan] * len(signal.columns)

    def _deliver(
        self, snapshot: _Snapshot, ends: Sequence[_End], signals: Sequence[Signal], rows: Rows
    ) -> None:
        """Hand out windows; with several ranks some batches after the snapshot."""
        recent = self._recent[snapshot.stage]
        if not recent or len(signals) >= len(recent[-1].signals):
            recent.append(_Report(snapshot, signals, rows))
            self._remember(recent[-1])
        found: dict[str, float] = {}
        for end in ends:
            if end.wanted:
                found |= end.subscription.receive(snapshot, end.positions, rows, self._rank)
        if found:
            snapshot.context.log(found, snapshot.step)

    def _remember(self, report: _Report) -> None:
        """Add a report to the history of its stage, on rank 0."""
        snapshot = report.snapshot
        history, batch = self._histories[snapshot.stage], snapshot.stamp.batch
        if self._rank == 0 and history.due(batch, snapshot.at_end):
            costs = snapshot.context.spans.latest
            history.add(snapshot.step, batch, report.names, report.rows, costs)

    def history(self, stage: str) -> dict[str, Any]:
        """The windows of a stage, for the summary of the run; on rank 0."""
        return self._histories[stage].table()

    def recap(self, context: RunContext, stage: str) -> list[tuple[int, Window]]:
        """The whole run of a stage, and its last window with batches if that is shorter.

        Each comes with the step of its first batch. They end at the last report of all ranks; if
        the only rank did not end the stage, the whole run ends now.
        """
        began, reports = self._began.get(stage), list(self._recent[stage])
        if began is None or not self._signals:
            return []
        if self._alone and not (reports and reports[-1].snapshot.at_end):
            reports.append(self._report_now(context, stage))
        if not reports:
            return []
        start = _Snapshot(context, stage, *began, at_end=False)
        found = [(start.step, reports[-1].window(start, None, self._rank))]
        alike = [report for report in reports if report.signals == reports[-1].signals]
        for before, report in reversed(list(pairwise(alike))):
            window = report.window(before.snapshot, before.rows, self._rank)
            if window.batches:
                return [*found, (before.snapshot.step + 1, window)]
        return found

    def _report_now(self, context: RunContext, stage: str) -> _Report:
        """The totals of this rank, which is the only one."""
        context.batches.fold(stage)
        signals = {id(each): each for sub in self._subscriptions for each in sub.signals}
        values: list[float] = []
        for key, signal in signals.items():
            pairs = zip(self._totals(signal, stage), self._origins[key, stage], strict=True)
            values += [value - first for value, first in pairs]
        stamp = context.progress.timestamp(stage)
        snapshot = _Snapshot(context, stage, context.step, stamp, at_end=False)
        return _Report(snapshot, list(signals.values()), [values])

    def finish(self, timeout: float) -> None:
        """Wait a bounded time for windows that are on their way; none is gathered afterwards.

        Args:
            timeout: Seconds at most.
        """
        self._gatherer.finish(timeout)

    def close(self, timeout: float) -> None:
        """End.

        Args:
            timeout: Seconds to wait for other ranks' last numbers.
        """
        if timeout:
            self._gatherer.finish(timeout)
        self._gatherer.close()
