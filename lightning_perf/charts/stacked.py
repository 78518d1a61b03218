"""Where the time went over the steps of a run: by category, and how late each rank is."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_perf.charts import (
    COLOURS,
    OTHER,
    Areas,
    Bar,
    HeatMap,
    Layer,
    Table,
    ticks,
)
from lightning_perf.timing.totals import Share, folded
from lightning_perf.units import duration, three_digits, time_unit

#: A step, and the mean seconds per batch of each category since the row before.
Row: TypeAlias = tuple[int, Mapping[str, float]]
Numbers: TypeAlias = NDArray[np.float64]

#: Categories with a smaller share join "other".
_SMALLEST_SHARE = 0.005
#: In charts of at least `_FEWEST_ROWS`, values above `_PEAK` times this percentile are cut off.
_PEAK, _PERCENTILE, _FEWEST_ROWS = 3.0, 95, 20


def stack(rows: Sequence[Row], first: int = 0) -> Areas:
    """Arrange rows as a stacked chart, the category with the most time at the bottom.

    A category that a row lacks counts as zero. ``first`` is the first step of the first row.

    Example:
        >>> [layer.name for layer in stack([(1, {"forward": 0.1, "backward": 0.2})]).layers]
        ['backward', 'forward']
    """
    rows = rows or [(first, {})]
    first = min(first, rows[0][0])
    ends = np.array([step for step, _ in rows], dtype=float)
    steps, begins, counts = np.unique(ends, return_index=True, return_counts=True)
    # Rows of the same step share it.
    widths = (np.diff(steps, prepend=first - 1) / counts).repeat(counts)
    layers = _layers(rows, widths, begins)
    lasts = [int(step) for step in steps]
    firsts = [first, *(step + 1 for step in lasts)]
    top, cut = _top(lasts, sum((np.array(layer.values) for layer in layers), np.zeros(len(lasts))))
    mean = duration(sum(layer.amount for layer in layers))
    summary = f"{mean} per batch on average, {_steps(first, lasts[-1])}"
    axis = ticks(first - 0.5, lasts[-1] + 0.5)
    return Areas(
        edges=[step - 0.5 for step in firsts],  # a window holds all of its steps
        windows=[_steps(*window) for window in zip(firsts, lasts, strict=False)],
        layers=layers,
        top=top,
        unit=time_unit,
        text=duration,
        x_ticks=[(tick, f"{tick:,.0f}") for tick in axis if tick == int(tick)],
        x_label="step",
        y_label=" per batch",
        legend=("category", "per batch", "share"),
        summary=summary if layers else "No batch was timed.",
        notes=(cut,) if cut else (),
    )


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _layers(rows: Sequence[Row], widths: Numbers, starts: NDArray[np.int_]) -> tuple[Layer, ...]:
    """Means over windows of rows that begin at ``starts``, the largest category first."""
    names = dict.fromkeys(name for _, values in rows for name in values)
    # Seconds of all steps of each row.
    spent = {
        name: widths * np.array([values.get(name, 0.0) for _, values in rows]) for name in names
    }
    total = sum(float(each.sum()) for each in spent.values())
    small = [n for n in names if n == OTHER or spent[n].sum() <= _SMALLEST_SHARE * total]
    other = sum((spent.pop(name) for name in small), np.zeros(len(rows)))
    if other.any():
        spent[OTHER] = other
    sizes = np.add.reduceat(widths, starts)
    return tuple(
        Layer(
            name,
            COLOURS.get(name, COLOURS[OTHER]),
            (np.add.reduceat(seconds, starts) / sizes).tolist(),
            float(seconds.sum() / widths.sum()),
            float(seconds.sum() / total),
        )
        for name, seconds in sorted(spent.items(), key=lambda item: -item[1].sum())
    )


def _top(steps: Sequence[int], totals: Numbers) -> tuple[float, str]:
    """The end of the y axis, and a note about peaks above it."""
    highest, usual = float(totals.max()), float(np.percentile(totals, _PERCENTILE))
    if len(totals) < _FEWEST_ROWS or highest <= _PEAK * usual:
        return highest * 1.04 or 1.0, ""
    top = _PEAK / 2 * usual
    at, points = f"{steps[int(totals.argmax())]:,}", int((totals > top).sum())
    cut = f"{points} peaks are" if points > 1 else "One peak is"
    return top, f"{cut} cut off (up to {duration(highest)}, at step {at})."


def costs(table: Sequence[Share]) -> Table:
    """Callbacks and loggers, the most costly first."""
    return Table(
        ("name", "seconds", "calls", "per call", "share of the run", ""),
        [
            (
                name,
                three_digits(seconds),
                f"{calls:,}",
                duration(seconds / calls) if calls else "",
                f"{share:.1%}",
                Bar([(min(max(share, 0.0), 1.0), "var(--faint)", f"{share:.1%}")]),
            )
            for name, seconds, calls, share in sorted(folded(table), key=lambda row: -row[1])
        ],
    )


# -- how late each rank is ------------------------------------------------------------------------

_RANKS_COLOUR = (219, 78, 16)


def heatmap(steps: Sequence[float], lateness: Sequence[Sequence[float]], ranks: int = 0) -> HeatMap:
    """A picture of how much longer each rank's own work takes, over the steps.

    For each window, ``steps`` has its last step. ``lateness`` has one row per rank, in seconds per
    batch above the median rank; of more ``ranks`` than rows, several share a row.
    """
    table = np.array(lateness, dtype=float).clip(min=0.0)
    top = float(table.max())
    latest = int(table.mean(axis=1).argmax())
    ranks = max(ranks, len(table))
    each = -(-ranks // len(table))
    alpha = (255 * table / (top or 1.0)).round().astype(np.uint8)
    mean = duration(float(table[latest].mean()))
    name = f"rank {latest * each}" if each == 1 else f"among ranks {latest * each} and following"
    return HeatMap(
        image="data:image/png;base64," + b64encode(_image(alpha)).decode(),
        y_ticks=[(0.0, "rank 0"), (1.0, f"rank {ranks - 1:,}")],
        x_ticks=[(0.0, f"{steps[0]:,.0f}"), (1.0, f"{steps[-1]:,.0f}")],
        x_label="step",
        summary=(
            f"Own work per batch, without waiting, above the median rank: from nothing (blank) to "
            f"{duration(top)} (full colour). The latest on average is {name} ({mean})."
        ),
        notes=(f"Each row is the latest of {each} ranks.",) if each > 1 else (),
    )


def _image(alpha: NDArray[np.uint8]) -> bytes:
    """A picture in one colour, with an opacity per pixel."""
    height, width = alpha.shape
    pixels = np.empty((height, width, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = _RANKS_COLOUR, alpha
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
