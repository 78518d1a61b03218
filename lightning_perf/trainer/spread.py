"""What several ranks measured of one thing: the mean, the spread, and who is the slowest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_perf.trainer.collective import Rows


def over_ranks(names: Sequence[str], rows: Rows) -> dict[str, float]:
    """The mean over ranks by name, and with several ranks what they differ by.

    Args:
        names: Of the first numbers of each row.
        rows: One a rank; what is not a number is not known.

    Returns:
        ``NAME`` and, with several ranks, ``NAME/min``, ``/median``, ``/max`` and
        ``/slowest_rank``, the rank of the largest; without what some rank does not know.

    Example:
        >>> over_ranks(["forward"], [[1.0], [3.0]])
        {'forward': 2.0, 'forward/min': 1.0, 'forward/median': 2.0, 'forward/max': 3.0, \
'forward/slowest_rank': 1.0}
    """
    if len(rows) == 1:
        return _known(names, rows[0])
    sent = torch.tensor(rows, dtype=torch.float64)[:, : len(names)]
    most, slowest = sent.max(0)
    found = _known(names, sent.mean(0).tolist())
    differences = {
        "min": sent.amin(0),
        # Of an even number the mean of both; quantile() would take five times as long.
        "median": (sent.median(0).values - (-sent).median(0).values) / 2,
        "max": most,
        # The largest of what is not known is at some rank, too.
        "slowest_rank": slowest.where(most.isfinite(), math.nan),
    }
    for word, values in differences.items():
        known = _known(names, values.tolist())
        found |= {f"{name}/{word}": value for name, value in known.items()}
    return found


def _known(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    named = zip(names, values, strict=False)
    return {name: value for name, value in named if not math.isnan(value)}
