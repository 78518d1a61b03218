"""Formats quantities with their units."""

from __future__ import annotations

from itertools import groupby
from math import floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Ranges of numbers in a text, at most, before a number of others.
_MOST_RANGES = 10


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for a time, and how many of it are one second."""
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "\u00b5s")


def duration(seconds: float) -> str:
    """A time with three digits and its unit.

    Example:
        >>> duration(0.01234)
        '12.3 ms'
    """
    scale, unit = time_unit(seconds)
    return f"{three_digits(seconds * scale)} {unit}"


def rough(seconds: float) -> str:
    """A long time with about two digits.

    Example:
        >>> rough(45.2), rough(1140), rough(15_000), rough(400_000)
        ('45 s', '19 min', '4.2 h', '4.6 days')
    """
    for unit, size, limit in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.{int(seconds < 10 * size and size != 60)}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def bytes_unit(size: float) -> tuple[float, str]:
    """The unit for a number of bytes, and how many of it are one byte."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(4) if size < 1024 ** (power + 1)), 4)
    return 1 / 1024**power, units[power]


def bytes_text(size: float) -> str:
    """A number of bytes with its unit.

    Example:
        >>> bytes_text(3 * 2**20)
        '3.0 MiB'
    """
    scale, unit = bytes_unit(size)
    return f"{size:.0f} B" if unit == "B" else f"{size * scale:.1f} {unit}"


def flops_text(flops: float) -> str:
    """A number of FLOPs with its unit.

    Example:
        >>> flops_text(2.476e10), flops_text(512)
        ('24.8 GFLOP', '512 FLOP')
    """
    power = min(max(floor(log10(abs(flops))) // 3, 0), 6) if flops else 0
    return f"{three_digits(flops / 1000**power)} {('', 'K', 'M', 'G', 'T', 'P', 'E')[power]}FLOP"


def three_digits(value: float) -> str:
    """A number with three significant digits, never as a power of ten.

    Example:
        >>> three_digits(1234.5), three_digits(0.01234), three_digits(9.9999)
        ('1,234', '0.0123', '10.0')
    """
    if not value:
        return "0"
    rounded = float(f"{abs(value):.2e}")  # 9.9999 has two digits before the point
    return f"{value:,.{max(2 - floor(log10(rounded)), 0)}f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "call"), counted(1200, "call")
        ('1 call', '1,200 calls')
    """
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def listed(noun: str, numbers: Iterable[int]) -> str:
    """A noun with the numbers that it has, in ranges; of very many ranges, the first ones.

    Example:
        >>> listed("rank", [3]), listed("rank", [5, 0, 1, 2])
        ('rank 3', 'ranks 0 to 2 and 5')
        >>> listed("rank", range(0, 40, 2))
        'ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 10 others'
    """
    ordered = sorted(numbers)
    runs, left = list[str](), len(ordered)
    for _, group in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [str(number) for _, number in group]
        if len(runs) >= _MOST_RANGES:
            runs.append(f"{left} others")
            break
        runs += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
        left -= len(run)
    *first, last = runs
    joined = f"{', '.join(first)} and {last}" if first else last
    return f"{noun}{'s' if len(ordered) > 1 else ''} {joined}"


def rounded(values: Iterable[float], digits: int = 5) -> list[float]:
    """Values with some significant digits."""
    return [float(f"{value:.{digits}g}") for value in values]
