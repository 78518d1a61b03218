"""Windows: the measurements of all ranks between two reports, gathered once for all callbacks."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import partial
from itertools import pairwise
from math import inf, nan
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from lightning_perf.core.window import Columns, Increase, Rows, Window
from lightning_perf.errors import ConfigError, closest, describe, warn
from lightning_perf.run.collective import LAST, Gatherer
from lightning_perf.run.history import History, Point, table_totals
from lightning_perf.timing.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Timestamp
    from lightning_perf.core.window import Table
    from lightning_perf.run.batches import BatchTotals
    from lightning_perf.run.profiler import Spans
    from lightning_perf.run.stages import StageStack


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


class Subscriber(Protocol):
    """What receives windows: a `WindowCallback`."""

    trigger: Any
    monitored: bool

    def is_due(self, run: Any, at_end: bool) -> bool:
        """Whether a window ends now, the same on every rank."""

    def window_ended(self, run: Any) -> None:
        """A window of this subscriber has ended, and is delivered later."""

    def receive(self, window: Window) -> Mapping[str, float]:
        """Turn a window into metrics."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call one of these; None if it fails."""


@dataclass(slots=True, eq=False)
class _Report:
    """The progress of a stage, and the totals until then."""

    stage: str
    step: int
    stamp: Timestamp
    at_end: bool
    #: Those that were measured. The columns of the others have the values of an earlier report.
    signals: Collection[Signal]
    #: The costs of named actions on this rank.
    costs: Totals
    #: The totals of each rank, once they have arrived. Empty at the start of a stage.
    rows: Rows


class _Subscription(NamedTuple):
    """The columns that a callback receives."""

    callback: Subscriber
    #: A power of two, the same on every rank.
    number: int
    signals: Collection[Signal]
    #: The position of each column by its name.
    columns: Mapping[str, int]
    #: Where its last window of each stage ended.
    last: dict[str, _Report]


#: The time of a report at the end of a stage within another one: ranks may have had other numbers
#: of batches.
_NESTED_END = -1


