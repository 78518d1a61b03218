"""Colours and number formats of all charts."""

from __future__ import annotations

from math import ceil, floor, log10
from zlib import crc32

OTHER = "other"
#: Distinguishable for the colour-blind, and on light and dark pages.
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
#: For categories of the user, two of which may share a colour.
_CUSTOM = ("#ff8fab", "#00796b", "#c9a66b", "#5e35b1", "#b0003a", "#7cb342")
#: For layers that have no fixed colour.
PALETTE = tuple(
    COLOURS[name]
    for name in ("backward", "to_device", "callbacks", "forward", "dataloader_next", "validation",
                 "logging", "optimizer_step")
)  # fmt: skip


def colour_of(name: str) -> str:
    """The colour of a timing category, as ``#rrggbb``; a custom name always has the same one.

    Example:
        >>> colour_of("backward"), colour_of("my_phase") == colour_of("my_phase")
        ('#0061bc', True)
    """
    return COLOURS.get(name) or _CUSTOM[crc32(name.encode()) % len(_CUSTOM)]


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for a time, and how many of it are one second.

    Example:
        >>> time_unit(0.25)
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
    scale, unit = time_unit(seconds)
    return f"{three_digits(seconds * scale)} {unit}"


def bytes_unit(size: float) -> tuple[float, str]:
    """The unit for a number of bytes, and how many of it are one byte.

    Example:
        >>> bytes_unit(3 * 2**20)
        (9.5367431640625e-07, 'MiB')
    """
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


def three_digits(value: float) -> str:
    """A number with three significant digits, never as a power of ten.

    Example:
        >>> three_digits(1234.5), three_digits(0.01234), three_digits(12.0)
        ('1,234', '0.0123', '12.0')
    """
    if not value:
        return "0"
    return f"{value:,.{max(2 - floor(log10(abs(value))), 0)}f}"


def ticks(low: float, high: float, about: int = 8) -> list[float]:
    """Round numbers from one end of an axis to the other.

    Example:
        >>> ticks(0, 47)
        [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    count = range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    return [float(f"{n * step:.12g}") for n in count]
