"""The operators of a trace by what they cost, as text for people.

torch makes such a table in seconds of pure Python, in the process that trains. This one is made of
the exported trace, in a process of its own::

    python -m lightning_perf.profilers.operator_table TRACE TABLE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_perf.profilers.chrome_trace import read_events
from lightning_perf.profilers.key_averages import Row, key_averages

_WIDTH = 60


def table(rows: Sequence[Row], limit: int = 100) -> str:
    """Rows as text, without columns that hold nothing.

    Args:
        rows: In their order.
        limit: How many of them to show.

    Example:
        >>> print(table([Row("aten::addmm", calls=2, self_cpu=3_500_000, cpu=4_000_000)]))
        name         calls  self CPU %  self CPU ms  CPU ms
        ---------------------------------------------------
        aten::addmm      2      100.0%        3.500   4.000
    """
    lines = [["name"], *([_short(row)] for row in rows[:limit])]
    for title, value, show in _COLUMNS:
        values = [value(row) for row in rows]
        if any(values):
            lines[0].append(title)
            for line, each in zip(lines[1:], values, strict=False):
                line.append(show(each, sum(values)))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    texts = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    texts.insert(1, "-" * len(texts[0]))
    if len(rows) > limit:
        texts.append(f"and {len(rows) - limit} more, which cost less")
    return "\n".join(texts)


def _short(row: Row) -> str:
    """A long name's beginning, or its end for a frame, where its function is."""
    if len(row.name) <= _WIDTH:
        return row.name
    return f"...{row.name[3 - _WIDTH :]}" if row.python else f"{row.name[: _WIDTH - 3]}..."


def _share(value: int, total: int) -> str:
    return f"{value / (total or 1):.1%}"


def _millionths(value: int, _: int) -> str:
    return f"{value / 1e6:.3f}"


_COLUMNS: tuple[tuple[str, Callable[[Row], int], Callable[[int, int], str]], ...] = (
    ("calls", lambda row: row.calls, lambda value, _: str(value)),
    ("self CPU %", lambda row: row.self_cpu, _share),
    ("self CPU ms", lambda row: row.self_cpu, _millionths),
    ("CPU ms", lambda row: row.cpu, _millionths),
    ("self device ms", lambda row: row.self_device, _millionths),
    ("device ms", lambda row: row.device, _millionths),
    ("self CPU MB", lambda row: row.self_cpu_memory, _millionths),
    ("CPU MB", lambda row: row.cpu_memory, _millionths),
    ("self device MB", lambda row: row.self_device_memory, _millionths),
    ("device MB", lambda row: row.device_memory, _millionths),
)


def main() -> None:
    """Write the table of a trace into a file."""
    trace, target = map(Path, sys.argv[1:])
    target.write_text(table(key_averages(read_events(trace))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
