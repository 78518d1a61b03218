"""Windows from hand-written columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_perf import Window
from lightning_perf.core.progress import Timestamp


def window_of(columns: dict[str, list[float]], **options: Any) -> Window:
    """A window with one value per rank in each column."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    given: dict[str, Any] = {
        "stage": "train", "step": 9, "first": Timestamp(batch=5), "last": Timestamp(batch=10),
        "at_end": False, "rank": 0, "totals": rows,
    }  # fmt: skip
    positions = {name: number for number, name in enumerate(columns)}
    table = rows if len(rows) == 1 else np.array(rows)
    return Window(columns=positions, rows=table, **(given | options))
