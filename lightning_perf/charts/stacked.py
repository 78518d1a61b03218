"""Seconds per batch by category over the steps of a run, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_perf.charts.page import (
    OTHER,
    Areas,
    Bar,
    Heading,
    Layer,
    Part,
    Table,
    colour_of,
    page,
    ticks,
)
from lightning_perf.charts.png import write_png
from lightning_perf.units import duration, three_digits, time_unit

#: A step, and the mean seconds per batch of each category since the row before.
Row: TypeAlias = tuple[int, Mapping[str, float]]
#: A callback or logger: name, total seconds, number of calls, share of the run (0 to 1).
TableRow: TypeAlias = tuple[str, float, int, float]
Numbers: TypeAlias = NDArray[np.float64]

_TITLE = "Where the time of a batch went"
#: More points would be drawn over one another.
MAX_POINTS = 500
#: Categories with a smaller share join "other".
_SMALLEST_SHARE = 0.005
#: In charts of at least `_FEWEST_ROWS`, values above `_PEAK` times this percentile are cut off.
_PEAK, _PERCENTILE, _FEWEST_ROWS = 3.0, 95, 20


def stacked_html(
    path: str | Path,
    rows: Sequence[Row],
    title: str = _TITLE,
    table: Sequence[TableRow] = (),
    first: int = 0,
) -> None:
    """Write a page about where the time of a batch went, over the steps of a run.

    Args:
        path: The file to write.
        rows: Steps, and seconds per batch by category.
        title: The headline.
        table: Callbacks and loggers, and what each cost in total.
        first: The first step of the first row.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "time.html"
        >>> stacked_html(path, [(10, {"forward": 0.01})], table=[("MyCallback", 2.5, 100, 0.12)])
        >>> "MyCallback" in path.read_text()
        True
    """
    parts: list[Part] = [stack(rows, first)]
    if table:
        parts += [Heading("Callbacks and loggers"), _costs(table)]
    Path(path).write_text(page(title, parts), encoding="utf-8")


def stacked_png(path: str | Path, rows: Sequence[Row], title: str = _TITLE, first: int = 0) -> None:
    """Write a picture of where the time of a batch went, over the steps of a run.

    Any thread may call it: it neither uses nor changes pyplot or matplotlib's settings.

    Args:
        path: The file to write.
        rows: Steps, and seconds per batch by category.
        title: The headline.
        first: The first step of the first row.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "time.png"
        >>> stacked_png(path, [(10, {"forward": 0.01}), (20, {"forward": 0.02})])
        >>> path.read_bytes()[1:4]
        b'PNG'
    """
    write_png(Path(path), stack(rows, first), title)


def stack(rows: Sequence[Row], first: int = 0) -> Areas:
    """Arrange rows as a stacked chart, the category with the most time at the bottom.

    Args:
        rows: In any order of steps; each is the mean over the steps since the row before. A
            category that is missing or not a positive number counts as zero; a row without any
            number is left out.
        first: The first step of the first row.

    Example:
        >>> [layer.name for layer in stack([(1, {"forward": 0.1, "backward": 0.2})]).layers]
        ['backward', 'forward']
    """
    rows = sorted(
        (row for row in rows if any(map(isfinite, row[1].values()))), key=lambda row: row[0]
    )
    ends = np.array([step for step, _ in rows], dtype=float)
    first = min([first, *ends[:1].astype(int)])
    steps, begins, counts = np.unique(ends, return_index=True, return_counts=True)
    # Rows of the same step share it.
    widths = (np.diff(steps, prepend=first - 1) / counts).repeat(counts)
    spent = _fold(_seconds(rows, widths))
    if not any(each.any() for each in spent.values()):
        return _areas((), (), first, 1.0, "No batch was timed.")
    kept = np.unique(np.linspace(0, len(steps), MAX_POINTS, endpoint=False, dtype=int))
    layers = _layers(spent, widths, begins[kept])
    steps = steps[np.append(kept[1:], len(steps)) - 1]
    top, cut = _top(steps, np.sum([layer.values for layer in layers], axis=0))
    merged = len(rows) / len(steps)
    averaged = f"Each window is the mean of about {merged:.3g} reports." if merged > 1 else ""
    mean = duration(sum(layer.amount for layer in layers))
    summary = f"{mean} per batch on average, {_steps(first, int(steps[-1]))}"
    notes = tuple(note for note in (cut, averaged) if note)
    return _areas([int(step) for step in steps], layers, first, top, summary, notes)


def _areas(
    steps: Sequence[int],
    layers: Sequence[Layer],
    first: int,
    top: float,
    summary: str,
    notes: tuple[str, ...] = (),
) -> Areas:
    firsts, last = [first, *(step + 1 for step in steps)], steps[-1] if steps else first
    return Areas(
        edges=[step - 0.5 for step in firsts],  # a window holds all of its steps
        windows=[_steps(*window) for window in zip(firsts, steps, strict=False)],
        layers=layers,
        top=top,
        unit=time_unit,
        text=duration,
        x_ticks=[
            (tick, f"{tick:,.0f}") for tick in ticks(first - 0.5, last + 0.5) if tick == int(tick)
        ],
        x_label="step",
        y_label=" per batch",
        legend=("category", "per batch", "share"),
        summary=summary,
        notes=notes,
    )


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _seconds(rows: Sequence[Row], widths: Numbers) -> dict[str, Numbers]:
    """Seconds of all steps of each row, by category."""
    names = dict.fromkeys(name for _, values in rows for name in values)
    table = np.array([[values.get(name, 0.0) for name in names] for _, values in rows], dtype=float)
    table = np.where(np.isfinite(table), table, 0.0).clip(min=0.0)
    return {name: table[:, column] * widths for column, name in enumerate(names)}


def _fold(spent: dict[str, Numbers]) -> dict[str, Numbers]:
    """Add small categories to "other"."""
    sums = {name: float(each.sum()) for name, each in spent.items()}
    least = _SMALLEST_SHARE * sum(sums.values())
    small = [name for name in spent if sums[name] < least or name == OTHER]
    kept = {name: each for name, each in spent.items() if name not in small}
    if not any(sums[name] for name in small):
        return kept
    return kept | {OTHER: np.sum([spent[name] for name in small], axis=0)}


def _layers(
    spent: dict[str, Numbers], widths: Numbers, starts: NDArray[np.int_]
) -> tuple[Layer, ...]:
    """Means over windows of rows that begin at ``starts``, the largest category first."""
    sums = {name: float(each.sum()) for name, each in spent.items()}
    total, steps = sum(sums.values()), float(widths.sum())
    sizes = np.add.reduceat(widths, starts)
    return tuple(
        Layer(
            name,
            colour_of(name),
            (np.add.reduceat(spent[name], starts) / sizes).tolist(),
            sums[name] / steps,
            sums[name] / total,
        )
        for name in sorted(spent, key=lambda name: -sums[name])
    )


def _top(steps: Numbers, totals: Numbers) -> tuple[float, str]:
    """The end of the y axis, and a note about peaks above it."""
    highest, usual = float(totals.max()), float(np.percentile(totals, _PERCENTILE))
    if len(totals) < _FEWEST_ROWS or highest <= _PEAK * usual:
        return highest * 1.04, ""
    top = _PEAK / 2 * usual
    at, points = f"{int(steps[totals.argmax()]):,}", int((totals > top).sum())
    cut = f"{points} peaks are" if points > 1 else "One peak is"
    return top, f"{cut} cut off (up to {duration(highest)}, at step {at})."


def _costs(table: Sequence[TableRow]) -> Table:
    """Callbacks and loggers, the most costly first."""
    rows = [(name, _time(seconds), calls, _time(share)) for name, seconds, calls, share in table]
    return Table(
        ("name", "seconds", "calls", "per call", "share of the run", ""),
        [
            (
                name,
                three_digits(seconds),
                f"{calls:,}",
                duration(seconds / calls) if calls else "",
                f"{share:.1%}",
                Bar([(min(share, 1.0), "var(--faint)", f"{share:.1%}")]),
            )
            for name, seconds, calls, share in sorted(rows, key=lambda row: -row[1])
        ],
    )


def _time(value: float) -> float:
    return value if isfinite(value) and value > 0 else 0.0