def _unknown_column(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError("columns", name, "matches no column", repr(closest(name, known, "batch/*")))


class Windows:
    """Takes one snapshot per report, gathers it once, and delivers its window to each due callback.

    Args:
        trainer: The trainer whose ranks take part. With several, all must construct this together.
        stages: Where the run is.
        batches: Folded before each snapshot.
        spans: The costs of named actions.
        log: Receives the metrics of a report, and its step.
    """

    def __init__(
        self,
        trainer: Trainer,
        stages: StageStack,
        batches: BatchTotals,
        spans: Spans,
        log: Callable[[Mapping[str, float], int], None],
    ) -> None:
        self._stages, self._batches, self._spans, self._log = stages, batches, spans, log
        self.gatherer = Gatherer(trainer)
        #: Reports in flight.
        self.pending: Collection[object] = self.gatherer.pending
        self._rank, self._alone = trainer.global_rank, trainer.world_size == 1
        #: Start the signal of a prefix, such as ``timings``, once a callback subscribes to it.
        self.sources: dict[str, Callable[[], Signal]] = {}
        self._signals: dict[str, Signal] = {}
        # The position of each column in a row, of the first one of each signal, and of gauges.
        self._columns = Columns()
        self._begin: dict[Signal, int] = {}
        self._gauges: list[int] = []
        # By stage: what was measured last, and where the columns count from.
        self._measured: dict[str, list[float]] = {}
        self._origins: dict[str, list[float]] = {}
        self._failed: set[Signal] = set()
        self._subscriptions: list[_Subscription] = []
        #: Reports before this batch need no check, except where Lightning logs.
        self.quiet_until: float = 0
        # By stage: its start, and the last reports of all signals.
        self._began: dict[str, _Report] = {}
        self._recent: defaultdict[str, deque[_Report]] = defaultdict(partial(deque, maxlen=3))
        #: By stage: the log of its windows.
        self.histories: dict[str, History] = {}

    # -- set-up -------------------------------------------------------------------------------

    def subscribe(self, callback: Subscriber, columns: Iterable[str]) -> None:
        """Deliver windows of some columns to a callback from now on.

        Columns are names, or patterns such as ``"timings/*"``.

        Raises:
            ConfigError: No signal has a column, or with several ranks all signals have too many.
        """
        if not isinstance(columns, tuple | list):
            example = (columns if isinstance(columns, str) else "timings/forward",)
            problem = "is not a tuple or list of names"
            raise ConfigError("columns", columns, problem, repr(example))
        names, signals = Columns(), dict[Signal, None]()
        for pattern in columns:
            signal = self._signal(pattern)
            found = matching(signal.columns, pattern)
            if not found:
                raise _unknown_column(pattern, signal.columns)
            names.update({name: self._columns[name] for name in found})
            signals[signal] = None
        most, count = self.gatherer.width, len(self._columns)
        if count > most and not self._alone:
            problem = f"makes {count} columns over all signals, and a rank can send {most}"
            raise ConfigError("columns", [*columns], problem, "a signal with fewer columns")
        number = 1 << len(self._subscriptions)
        self._subscriptions.append(_Subscription(callback, number, signals, names, {}))

    def _signal(self, column: str) -> Signal:
        prefix = column.partition("/")[0]
        if prefix not in self._signals:
            if prefix not in self.sources:
                raise _unknown_column(column, [f"{each}/*" for each in self.sources])
            signal = self._signals[prefix] = self.sources[prefix]()
            if signal not in self._begin:  # it may have several prefixes
                begin = self._begin[signal] = len(self._columns)
                self._columns.update({name: at for at, name in enumerate(signal.columns, begin)})
                gauges = (name in signal.gauges for name in signal.columns)
                self._gauges += [at for at, gauge in enumerate(gauges, begin) if gauge]
        return self._signals[prefix]

    # -- stages and batches -------------------------------------------------------------------

    def enter(self) -> None:
        """A stage starts."""
        stage, signals = self._stages.stage, self._begin.keys()
        stamp = self._stages.counters.timestamp()
        began = _Report(stage, self._stages.step, stamp, False, signals, Totals({}), ())
        self._began.setdefault(stage, began)
        if stage not in self.histories:
            start = Point(began.step - 1, stamp.batch, {}, self._spans.totals)
            self.histories[stage] = History(start)
        for subscription in self._subscriptions:
            subscription.last.setdefault(stage, began)
        # Columns count from here, without what passed since the last report of the stage.
        reported = [*self._measured.get(stage, ())]
        now = self._measure(stage, signals)
        values = zip(self._origins.get(stage, now), now, reported or now, strict=True)
        origins = self._origins[stage] = [first + value - last for first, value, last in values]
        for position in self._gauges:
            origins[position] = 0.0

    @property
    def ran(self) -> bool:
        """Whether any stage had a batch."""
        began, progress = self._began.items(), self._stages.progress
        return any(progress.timestamp(stage).batch > at.stamp.batch for stage, at in began)

    def report(self, run: Any, at_end: bool, *, monitored: bool = False) -> None:
        """Gather a snapshot for the callbacks that are due, or for those that can be monitored.

        Callbacks receive the run that is passed. Which are due follows from values that all ranks
        share, so every rank sends the same messages.
        """
        subscriptions = self._subscriptions
        due = [
            each
            for each in subscriptions
            if (each.callback.monitored if monitored else each.callback.is_due(run, at_end))
        ]
        self.quiet_until = min(
            (each.callback.trigger.quiet_until for each in subscriptions), default=inf
        )
        if not (due and self._columns) or self.gatherer.lost:
            return
        last = at_end and not self._stages.nested
        if last:
            self._batches.wait()
        sent = subscriptions if last else due
        report = self._report(self._stages.stage, sent, at_end)
        for each in due:
            each.callback.call(each.callback.window_ended, run)
        now = at_end or monitored
        ended = [each for each in due if now or each.callback.trigger.consume_request()]
        when = LAST if last else _NESTED_END if at_end else self._stages.counters.batch
        number = sum(each.number for each in sent)
        deliver = partial(self._deliver, report, ended)
        self.gatherer.gather((number, when), report.rows[0], deliver)

    def _report(self, stage: str, sent: Sequence[_Subscription], at_end: bool = False) -> _Report:
        """The totals of this rank."""
        self._batches.fold(stage)
        signals = dict.fromkeys(signal for each in sent for signal in each.signals).keys()
        row = self._measure(stage, signals)
        values = [*map(sub, row, self._origins[stage])]
        stamp, costs = self._stages.progress.timestamp(stage), self._spans.latest
        return _Report(stage, self._stages.step, stamp, at_end, signals, costs, [values])

    def _measure(self, stage: str, signals: Iterable[Signal]) -> list[float]:
        """The totals of all columns, now for some signals and as measured last for the others."""
        row = self._measured.setdefault(stage, [nan] * len(self._columns))
        for signal in signals:
            begin = self._begin[signal]
            row[begin : begin + len(signal.columns)] = self._totals(signal, stage)
        return row

    def _columns_of(self, report: _Report) -> Columns:
        """The positions of the measured columns of a report."""
        if len(report.signals) == len(self._begin):
            return self._columns
        names = (name for signal in report.signals for name in signal.columns)
        return Columns({name: self._columns[name] for name in names})

    def _window(
        self, columns: Mapping[str, int], start: _Report, end: _Report, rows: Rows | Increase
    ) -> Window:
        stamps = start.stamp, end.stamp
        return Window(end.stage, end.step, *stamps, end.at_end, self._rank, columns, rows, end.rows)

    def _rise(self, start: _Report, end: _Report) -> Rows | Increase:
        """The increase of all columns between two reports; gauges have their last value."""
        now, before = end.rows, start.rows
        if not len(before):
            return now
        if isinstance(now, np.ndarray):
            return Increase(now, cast("Table", before), self._gauges)
        row = [*map(sub, now[0], before[0])]
        for position in self._gauges:
            row[position] = now[0][position]
        return [row]

    def _totals(self, signal: Signal, stage: str) -> Sequence[float]:
        if signal not in self._failed:
            try:
                return signal.totals(stage)
            except Exception as error:
                self._failed.add(signal)
                name = signal.columns[0].partition("/")[0]
                warn(f"{name} is no longer measured ({describe(error)}). Training continues.")
        return [nan] * len(signal.columns)

    def _deliver(self, report: _Report, ended: Sequence[_Subscription], rows: Rows) -> None:
        """Deliver windows, some batches after the report."""
        report.rows = rows
        recent = self._recent[report.stage]
        if not recent or len(report.signals) >= len(recent[-1].signals):
            recent.append(report)
            totals = table_totals(self._columns_of(report), rows)
            point = Point(report.step, report.stamp.batch, totals, report.costs)
            self.histories[report.stage].add(point, report.at_end)
        found: dict[str, float] = {}
        rises: dict[_Report, Rows | Increase] = {}  # most callbacks have windows of one length
        for callback, _, _, columns, last in ended:
            start, last[report.stage] = last[report.stage], report
            if start not in rises:
                rises[start] = self._rise(start, report)
            window = self._window(columns, start, report, rises[start])
            found |= callback.call(callback.receive, window) or {}
        if found:
            self._log(found, report.step)

    def summary_windows(self, stage: str) -> list[tuple[int, Window]]:
        """The whole run of a stage, and its last window with batches if that is shorter.

        Each comes with the step of its first batch. They end at the last report of all ranks; if
        the only rank did not end the stage, the whole run ends now.
        """
        began, reports = self._began.get(stage), list(self._recent[stage])
        if began is None or not self._signals:
            return []
        if self._alone and not (reports and reports[-1].at_end):
            reports.append(self._report(stage, self._subscriptions))
        if not reports:
            return []
        end = reports[-1]
        columns = self._columns_of(end)
        found = [(began.step, self._window(columns, began, end, self._rise(began, end)))]
        alike = [report for report in reports if report.signals == end.signals]
        for before, report in reversed(list(pairwise(alike))):
            if report.stamp.batch > before.stamp.batch:
                rows = self._rise(before, report)
                return [*found, (before.step + 1, self._window(columns, before, report, rows))]
        return found
