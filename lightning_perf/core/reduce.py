"""What several ranks measured of one thing: sums, means, the spread, and who is the slowest."""

from __future__ import annotations

import math
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

#: One row per rank; NaN past the end of what a rank sent.
Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]


# One rank is the usual case, and numpy's reductions of one row would take longer than all else of a
# report: hence the short cuts.


def sum_over_ranks(rows: Rows) -> list[float]:
    """The sums over ranks.

    Args:
        rows: One a rank.
    """
    found: list[float] = (rows[0] if len(rows) == 1 else rows.sum(0)).tolist()
    return found


def min_over_ranks(rows: Rows) -> list[float]:
    """The least of each number on any rank.

    Args:
        rows: One a rank.
    """
    found: list[float] = (rows[0] if len(rows) == 1 else rows.min(0)).tolist()
    return found


def sum_of_rates(rows: Rows) -> list[float]:
    """The sums over ranks of what each has per one of its first number, such as seconds.

    Args:
        rows: One a rank; one whose first number is not above 0 counts for nothing.

    Example:
        >>> sum_of_rates(np.array([[2.0, 64.0], [1.0, 96.0]]))
        [2.0, 128.0]
    """
    if len(rows) == 1:
        first, *_ = values = sum_over_ranks(rows)
        return [value / first if first > 0 else 0.0 for value in values]
    firsts = rows[:, :1]
    return sum_over_ranks(np.divide(rows, firsts, out=np.zeros_like(rows), where=firsts > 0))


def over_ranks(names: Sequence[str], rows: Rows) -> dict[str, float]:
    """The mean over ranks by name, and with several ranks what they differ by.

    Args:
        names: Of the first numbers of each row.
        rows: One a rank; what is not a number is not known.

    Returns:
        ``NAME`` and, with several ranks, ``NAME/min``, ``/median``, ``/max`` and
        ``/slowest_rank``, the rank of the largest; without what some rank does not know.

    Example:
        >>> over_ranks(["forward"], np.array([[1.0], [3.0]]))
        {'forward': 2.0, 'forward/min': 1.0, 'forward/median': 2.0, 'forward/max': 3.0, \
'forward/slowest_rank': 1.0}
    """
    if len(rows) == 1:
        own = zip(names, rows[0].tolist(), strict=False)
        return {name: value for name, value in own if not math.isnan(value)}
    sent = rows[:, : len(names)]
    known = [not math.isnan(each) for each in sent.sum(0).tolist()]
    names, sent = list(compress(names, known)), sent[:, known]
    ordered = np.sort(sent.T)
    middle = len(rows) // 2
    figures = {
        "": sent.mean(0),
        "/min": ordered[:, 0],
        "/median": (ordered[:, middle] + ordered[:, -1 - middle]) / 2,
        "/max": ordered[:, -1],
        "/slowest_rank": sent.argmax(0).astype(float),
    }
    return {
        f"{name}{word}": value
        for word, values in figures.items()
        for name, value in zip(names, values.tolist(), strict=True)
    }
