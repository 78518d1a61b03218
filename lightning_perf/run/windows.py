"""Windows: the measurements of all ranks between two reports, gathered once for all callbacks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import filter as matching
from functools import partial
from itertools import pairwise
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from lightning_perf.core.window import LazyRows, Rows, Window
from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.run.collective import LAST, Gatherer
from lightning_perf.timing.totals import CATEGORIES, TABLED, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Timestamp
    from lightning_perf.core.window import Table
    from lightning_perf.run.context import RunContext
    from lightning_perf.run.window_callback import WindowCallback


class Signal(Protocol):
    """A measurement on each rank, as named columns of running totals.

    ``totals`` is called on the training thread, once per report. It must be cheap and change
    nothing.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """The same names, in the same order, on every rank."""

    @property
    def gauges(self) -> frozenset[str]:
        """Columns that are not running totals: a window holds their value at its end."""

    def totals(self, stage: str) -> Sequence[float]:
        """The value of each column for a stage, since the run began."""


class _Columns:
    """Named columns of some signals."""

    def __init__(self, signals: Iterable[Signal], names: Iterable[str]) -> None:
        self.signals = list(signals)
        #: Where each is in a row of them.
        self.at = {name: number for number, name in enumerate(names)}
        gauges = frozenset[str]().union(*(signal.gauges for signal in self.signals))
        self._gauges = [number for name, number in self.at.items() if name in gauges]

    def window(self, start: _Report, end: _Report, rank: int) -> Window:
        """The measurements of these columns between two reports, which may have more columns."""
        now, before = end.rows, start.rows
        at = was = [end.layout.at[name] for name in self.at]
        if len(before) and start.layout is not end.layout:
            was = [start.layout.at[name] for name in self.at]
        rows: Rows | LazyRows
        totals: Rows | LazyRows
        if isinstance(now, np.ndarray):
            earlier = (cast("Table", before), was) if len(before) else None
            rows, totals = LazyRows(now, at, earlier, self._gauges), LazyRows(now, at)
        else:
            row = found = [now[0][position] for position in at]
            if len(before):
                last = before[0]
                found = [late - last[position] for late, position in zip(row, was, strict=True)]
                for column in self._gauges:
                    found[column] = row[column]
            rows, totals = [found], [row]
        return Window(
            end.stage, end.step, start.stamp, end.stamp, end.at_end, rank, self.at, rows, totals
        )


class _Layout(_Columns):
    """All columns of a message when certain callbacks are due."""

    #: The same on all ranks for the same callbacks.
    number: int
    #: Where the columns are in the last report, which has those of all callbacks.
    in_last: Sequence[int]


@dataclass(slots=True, eq=False)
class _Report:
    """The progress of a stage, and the totals until then."""

    stage: str
    step: int
    stamp: Timestamp
    at_end: bool
    layout: _Layout
    #: The costs of named actions on this rank.
    costs: Totals
    #: The totals of each rank, once they have arrived. Empty at the start of a stage.
    rows: Rows


class _Subscription(NamedTuple):
    """The columns that a callback receives."""

    callback: WindowCallback
    columns: _Columns
    #: Where its last window of each stage ended.
    last: dict[str, _Report]


#: The time of a report at the end of a stage within another one: ranks may have had other numbers
#: of batches.
_NESTED_END = -1


def _unknown_column(name: str, known: Iterable[str]) -> ConfigError:
    near = get_close_matches(name, list(known), n=1)
    return ConfigError("columns", name, "matches no column", repr(near[0] if near else "batch/*"))


