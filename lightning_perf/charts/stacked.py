"""What a stacked chart shows, whatever it is drawn with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

OTHER = "other"
COLOURS = {
    "dataloader_next": "#db4e10",
    "to_device": "#f3bc00",
    "forward": "#79dff7",
    "backward": "#0061bc",
    "optimizer_step": "#3b3d6a",
    "step_lr_schedulers": "#95a7f8",
    "from_device": "#d8e074",
    "reduce_metrics": "#655428",
    "callbacks": "#00b062",
    "logging": "#a4eeab",
    "checkpoint": "#6a2d3f",
    "validation": "#a86cac",
    OTHER: "#9a9a9a",
}
#: For names that are not ours, which may share one.
_STRANGERS = ("#ff8fab", "#00796b", "#c9a66b", "#5e35b1", "#b0003a", "#7cb342")


def colour_of(name: str) -> str:
    """The colour of a category, as ``#rrggbb``.

    Args:
        name: The category's; any other name has a colour too, the same each time.

    Example:
        >>> colour_of("backward"), colour_of("my_phase") == colour_of("my_phase")
        ('#0061bc', True)
    """
    return COLOURS.get(name) or _STRANGERS[crc32(name.encode()) % len(_STRANGERS)]


#: A step, and the mean seconds a batch that each category took since the row before.
Row: TypeAlias = tuple[int, Mapping[str, float]]
#: A callback or logger: its name, seconds and calls in all, and share of the run (0 to 1).
TableRow: TypeAlias = tuple[str, float, int, float]
Numbers: TypeAlias = NDArray[np.float64]

#: More points than this would be drawn over one another.
MAX_POINTS = 500
#: Categories below this share are folded into "other".
_FOLDED = 0.005
#: Peaks that tower over nearly all of the run would leave it flat at the bottom of the chart.
_TOWERING, _NEARLY_ALL, _FEWEST_ROWS = 3.0, 95, 20


@dataclass(frozen=True, slots=True)
class Band:
    """One category."""

    name: str
    colour: str
    #: Seconds a batch, one a window of the stack.
    seconds: Numbers
    #: Mean of these, over all steps.
    mean: float
    #: Of all time, from 0 to 1.
    share: float


@dataclass(frozen=True, slots=True)
class Stack:
    """Categories over steps, the costliest first, and so at the bottom of the chart."""

    #: The last step of each window, in order.
    steps: Numbers
    bands: tuple[Band, ...]
    #: Where the y axis ends, in seconds; peaks above it are cut off.
    top: float
    #: The first step of the first window.
    first: int = 0
    notes: tuple[str, ...] = ()

    @property
    def edges(self) -> Numbers:
        """Where windows begin and end: half-way between steps, one more than windows."""
        return np.concatenate(([self.first], self.steps + 1)) - 0.5

    @property
    def outline(self) -> tuple[Numbers, Numbers]:
        """What to draw: each mean is flat over its window, so that areas are times.

        Returns:
            Steps, and the lower edge of each band and the upper one of the last in seconds:
            shapes (points) and (bands + 1, points), with two points a window.
        """
        values = [np.zeros_like(self.steps), *(band.seconds for band in self.bands)]
        sums: Numbers = np.cumsum(values, axis=0)
        return self.edges.repeat(2)[1:-1], sums.repeat(2, axis=1)

    @property
    def windows(self) -> list[str]:
        """What to call each window."""
        lasts = [int(step) for step in self.steps]
        firsts = [self.first, *(step + 1 for step in lasts)]
        return [_steps(*window) for window in zip(firsts, lasts, strict=False)]

    @property
    def summary(self) -> str:
        """What it shows, in a line; says so if there is nothing to show."""
        if not self.bands:
            return "No batch was timed."
        mean = duration(sum(band.mean for band in self.bands))
        return f"{mean} a batch on average, {_steps(self.first, int(self.steps[-1]))}"


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def stack(rows: Sequence[Row], first: int = 0) -> Stack:
    """Arrange rows as a stack.

    Args:
        rows: In any order of steps; each is the mean over the steps since the row before. A
            category that a row lacks, or that is not a positive number there, took no time then;
            a row without any number is left out.
        first: The step that the first row begins with.

    Example:
        >>> [band.name for band in stack([(1, {"forward": 0.1, "backward": 0.2})]).bands]
        ['backward', 'forward']
    """
    rows = sorted((row for row in rows if _told(row[1])), key=lambda row: row[0])
    ends = np.array([step for step, _ in rows], dtype=float)
    first = min([first, *ends[:1].astype(int)])
    steps, begins, counts = np.unique(ends, return_index=True, return_counts=True)
    # Rows of one step share it.
    widths = (np.diff(steps, prepend=first - 1) / counts).repeat(counts)
    spent = _folded(_table(rows, widths))
    if not any(each.any() for each in spent.values()):
        return Stack(np.zeros(0), (), 1.0)
    kept = np.unique(np.linspace(0, len(steps), MAX_POINTS, endpoint=False, dtype=int))
    bands = _bands(spent, widths, begins[kept])
    steps = steps[np.append(kept[1:], len(steps)) - 1]
    top, cut = _top(steps, sum((band.seconds for band in bands), np.zeros_like(steps)))
    merged = len(rows) / len(steps)
    averaged = f"Each window is the mean of about {merged:.3g} reports." if merged > 1 else ""
    return Stack(steps, bands, top, first, tuple(note for note in (cut, averaged) if note))


def _bands(
    spent: dict[str, Numbers], widths: Numbers, starts: NDArray[np.int_]
) -> tuple[Band, ...]:
    """The costliest first: what was spent on each, by windows of rows that start at ``starts``."""
    sums = {name: float(each.sum()) for name, each in spent.items()}
    total, steps = sum(sums.values()), float(widths.sum())
    sizes = np.add.reduceat(widths, starts)
    return tuple(
        Band(
            name,
            colour_of(name),
            np.add.reduceat(spent[name], starts) / sizes,
            sums[name] / steps,
            sums[name] / total,
        )
        for name in sorted(spent, key=lambda name: -sums[name])
    )


def _told(values: Mapping[str, float]) -> bool:
    return any(isfinite(seconds) for seconds in values.values())


def _table(rows: Sequence[Row], widths: Numbers) -> dict[str, Numbers]:
    """Seconds of all steps of each row, by category."""
    names = dict.fromkeys(name for _, values in rows for name in values)
    table = np.array([[values.get(name, 0.0) for name in names] for _, values in rows], dtype=float)
    table = np.where(np.isfinite(table), table, 0.0).clip(min=0.0)
    return {name: table[:, column] * widths for column, name in enumerate(names)}


def _folded(spent: dict[str, Numbers]) -> dict[str, Numbers]:
    sums = {name: float(each.sum()) for name, each in spent.items()}
    least = _FOLDED * sum(sums.values())
    small = [name for name in spent if sums[name] < least or name == OTHER]
    kept = {name: each for name, each in spent.items() if name not in small}
    if not any(sums[name] for name in small):
        return kept
    return kept | {OTHER: np.sum([spent[name] for name in small], axis=0)}


def _top(steps: Numbers, totals: Numbers) -> tuple[float, str]:
    highest, usual = float(totals.max()), float(np.percentile(totals, _NEARLY_ALL))
    if len(totals) < _FEWEST_ROWS or highest <= _TOWERING * usual:
        return highest * 1.04, ""
    top = _TOWERING / 2 * usual
    at, points = f"{int(steps[totals.argmax()]):,}", int((totals > top).sum())
    cut = f"{points} peaks are" if points > 1 else "One peak is"
    return top, f"{cut} cut off (up to {duration(highest)}, at step {at})."


def unit(seconds: float) -> tuple[float, str]:
    """The unit to tell such times in, and how many of it make a second.

    Example:
        >>> unit(0.25)
        (1000.0, 'ms')
    """
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "\u00b5s")


def duration(seconds: float) -> str:
    """A time with three digits and its unit.

    Example:
        >>> duration(0.01234)
        '12.3 ms'
    """
    each, name = unit(seconds)
    return f"{three_digits(seconds * each)} {name}"


def three_digits(value: float) -> str:
    """A number with three significant digits, never as a power of ten.

    Example:
        >>> three_digits(1234.5), three_digits(0.01234), three_digits(12.0)
        ('1,234', '0.0123', '12.0')
    """
    if not value:
        return "0"
    return f"{value:,.{max(2 - int(np.floor(np.log10(abs(value)))), 0)}f}"


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from one end of an axis to the other.

    Example:
        >>> ticks(0, 47)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    magnitude = 10.0 ** np.floor(np.log10(rough))
    each = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    count = range(int(np.ceil(low / each - 1e-9)), int(np.floor(high / each + 1e-9)) + 1)
    return [float(f"{n * each:.12g}") for n in count]
