"""The windows in the summary of a run: totals at some of its reports, in bounded memory."""

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

#: Reports kept at most, and named actions in the table.
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
    """What was measured from the beginning of a stage to a report."""

    step: int
    batch: int
    #: By column.
    totals: Mapping[str, float]
    #: What named actions cost on rank 0.
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
            # The first one stays: the warm-up ends there.
            del points[1:-1:2]
            self._every = (points[-1].batch - points[0].batch) / len(points)

    def table(self) -> dict[str, Any]:
        """The windows after the first one, which holds the warm-up; empty if there are none.

        One list per name, with one value per window: ``last`` (the step), ``batches``, the timed
        batches with their seconds, samples and tokens, and seconds by category (``timings``) and
        by named action (``culprits``). What is 0 in all windows is left out.
        """
        points = list(self._points)  # it may be called on another thread
        # Reports may have different columns: what most of them have.
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
