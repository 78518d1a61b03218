"""Compares trainings of every kind with and without each of our callbacks, bit by bit.

    python benchmarks/unchanged.py [words in the kind's name]

``tests/run/test_unchanged.py`` does so with the always-on set and PyTorch.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import lightning as L

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.trainings import KINDS, differences, result
from rich.console import Console
from rich.table import Table
from shared import quiet

from lightning_perf import (
    Fixed,
    MemorySnapshot,
    Memray,
    PyTorch,
    VizTracer,
    always_on,
)

OURS: dict[str, Callable[[], list[L.Callback]]] = {
    "nothing": list,
    "always on": lambda: [always_on(show_summary=False)],
    "PyTorch": lambda: [PyTorch(schedule="every 4ba for 2ba", with_stack=True)],
    "VizTracer": lambda: [VizTracer(schedule="every 4ba for 2ba")],
    "Memray": lambda: [Memray(schedule="every 4ba for 2ba")],
    "MemorySnapshot": lambda: [MemorySnapshot(schedule="every 4ba for 2ba")],
    "all": lambda: [
        always_on(show_summary=False),
        PyTorch(schedule=Fixed(1, 1)),
        VizTracer(schedule=Fixed(4, 1)),
        Memray(schedule=Fixed(7, 1)),
    ],
}


def main() -> int:
    """Print a table of kinds and callbacks; return the number of differences."""
    quiet(threads=None)
    table, wrong = Table("kind", *OURS), 0
    words = sys.argv[1:]
    for name, kind in KINDS.items():
        if words and not all(word in name for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain = result(kind, Path(folder, "plain"), [])
            cells = []
            for number, make in enumerate(OURS.values()):
                found = differences(plain, result(kind, Path(folder, str(number)), make()))
                wrong += bool(found)
                cells.append("same" if not found else f"DIFFERS {found[:3]}")
        table.add_row(name, *cells)
        print(name, *cells, sep="\t", flush=True)
    Console(width=160).print(table)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
