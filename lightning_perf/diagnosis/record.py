"""Collects what a diagnosis needs, in bounded memory."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis.signals import Setup, Signals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis.signals import Costs

#: Windows kept at most, and numbers in all of them.
_MOST_WINDOWS, _FEWEST_WINDOWS, _MOST_NUMBERS = 512, 16, 1_000_000
#: Columns that are not running totals, or their first part.
_GAUGES = ("memory/", "waits/node_rank")
#: Steps whose times are kept.
_MOST_STEPS = 20_000


class Record:
    """The windows, named costs and latest step times of a training.

    Neighbouring windows are merged when there are too many.
    """

    def __init__(self) -> None:
        #: Named costs before the first window.
        self.origin: Costs = {}
        self._windows: list[Window] = []
        self._costs: list[Costs] = []
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._count = 0
        self._first: float | None = None

    def add(self, window: Window, costs: Costs) -> None:
        """Add a window, and the named costs up to its end.

        One without batches, after the last batch, extends the window before it.
        """
        if self._windows and not window.batches:
            self._windows[-1] = _merged(self._windows[-1], window)
            self._costs[-1] = costs
            return
        self._windows.append(window)
        self._costs.append(costs)
        numbers = window.world_size * len(window.columns)
        most = min(max(_MOST_NUMBERS // max(numbers, 1), _FEWEST_WINDOWS), _MOST_WINDOWS)
        if len(self._windows) > most:
            # The first one stays alone: it holds the warm-up.
            rest, costs_of_rest = self._windows[1:], self._costs[1:]
            pairs = [rest[i : i + 2] for i in range(0, len(rest), 2)]
            self._windows[1:] = [reduce(_merged, pair) for pair in pairs]
            # Of each pair those at its end.
            self._costs[1:] = [costs_of_rest[i : i + 2][-1] for i in range(0, len(rest), 2)]

    def add_steps(self, seconds: Iterable[float], first: float | None = None) -> None:
        """Add the times of batches, in order, NaN for those that do not count.

        ``first`` is the time of the run's first batch, if it is among them.
        """
        if not self._steps:
            self._first = first
        values = list(seconds)
        self._steps.extend(values)
        self._count += len(values)

    def signals(self, setup: Setup, mfu: float | None = None) -> Signals:
        """What was collected so far; cheap, and safe to use on another thread."""
        return Signals(
            windows=tuple(self._windows),
            origin=self.origin,
            costs=tuple(self._costs),
            steps=np.array(self._steps, dtype=float),
            dropped=self._count - len(self._steps),
            first_step=self._first,
            mfu=mfu,
            setup=setup,
        )


def _merged(early: Window, late: Window) -> Window:
    gauge = np.array([name.startswith(_GAUGES) for name in late.columns])
    one, two = np.asarray(early.rows, dtype=float), np.asarray(late.rows, dtype=float)
    rows = np.where(gauge, two, one + two)
    return replace(late, first=early.first, rows=rows if len(rows) > 1 else rows.tolist())
