"""Windows from hand-written columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_perf import Timings, Window
from lightning_perf.core.progress import Timestamp
from lightning_perf.core.window import Columns
from lightning_perf.run.window_log import TIMES
from lightning_perf.timing.totals import CATEGORIES

#: The categories that waiting is a part of.
_WAITS = {
    "waits/start": "other", "waits/forward": "forward", "waits/backward": "backward",
    "waits/validation": "validation",
}  # fmt: skip


def window_of(columns: dict[str, list[float]], **options: Any) -> Window:
    """A window with one value per rank in each column."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    given: dict[str, Any] = {
        "stage": "train", "step": 9, "first": Timestamp(batch=5), "last": Timestamp(batch=10),
        "at_end": False, "rank": 0, "totals": rows,
    }  # fmt: skip
    positions = Columns({name: number for number, name in enumerate(columns)})
    table = rows if len(rows) == 1 else np.array(rows)
    return Window(columns=positions, rows=table, **(given | options))


def ranks_window(
    ranks: int,
    own: Mapping[str, Mapping[int, float]],
    waits: Mapping[str, Mapping[int, float]],
    node: int = 0,
    **columns: list[float],
) -> Window:
    """Ten batches in which each rank spends 1 s in each of eleven categories.

    Args:
        ranks: How many.
        own: By category and rank, more seconds.
        waits: By column and rank, seconds of waiting, which are part of a category.
        node: Ranks per node; 0 for one node.
        **columns: Further ones.
    """
    found = {f"timings/{name}": [1.0] * ranks for name in CATEGORIES}
    found |= {name: [0.0] * ranks for name in ("timings/reduce_metrics", "timings/validation")}
    found |= {name: [0.0] * ranks for name in _WAITS}
    found |= {f"waits/exchange{name}": [0.0] * ranks for name in ("", "/start", "/forward")}
    found["waits/node_rank"] = [float(rank // node if node else 0) for rank in range(ranks)]
    found["progress/batches"] = [10.0] * ranks
    more = [(f"timings/{name}", seconds) for name, seconds in own.items()]
    more += [(f"timings/{_WAITS[name]}", seconds) for name, seconds in waits.items()]
    for name, seconds in [*more, *waits.items()]:
        for rank, each in seconds.items():
            found[name][rank] += each
    return window_of(found | columns, first=Timestamp(), last=Timestamp(batch=10))


def rows_of(timings: Timings) -> list[tuple[int, dict[str, float]]]:
    """Step and seconds per batch by category of each window of the run's main stage."""
    windows = [] if timings._log is None else timings._log.windows()
    return [
        (each.step, {n: each.mean(column) / each.batches for column, n in TIMES.items()})
        for each in windows
        if each.batches
    ]