class Windows:
    """Takes one snapshot per report, gathers it once, and delivers its window to each due callback.

    Args:
        trainer: The trainer whose ranks take part. With several, all must construct this together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.gatherer = Gatherer(trainer)
        #: Reports in flight.
        self.pending: Collection[object] = self.gatherer.pending
        self._rank, self._alone = trainer.global_rank, trainer.world_size == 1
        #: Start the signal of a prefix, such as ``timings``, once a callback subscribes to it.
        self.sources: dict[str, Callable[[], Signal]] = {}
        self._signals: dict[str, Signal] = {}
        # By signal and stage: where its columns count from, and its totals at the last report.
        self._origins: dict[tuple[Signal, str], Sequence[float]] = {}
        self._reported: dict[tuple[Signal, str], Sequence[float]] = {}
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._failed: set[Signal] = set()
        self._subscriptions: list[_Subscription] = []
        #: Reports before this batch need no check, except where Lightning logs.
        self.quiet_until: float = 0
        # By stage: its start, and the last reports of all signals.
        self._began: dict[str, _Report] = {}
        self._recent: defaultdict[str, deque[_Report]] = defaultdict(partial(deque, maxlen=3))
        #: The costs of named actions up to the report that is being delivered.
        self.costs = Totals({})
        #: By stage, for the summary of the run; on rank 0.
        self.histories: defaultdict[str, StageHistory] = defaultdict(StageHistory)

    # -- set-up -------------------------------------------------------------------------------

    def subscribe(self, callback: WindowCallback, columns: Iterable[str]) -> None:
        """Deliver windows of some columns to a callback from now on.

        Columns are names, or patterns such as ``"timings/*"``.

        Raises:
            ConfigError: No signal has a column, or with several ranks all signals have too many.
        """
        if isinstance(columns, str) and columns:
            problem = "is one string, expected a tuple or list of names"
            raise ConfigError("columns", columns, problem, repr((columns,)))
        names, signals = dict[str, None](), dict[Signal, None]()
        for pattern in columns:
            signal = self._signal(pattern)
            found = matching(signal.columns, pattern)
            if not found:
                raise _unknown_column(pattern, signal.columns)
            names |= dict.fromkeys(found)
            signals[signal] = None
        most = self.gatherer.width
        count = sum(len(each.columns) for each in {*self._signals.values()})
        if count > most and not self._alone:
            problem = f"makes {count} columns over all signals, and a rank can send {most}"
            raise ConfigError("columns", [*columns], problem, "a signal with fewer columns")
        self._subscriptions.append(_Subscription(callback, _Columns(signals, names), {}))

    def _signal(self, column: str) -> Signal:
        prefix = column.partition("/")[0]
        if prefix not in self._signals:
            if prefix not in self.sources:
                raise _unknown_column(column, [f"{each}/*" for each in self.sources])
            self._signals[prefix] = self.sources[prefix]()
        return self._signals[prefix]

    # -- stages and batches -------------------------------------------------------------------

    def enter(self, context: RunContext) -> None:
        """A stage starts."""
        stage, layout = context.stage, self._layout(self._subscriptions)
        began = _Report(
            stage, context.tracker.step, context.timestamp, False, layout, Totals({}), ()
        )
        self._began.setdefault(stage, began)
        for subscription in self._subscriptions:
            subscription.last.setdefault(stage, began)
        for signal in layout.signals:
            self._start(signal, stage)

    def _start(self, signal: Signal, stage: str) -> None:
        """Columns count from here, without what passed since the last report of the stage."""
        key, now = (signal, stage), self._totals(signal, stage)
        origin, reported = self._origins.get(key, now), self._reported.get(key, now)
        self._origins[key] = [
            0.0 if name in signal.gauges else first + value - last
            for name, first, value, last in zip(signal.columns, origin, now, reported, strict=True)
        ]

    def report(self, context: RunContext, at_end: bool) -> None:
        """Gather a snapshot for the callbacks that are due.

        The due callbacks follow from values that all ranks share, so every rank sends the same
        messages.
        """
        subscriptions = self._subscriptions
        due = [each for each in subscriptions if each.callback.is_due(context, at_end)]
        self.quiet_until = min(
            (each.callback.trigger.quiet_until for each in subscriptions), default=inf
        )
        if not due or self.gatherer.lost:
            return
        last = at_end and not context.stages.nested
        if last:
            context.wait_for_device()
        sent = subscriptions if last else due
        report = self._report(context, context.stage, sent, at_end)
        for each in due:
            each.callback.call(each.callback.window_ended, context)
        ended = [each for each in due if at_end or each.callback.trigger.consume_request()]
        when = LAST if last else _NESTED_END if at_end else context.counters.batch
        deliver = partial(self._deliver, context, report, ended)
        layout = report.layout
        self.gatherer.gather((layout.number, when), report.rows[0], deliver, layout.in_last)

    def _report(
        self, context: RunContext, stage: str, sent: Sequence[_Subscription], at_end: bool = False
    ) -> _Report:
        """The totals of this rank."""
        context.batches.fold(stage)
        layout = self._layout(sent)
        values: list[float] = []
        for signal in layout.signals:
            key = signal, stage
            now = self._reported[key] = self._totals(signal, stage)
            values += [value - first for value, first in zip(now, self._origins[key], strict=True)]
        stamp = context.progress.timestamp(stage)
        costs = context.spans.latest
        return _Report(stage, context.tracker.step, stamp, at_end, layout, costs, [values])

    def _layout(self, sent: Sequence[_Subscription]) -> _Layout:
        key = tuple(map(id, sent))
        if key not in self._layouts:
            signals = dict.fromkeys(signal for each in sent for signal in each.columns.signals)
            layout = _Layout(signals, [name for signal in signals for name in signal.columns])
            self._layouts[key] = layout
            layout.number = sum(1 << self._subscriptions.index(each) for each in sent)
            last = self._layout(self._subscriptions).at
            layout.in_last = [last[name] for name in layout.at]
        return self._layouts[key]

    def _totals(self, signal: Signal, stage: str) -> Sequence[float]:
        if signal not in self._failed:
            try:
                return signal.totals(stage)
            except Exception as error:
                self._failed.add(signal)
                name = signal.columns[0].partition("/")[0]
                warn(f"{name} is no longer measured ({describe(error)}). Training continues.")
        return [nan] * len(signal.columns)

    def _deliver(
        self, context: RunContext, report: _Report, ended: Sequence[_Subscription], rows: Rows
    ) -> None:
        """Deliver windows, some batches after the report."""
        report.rows, self.costs = rows, report.costs
        recent = self._recent[report.stage]
        if not recent or len(report.layout.signals) >= len(recent[-1].layout.signals):
            recent.append(report)
            history, batch = self.histories[report.stage], report.stamp.batch
            if self._rank == 0 and history.due(batch, report.at_end):
                history.add(report.step, batch, report.layout.at, rows, report.costs)
        found: dict[str, float] = {}
        for callback, columns, last in ended:
            window = columns.window(last[report.stage], report, self._rank)
            last[report.stage] = report
            found |= callback.call(callback.receive, window) or {}
        if found:
            context.log(found, report.step)

    def summary_windows(self, context: RunContext, stage: str) -> list[tuple[int, Window]]:
        """The whole run of a stage, and its last window with batches if that is shorter.

        Each comes with the step of its first batch. They end at the last report of all ranks; if
        the only rank did not end the stage, the whole run ends now.
        """
        began, reports = self._began.get(stage), list(self._recent[stage])
        if began is None or not self._signals:
            return []
        if self._alone and not (reports and reports[-1].at_end):
            reports.append(self._report(context, stage, self._subscriptions))
        if not reports:
            return []
        everything = reports[-1].layout
        found = [(began.step, everything.window(began, reports[-1], self._rank))]
        alike = [report for report in reports if report.layout.signals == everything.signals]
        for before, report in reversed(list(pairwise(alike))):
            window = report.layout.window(before, report, self._rank)
            if window.batches:
                return [*found, (before.step + 1, window)]
        return found


#: Maximum reports, and named actions in the table.
_MOST_POINTS, _MOST_ACTIONS = 100, 20
#: Of timed batches: columns and their names in the table; means over ranks, but for two.
_TIMED = {
    "batch/count": "timed_batches",
    "batch/seconds": "timed_seconds",
    "flops/ideal_seconds": "ideal_seconds",
    "batch/samples": "samples",
    "batch/tokens": "tokens",
}
_SUMMED = ("batch/samples", "batch/tokens")
_TIMES = {f"timings/{name}": name for name in CATEGORIES}


class _Point(NamedTuple):
    """The measurements from the start of a stage to a report."""

    step: int
    batch: int
    #: By column.
    totals: Mapping[str, float]
    #: The costs of named actions on rank 0.
    costs: Totals


class StageHistory:
    """Totals of a stage at some of its reports.

    They are cumulative: leaving a report out merges two windows.
    """

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._every = 1.0

    def due(self, batch: int, at_end: bool) -> bool:
        """Whether a report after this many batches is kept."""
        if not self._points:
            return True
        return batch - self._points[-1].batch >= (1 if at_end else self._every)

    def add(self, step: int, batch: int, columns: Iterable[str], rows: Rows, costs: Totals) -> None:
        """Keep a report: its step, the batches so far, totals of each rank, and named costs."""
        means = rows[0] if len(rows) == 1 else np.mean(rows, axis=0).tolist()
        totals = {
            name: value * (len(rows) if name in _SUMMED else 1)
            for name, value in zip(columns, means, strict=True)
            if (name in _TIMED or name in _TIMES) and isfinite(value)
        }
        points = self._points
        points.append(_Point(step, batch, totals, costs))
        if len(points) > _MOST_POINTS:
            # The first point stays, because the warm-up ends there.
            del points[1:-1:2]
            self._every = (points[-1].batch - points[0].batch) / len(points)

    def table(self) -> dict[str, Any]:
        """The windows after the first one, which holds the warm-up; empty if there are none.

        One list per name, with one value per window: ``last`` (the step), ``batches``, the timed
        batches with their seconds, samples and tokens, and seconds by category (``timings``) and
        by named action (``culprits``). What is 0 in all windows is left out.
        """
        points = list(self._points)  # it may be called on another thread
        # If reports differ in their columns, those of most of them.
        columns = Counter(frozenset(point.totals) for point in points).most_common(1)
        known = columns[0][0] if columns else frozenset()
        points = [point for point in points if known <= point.totals.keys()]
        pairs = list(pairwise(points))
        if not pairs:
            return {}
        all_rises = {
            name: _rounded(late.totals[name] - early.totals[name] for early, late in pairs)
            for name in known
        }
        rises = {name: values for name, values in all_rises.items() if any(values)}
        found: dict[str, Any] = {
            "last": [late.step for _, late in pairs],
            "batches": [late.batch - early.batch for early, late in pairs],
            **{name: rises[column] for column, name in _TIMED.items() if column in rises},
        }
        times = {name: rises[column] for column, name in _TIMES.items() if column in rises}
        if times:
            costly = (points[-1].costs - points[0].costs).table(TABLED)[:_MOST_ACTIONS]
            tables = [
                {row.name: row.seconds for row in (late.costs - early.costs).table(TABLED)}
                for early, late in pairs
            ]
            found["timings"] = times
            found["culprits"] = {
                row.name: _rounded(table.get(row.name, 0.0) for table in tables) for row in costly
            }
        return found


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
