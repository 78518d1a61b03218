"""Measures one decision of each schedule in microseconds, compared with a plain function call.

    python benchmarks/schedules.py

Repeats are interleaved, so that noise of the machine affects all rows alike.
"""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import spread

from lightning_perf import Cyclic, Every, GlobalRank, Moment, OnSlowBatch, Stages, Timestamp
from lightning_perf.core.progress import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS, CALLS = 40, 5000
NOW = Moment(
    "train",
    Timestamp(epoch=1, batch=1234, sample=39488, token=505446, step=1234, total_wct=61.7),
    Timestamp(epoch=1, batch=1233, sample=39456, token=505036, step=1233, total_wct=61.65),
    Limits(max_steps=5000),
)


def bare(moment: Moment) -> None:
    """The lower bound: an empty function."""


#: Each decision and its budget in microseconds; None for those without a budget.
ROWS: dict[str, tuple[Callable[[Moment], object], float | None]] = {
    "an empty function": (bare, None),
    'Every("100ba")': (Every("100ba").window, 2.0),
    'Every("2048sp")': (Every("2048sp").window, 2.0),
    'Every("30sec")': (Every("30sec").window, 2.0),
    'Every("0.1dur")': (Every("0.1dur").window, 2.0),
    "Cyclic()": (Cyclic(repeat=0).window, 2.0),
    "three combined with &": ((Every("100ba") & GlobalRank([0]) & Stages("train")).window, 5.0),
    "three combined with |": ((Every("100ba") | Every("2048sp") | Every("0.1dur")).window, 5.0),
    "OnSlowBatch().observe": (OnSlowBatch().observe, None),
    "Moment.ahead(1)": (lambda moment: moment.ahead(1), None),
}


def main() -> None:
    """Measure and print."""
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in track(range(REPEATS), "measuring", transient=True):
        for name, (decide, _budget) in ROWS.items():
            seconds = timeit.timeit(lambda decide=decide: decide(NOW), number=CALLS)
            times[name].append(1e6 * seconds / CALLS)
    table = Table("decision", "median us (10 % to 90 %)", "budget us", title="one decision")
    for name, (_decide, budget) in ROWS.items():
        table.add_row(name, spread(times[name]), "" if budget is None else f"{budget:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
