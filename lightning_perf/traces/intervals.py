"""Sets of time intervals: unions, gaps and overlaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Times at which something happened, without overlaps and in order."""

    starts: Numbers
    ends: Numbers

    @classmethod
    def union(cls, starts: Numbers, ends: Numbers, length: float) -> Intervals:
        """The union of intervals, as far as it is between 0 and a length.

        Example:
            >>> found = Intervals.union(np.array([5.0, -1.0, 1.0]), np.array([9.0, 2.0, 3.0]), 8.0)
            >>> found.starts.tolist(), found.ends.tolist(), found.total
            ([0.0, 5.0], [3.0, 8.0], 6.0)
        """
        starts, ends = np.maximum(starts, 0.0), np.minimum(ends, length)
        order = np.argsort(starts[starts < ends])
        starts, ends = starts[starts < ends][order], ends[starts < ends][order]
        if not len(starts):
            return cls(starts, ends)
        ends = np.maximum.accumulate(ends)
        apart = starts[1:] > ends[:-1]
        return cls(starts[np.r_[True, apart]], ends[np.r_[apart, True]])

    @property
    def total(self) -> float:
        """Their whole length."""
        return float((self.ends - self.starts).sum())

    def gaps(self, length: float) -> Intervals:
        """What they leave free between 0 and a length."""
        return Intervals.union(np.r_[0.0, self.ends], np.r_[self.starts, length], length)

    def overlap(self, other: Intervals) -> float:
        """How long both happened at once.

        Example:
            >>> one = Intervals(np.array([0.0, 5.0]), np.array([3.0, 8.0]))
            >>> one.overlap(Intervals(np.array([2.0]), np.array([6.0])))
            2.0
        """
        return float((other._before(self.ends) - other._before(self.starts)).sum())

    def _before(self, times: Numbers) -> Numbers:
        """Their length before each time."""
        if not len(self.starts):
            return np.zeros_like(times)
        knots = np.column_stack([self.starts, self.ends]).ravel()
        lengths = np.cumsum(self.ends - self.starts)
        before = np.column_stack([np.r_[0.0, lengths[:-1]], lengths]).ravel()
        found: Numbers = np.interp(times, knots, before)
        return found
