"""Totals of a stage at some of its reports: for charts, and for the table in the summary."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.timing.totals import CATEGORIES, TABLED, Totals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_perf.core.window import Rows

#: Named actions in the table at most.
_MOST_ACTIONS = 20
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


class History:
    """Points of a stage, in order. They are cumulative: leaving one out merges two windows.

    Beyond ``most``, every second one is left out, but not the first.
    """

    def __init__(self, *points: Point, most: int = 100) -> None:
        self.points, self._most = list(points), most
        self._every = 1.0

    def due(self, batch: int, at_end: bool) -> bool:
        """Whether a report after this many batches is kept."""
        if not self.points:
            return True
        return batch - self.points[-1].batch >= (1 if at_end else self._every)

    def add(self, point: Point) -> None:
        """Keep a point."""
        points = self.points
        points.append(point)
        if len(points) > self._most:
            del points[1:-1:2]
            self._every = (points[-1].batch - points[0].batch) / len(points)


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
    """The windows after the first point, which is after the warm-up; empty if there are none.

    One list per name, with one value per window: ``last`` (the step), ``batches``, the timed
    batches with their seconds, samples and tokens, and seconds by category (``timings``) and by
    named action (``culprits``). What is 0 in all windows is left out.
    """
    points = list(history.points)  # it may be called on another thread
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


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
