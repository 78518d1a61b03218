"""The log of windows: totals of a stage at some of its reports, for the summary and its page."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.timing.totals import CATEGORIES, TABLED, Share, Totals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_perf.core.window import PerRank, Rows

#: Named actions in the table at most.
_MOST_ACTIONS = 20
#: Rows in the table of ranks at most; more ranks share a row, which has the latest of them.
_MOST_RANKS = 512
#: Of timed batches: columns and their names in the table; means over ranks, but for two.
_TIMED = {
    "batch/count": "timed_batches",
    "batch/seconds": "timed_seconds",
    "flops/ideal_seconds": "ideal_seconds",
    "batch/samples": "samples",
    "batch/tokens": "tokens",
}
_SUMMED = {"batch/samples", "batch/tokens"}
#: The categories by their columns.
TIMES = {f"timings/{name}": name for name in CATEGORIES}
_KEPT = (*_TIMED, *TIMES)


class Point(NamedTuple):
    """The measurements from the start of a stage to a report."""

    step: int
    batch: int
    totals: Mapping[str, float]
    #: The costs of named actions on this rank.
    costs: Totals = Totals({})
    #: Seconds of own work above the median rank, of each rank.
    late: PerRank = np.empty(0)


class History:
    """Points of a stage from its start on. They are cumulative: without one, two windows are one.

    Beyond ``most``, every second one is left out, but neither the start nor the warm-up's end.
    """

    def __init__(self, start: Point, most: int = 100) -> None:
        self.points, self._most, self._every = [start], most, 1.0
        #: The last report; it may have no batches of its own.
        self.last = start

    def add(self, point: Point, at_end: bool = False) -> None:
        """Add a report. It is kept if its window is long enough."""
        self.last, points = point, self.points
        if point.batch - points[-1].batch < (1 if at_end else self._every):
            return
        points.append(point)
        if len(points) > self._most:
            del points[2:-1:2]
            self._every = (points[-1].batch - points[0].batch) / len(points)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Step and seconds per batch by category of each window, which add up to all time."""
        start, *points = self.points
        kept = [point for point in points if point.batch < self.last.batch]
        timed = [point for point in (*kept, self.last) if TIMES.keys() <= point.totals.keys()]
        return [
            (late.step, {
                name: (late.totals[column] - early.totals.get(column, 0.0))
                / (late.batch - early.batch)
                for column, name in TIMES.items()
            })
            for early, late in pairwise([start, *timed])
            if late.batch > early.batch
        ]  # fmt: skip

    def table(self, costs: Totals) -> list[Share]:
        """Callbacks, loggers and checkpoints by cost, from the start to these totals."""
        return (costs - self.points[0].costs).table(TABLED)


def table_totals(columns: Mapping[str, int], rows: Rows) -> dict[str, float]:
    """The totals that `table` uses, from those of each rank."""
    means = rows[0] if len(rows) == 1 else np.mean(rows, axis=0).tolist()
    found = {name: means[columns[name]] for name in _KEPT if name in columns}
    if not all(map(isfinite, found.values())):
        found = {name: value for name, value in found.items() if isfinite(value)}
    for name in _SUMMED & found.keys():
        found[name] *= len(rows)
    return found


def table(history: History) -> dict[str, Any]:
    """The windows of a stage; empty if there are none.

    One list per name, with one value per window: ``last`` (the step), ``batches``, the timed
    batches with their seconds, samples and tokens, and seconds by category (``timings``) and by
    named action (``culprits``). What is 0 in all windows is left out. ``warm_up`` is the number of
    windows in which a training warms up.
    """
    start, *points = history.points  # it may be called on another thread
    # If reports differ in their columns, those of most of them.
    columns = Counter(frozenset(point.totals) for point in points).most_common(1)
    known = columns[0][0] if columns else frozenset()
    points = [start, *(point for point in points if known <= point.totals.keys())]
    pairs = list(pairwise(points))
    if not pairs:
        return {}
    all_rises = {
        name: _rounded(late.totals[name] - early.totals.get(name, 0.0) for early, late in pairs)
        for name in known
    }
    rises = {name: values for name, values in all_rises.items() if any(values)}
    found: dict[str, Any] = {
        "warm_up": 1,
        "last": [late.step for _, late in pairs],
        "batches": [late.batch - early.batch for early, late in pairs],
        **{name: rises[column] for column, name in _TIMED.items() if column in rises},
    }
    times = {name: rises[column] for column, name in TIMES.items() if column in rises}
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


def ranks_table(history: History) -> dict[str, Any]:
    """How late each rank was: the last step of each window, and seconds per batch by rank.

    With many ranks, several share a list, which has the latest of them.
    """
    pairs = list(pairwise(history.points))
    if not pairs:
        return {}
    rises = [(late.late - early.late) / (late.batch - early.batch) for early, late in pairs]
    lateness = np.stack(rises, axis=1)
    each = -(-len(lateness) // _MOST_RANKS)
    lateness = np.maximum.reduceat(lateness, np.arange(0, len(lateness), each), axis=0)
    return {
        "last": [late.step for _, late in pairs],
        "lateness": [_rounded(row, 3) for row in lateness.clip(min=0.0)],
    }


def _rounded(values: Iterable[float], digits: int = 5) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]
