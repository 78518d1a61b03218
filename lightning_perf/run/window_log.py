"""Windows as they are kept: reports of a stage in bounded memory, and the windows between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from operator import sub
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lightning_perf.core.window import Increase, Window
from lightning_perf.timing.totals import CATEGORIES, TABLED, Share, Totals
from lightning_perf.units import rounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.core.progress import Timestamp
    from lightning_perf.core.window import Rows, Table

#: Reports that a log keeps at most, beside the last three, and numbers in all of them. Some are
#: kept in any case.
MOST, _MOST_NUMBERS, _FEWEST = 100, 4_000_000, 16
#: Named actions in the table at most.
_MOST_ACTIONS = 20
#: Columns of timed batches, and their names in the table: means over ranks, but `_SUMMED`.
_TIMED = {
    "batch/count": "timed_batches",
    "batch/seconds": "timed_seconds",
    "flops/ideal_seconds": "ideal_seconds",
    "batch/samples": "samples",
    "batch/tokens": "tokens",
}
#: The columns that are summed over ranks, and those of the batches that they do not contain.
_SUMMED = {f"batch/{name}": f"batch/uncounted_{name}" for name in ("samples", "tokens")}
#: The categories by their columns.
TIMES = {f"timings/{name}": name for name in CATEGORIES}
_KEPT = (*_TIMED, *_SUMMED.values(), *TIMES)


@dataclass(slots=True, eq=False)
class Report:
    """The progress of a stage, and the totals from its start until then."""

    stage: str
    step: int
    stamp: Timestamp
    at_end: bool
    #: This process's rank.
    rank: int
    #: The number of columns that callbacks receive of it.
    width: int
    #: The positions of columns that are not running totals.
    gauges: Sequence[int]
    #: The costs of named actions on this rank.
    costs: Totals
    #: The totals of each rank, once they have arrived. Empty at the start of a stage.
    rows: Rows

    def rise(self, start: Report) -> Rows | Increase:
        """The increase of all columns since another report; gauges have their last value."""
        now, before = self.rows, start.rows
        if not len(before):
            return now
        if isinstance(now, np.ndarray):
            return Increase(now, cast("Table", before), self.gauges)
        row = [*map(sub, now[0], before[0])]
        for position in self.gauges:
            row[position] = now[0][position]
        return [row]

    def window(
        self, start: Report, columns: Mapping[str, int], rise: Rows | Increase | None = None
    ) -> Window:
        """The window since another report; its increase may be known."""
        return Window(
            self.stage, self.step, start.stamp, self.stamp, self.at_end, self.rank, columns,
            self.rise(start) if rise is None else rise, self.rows, (start.costs, self.costs),
        )  # fmt: skip


class WindowLog:
    """Reports of a stage from its start on. They are cumulative: without one, two windows are one.

    Beyond ``most``, every second one is left out, but neither the start nor the warm-up's end.

    Args:
        start: The start of the stage.
        columns: The columns of the windows.
        most: How many reports to keep; by default only the last ones.
    """

    def __init__(self, start: Report, columns: Mapping[str, int], most: int = 0) -> None:
        self.stage, self.reports, self.columns, self._most = start.stage, [start], columns, most
        #: The minimum batches of a window that is kept.
        self._fewest: float = 1 if most else inf
        #: The last reports; they may have no batches of their own.
        self.recent = deque([start], maxlen=3)

    def add(self, report: Report) -> None:
        """Add a report. It is kept if its window is long enough."""
        self.recent.append(report)
        reports, batch = self.reports, report.stamp.batch
        batches = batch - reports[-1].stamp.batch
        if report.at_end and not batches and self._most and len(reports) > 1:
            reports[-1] = report  # with what has followed the last batch, such as validation
            return
        if batches < self._fewest and not (report.at_end and batches and self._most):
            return
        reports.append(report)
        numbers = len(report.rows) * len(report.rows[0])
        if len(reports) > min(self._most, max(_MOST_NUMBERS // max(numbers, 1), _FEWEST)):
            del reports[2:-1:2]
            self._fewest = (batch - reports[0].stamp.batch) / len(reports)

    @property
    def last(self) -> Report:
        """The last report, or the start."""
        return self.recent[-1]

    def windows(self) -> list[Window]:
        """The kept windows, in order, up to the last report."""
        start, *reports = self.reports
        kept = [report for report in reports if report.stamp.batch < self.last.stamp.batch]
        ends = [start, *kept, *([self.last] if self.last is not start else ())]
        return [late.window(early, self.columns) for early, late in pairwise(ends)]

    def windows_of(self, rank: int, end: Report) -> list[Window]:
        """The windows of one rank up to a report of its own, without its waits for others."""
        columns = {name: at for name, at in self.columns.items() if not name.startswith("waits/")}
        start, *reports = self.reports
        own = [replace(each, rows=[[*each.rows[rank]]]) for each in reports]
        return [late.window(early, columns) for early, late in pairwise([start, *own, end])]

    def table(self, costs: Totals) -> list[Share]:
        """Callbacks, loggers and checkpoints by cost, from the start to these totals."""
        return (costs - self.reports[0].costs).table(TABLED)


def _totals(rows: Rows, columns: Mapping[str, int]) -> dict[str, float]:
    """The totals that `table` uses, from those of each rank."""
    means = rows[0] if len(rows) == 1 else np.mean(rows, axis=0).tolist()
    totals = {name: means[columns[name]] for name in _KEPT if name in columns}
    return {
        name: value * (len(rows) if name in _SUMMED else 1)
        for name, value in totals.items()
        if isfinite(value)
    }


def table(log: WindowLog) -> dict[str, Any]:
    """The windows of a stage; empty if there are none.

    One list per name, with one value per window: ``last`` (the step), ``batches``, the timed
    batches with their seconds, samples and tokens, and seconds by category (``timings``) and by
    named action (``culprits``). What is 0 in all windows is left out, as are samples and tokens if
    some batch's could not be counted. ``warm_up`` is the number of windows in which a run warms
    up.
    """
    start, *reports = log.reports  # it may be called on another thread
    if not reports:
        return {}
    points = [(start, {}), *((each, _totals(each.rows, log.columns)) for each in reports)]
    pairs = list(pairwise(points))
    known = [name for name in _KEPT if all(name in totals for _, totals in points[1:])]
    all_rises = {
        name: rounded(late[name] - early.get(name, 0.0) for (_, early), (_, late) in pairs)
        for name in known
    }
    rises = {name: values for name, values in all_rises.items() if any(values)}
    history: dict[str, Any] = {
        "warm_up": 1,
        "last": [late.step for _, (late, _) in pairs],
        "batches": [late.stamp.batch - early.stamp.batch for (early, _), (late, _) in pairs],
        **{
            name: rises[column]
            for column, name in _TIMED.items()
            if column in rises and _SUMMED.get(column) not in rises
        },
    }
    times = {name: rises[column] for column, name in TIMES.items() if column in rises}
    if times:
        costly = (points[-1][0].costs - start.costs).table(TABLED)[:_MOST_ACTIONS]
        tables = [
            {row.name: row.seconds for row in (late.costs - early.costs).table(TABLED)}
            for (early, _), (late, _) in pairs
        ]
        history["timings"] = times
        history["culprits"] = {
            row.name: rounded(table.get(row.name, 0.0) for table in tables) for row in costly
        }
    return history
