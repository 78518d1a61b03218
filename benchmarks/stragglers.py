"""Plants a delay on one of several ranks, and measures how often `Timings` names it.

    python benchmarks/stragglers.py [SEEDS]

Each row trains with real processes on gloo: a delay on one rank in one phase, none, or the same on
all ranks. A straggler is found if rank and phase are right and it is said to be chronic.
"""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.late import PHASES, Late, find

WORLDS, DELAYS = (2, 3, 4), (0.005, 0.02, 0.05)


def outcomes(world: int, phase: str, delay: float, seeds: int) -> Iterator[str]:
    """For each seed: ``right``, ``wrong`` (another rank or phase) or ``none``."""
    for seed in range(seeds):
        rank = seed % world
        late = {rank} if phase in PHASES else set(range(world)) if phase == "all" else set[int]()
        with tempfile.TemporaryDirectory() as folder:
            model = Late(late, phase if phase in PHASES else "forward", delay, seed)
            found = find(Path(folder), world, model)["straggler"]
        if found is None or not found["chronic"]:
            yield "none"
        else:
            yield "right" if (found["rank"], found["phase"]) == (rank, phase) else "wrong"


def main() -> None:
    """Measure and print."""
    logging.disable(logging.WARNING)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    cases = [*itertools.product(WORLDS, PHASES, DELAYS), *((w, "none", 0.0) for w in WORLDS)]
    cases += [(world, "all", 0.02) for world in WORLDS]
    table = Table("ranks", "phase", "delay", "named right", "named wrong", "nobody named")
    right = wrong = planted = 0
    for world, phase, delay in track(cases, "training", transient=True):
        found = list(outcomes(world, phase, delay, seeds))
        table.add_row(
            str(world), phase, f"{1e3 * delay:.0f} ms",
            *(str(found.count(what)) for what in ("right", "wrong", "none")),
        )  # fmt: skip
        planted += seeds if phase in PHASES else 0
        right, wrong = right + found.count("right"), wrong + found.count("wrong")
    console = Console(width=100)
    console.print(table)
    precision = right / max(right + wrong, 1)
    console.print(f"recall {right / planted:.1%}, precision {precision:.1%}, {seeds} seeds")


if __name__ == "__main__":
    main()
