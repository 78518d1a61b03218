"""Windows: the measurements of all ranks between two reports, gathered once for all callbacks."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import filter as matching
from functools import partial
from itertools import pairwise
from math import inf, nan
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lightning_perf.core.window import Columns
from lightning_perf.errors import ConfigError, closest, describe, let_through, warn
from lightning_perf.run.collective import LAST, Gatherer
from lightning_perf.run.window_log import MOST, Report, WindowLog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.window import Increase, Rows, Window
    from lightning_perf.run.batches import BatchTotals
    from lightning_perf.run.profiler import Spans
    from lightning_perf.run.stages import StageStack
    from lightning_perf.timing.totals import Action, Cost


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
    keeps_windows: bool

    def is_due(self, run: Any, at_end: bool) -> bool:
        """Whether a window ends now, the same on every rank."""

    def costs(self) -> Mapping[Action, Cost]:
        """Further named costs of this rank until now, the end of a window."""

    def receive(self, window: Window) -> Mapping[str, float]:
        """Turn a window into metrics."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call one of these; None if it fails."""


class _Subscription(NamedTuple):
    """The columns that a callback receives."""

    callback: Subscriber
    #: A power of two, the same on every rank.
    number: int
    #: The position of each column by its name.
    columns: Mapping[str, int]
    #: By stage: the reports where its windows ended.
    logs: dict[str, WindowLog]


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
        # The position of each column in a row, and of gauges.
        self._columns = Columns()
        self._gauges: list[int] = []
        # By stage: what was measured last, and where the columns count from.
        self._measured: dict[str, list[float]] = {}
        self._origins: dict[str, list[float]] = {}
        self._failed: set[Signal] = set()
        self._subscriptions: list[_Subscription] = []
        #: Reports before this batch need no check, except where Lightning logs.
        self.quiet_until: float = 0
        #: By stage, of several ranks: this rank's totals when an exception ended the run.
        self.interrupted: dict[str, Report] = {}
        #: By stage: the log of reports of most columns.
        self.logs: dict[str, WindowLog] = {}

    # -- set-up -------------------------------------------------------------------------------

    def subscribe(self, callback: Subscriber, columns: Iterable[str]) -> None:
        """Deliver windows of some columns to a callback from now on.

        Columns are names, or patterns such as ``"timings/*"``.

        Raises:
            ConfigError: No signal has a column, or with several ranks all signals have too many.
        """
        if not isinstance(columns, tuple | list):
            problem = "is not a tuple or list of names"
            raise ConfigError("columns", columns, problem, "('timings/forward',)")
        names = Columns()
        for pattern in columns:
            signal = self._signal(pattern)
            matches = matching(signal.columns, pattern)
            if not matches:
                raise _unknown_column(pattern, signal.columns)
            names.update({name: self._columns[name] for name in matches})
        most, count = self.gatherer.width, len(self._columns)
        if count > most and not self._alone:
            problem = f"makes {count} columns over all signals, and a rank can send {most}"
            raise ConfigError("columns", [*columns], problem, "a signal with fewer columns")
        number = 1 << len(self._subscriptions)
        self._subscriptions.append(_Subscription(callback, number, names, {}))

    def _signal(self, column: str) -> Signal:
        prefix = column.partition("/")[0]
        if prefix not in self._signals:
            if prefix not in self.sources:
                raise _unknown_column(column, [f"{each}/*" for each in self.sources])
            signal = self.sources[prefix]()
            if signal not in self._signals.values():  # it may have several prefixes
                begin = len(self._columns)
                positions = {name: at for at, name in enumerate(signal.columns, begin)}
                self._columns = Columns(self._columns | positions)  # reports keep those they have
                self._gauges += [at for name, at in positions.items() if name in signal.gauges]
            self._signals[prefix] = signal
        return self._signals[prefix]

    # -- stages and batches -------------------------------------------------------------------

    def enter(self) -> None:
        """A stage starts."""
        stage = self._stages.stage
        # Columns count from here, without what passed since the last report of the stage.
        reported, now = self._measured.get(stage), self._measure(stage)
        values = zip(self._origins.get(stage, now), now, reported or now, strict=True)
        origins = self._origins[stage] = [first + value - last for first, value, last in values]
        for position in self._gauges:
            origins[position] = 0.0
        stamp, costs = self._stages.counters.timestamp(), self._spans.totals()
        head = stage, self._stages.step - 1, stamp, False, self._rank
        width = max((len(each.columns) for each in self._subscriptions), default=0)
        start = Report(*head, width, self._gauges, costs, ())
        self.logs.setdefault(stage, WindowLog(start, self._columns, MOST))
        for subscription in self._subscriptions:
            most = MOST if subscription.callback.keeps_windows else 0
            subscription.logs.setdefault(stage, WindowLog(start, subscription.columns, most))

    def begin_batches(self) -> None:
        """The first batch of the current stage has ended: it gives the step of the stage's start.

        Lightning corrects the step of a checkpoint only after the stage has started.
        """
        start = self.logs[self._stages.stage].reports[0]
        if start.stamp.batch == self._stages.counters.batch - 1:
            start.step = self._stages.step - 1

    @property
    def subscribed(self) -> bool:
        """Whether a callback receives windows."""
        return bool(self._subscriptions)

    @property
    def ran(self) -> bool:
        """Whether any stage had a batch."""
        progress, logs = self._stages.progress, self.logs.items()
        return any(progress.timestamp(n).batch > log.reports[0].stamp.batch for n, log in logs)

    def log_of(self, callback: Subscriber, stage: str) -> WindowLog:
        """The windows of a callback; all of them are kept if it has ``keeps_windows``."""
        return next(each.logs[stage] for each in self._subscriptions if each.callback is callback)

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
        report = self._report(self._stages.stage, at_end, due)
        self._add_costs(report, due)
        now = at_end or monitored
        ended = [each for each in due if now or each.callback.trigger.consume_request()]
        when = LAST if last else _NESTED_END if at_end else self._stages.counters.batch
        number = sum(each.number for each in due)
        deliver = partial(self._deliver, report, ended)
        self.gatherer.gather((number, when), report.rows[0], deliver)

    def _add_costs(self, report: Report, due: Iterable[_Subscription]) -> None:
        """Add the further costs that callbacks know to a report."""
        further: dict[Action, Cost] = {}
        for each in due:
            further |= each.callback.call(each.callback.costs) or {}
        if further:
            report.costs = replace(report.costs, further=further)

    def interrupt(self) -> None:
        """End the windows that are open when an exception ends the run.

        The only rank adds them to the logs. With several ranks, each keeps its own totals, since
        those of the others do not arrive.
        """
        for stage, log in self.logs.items():
            if log.last.at_end:
                continue
            report = self._report(stage, True)
            self._add_costs(report, self._subscriptions)
            if not self._alone:
                self.interrupted[stage] = report
                continue
            for each in (log, *(each.logs[stage] for each in self._subscriptions)):
                each.add(report)

    def _report(self, stage: str, at_end: bool, due: Iterable[_Subscription] = ()) -> Report:
        """The totals of this rank."""
        self._batches.fold(stage)
        values = [*map(sub, self._measure(stage), self._origins[stage])]
        stamp, costs = self._stages.progress.timestamp(stage), self._spans.latest
        head = stage, self._stages.step, stamp, at_end, self._rank
        width = sum(len(each.columns) for each in due)
        return Report(*head, width, self._gauges, costs, [values])

    def _measure(self, stage: str) -> list[float]:
        """The totals of all columns."""
        signals = dict.fromkeys(self._signals.values())
        row = [value for signal in signals for value in self._totals(signal, stage)]
        self._measured[stage] = row
        return row

    def _totals(self, signal: Signal, stage: str) -> Sequence[float]:
        if signal not in self._failed:
            try:
                return signal.totals(stage)
            except Exception as error:
                let_through(error)
                self._failed.add(signal)
                name = signal.columns[0].partition("/")[0]
                warn(f"{name} is no longer measured ({describe(error)}). Training continues.")
        return [nan] * len(signal.columns)

    def _deliver(self, report: Report, ended: Sequence[_Subscription], rows: Rows) -> None:
        """Deliver windows, some batches after the report."""
        report.rows = rows
        log = self.logs[report.stage]
        if report.width >= log.reports[0].width:  # not of a callback that reports more often
            log.add(report)
        metrics: dict[str, float] = {}
        rises: dict[Report, Rows | Increase] = {}  # most callbacks have windows of one length
        for subscription in ended:
            log, callback = subscription.logs[report.stage], subscription.callback
            start = log.last
            log.add(report)
            if start not in rises:
                rises[start] = report.rise(start)
            window = report.window(start, subscription.columns, rises[start])
            metrics |= callback.call(callback.receive, window) or {}
        if metrics:
            self._log(metrics, report.step)

    def summary_windows(self, stage: str, now: bool = True) -> list[tuple[int, Window]]:
        """The whole run of a stage, and its last window with batches if that is shorter.

        Each comes with the step of its first batch. They end at the last report of all ranks; if
        the only rank did not end the stage, the whole run ends ``now``; other threads may not ask
        for that.
        """
        log = self.logs.get(stage)
        if log is None or not self._signals:
            return []
        start, reports = log.reports[0], [each for each in log.recent if len(each.rows)]
        if now and self._alone and not (reports and reports[-1].at_end):
            reports.append(self._report(stage, False))
        if not reports:
            return []
        end = reports[-1]
        windows = [(start.step + 1, end.window(start, log.columns))]
        for before, report in reversed(list(pairwise(reports))):
            if report.stamp.batch > before.stamp.batch:
                return [*windows, (before.step + 1, report.window(before, log.columns))]
        return windows
