"""Memory over time, as a stacked chart.

As a program it writes the page of what torch exports (``[times, sizes by category]``) or of a
trace::

    python -m lightning_perf.charts.memory POINTS PAGE DEVICE
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.charts.page import COLOURS, OTHER, PALETTE, Areas, Layer, page, ticks
from lightning_perf.units import bytes_text, bytes_unit, duration, time_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_perf.traces.reading import Event

#: Torch's categories, in the order of its columns.
CATEGORIES = (
    "Parameter",
    "Optimizer state",
    "Input",
    "Temporary",
    "Activation",
    "Gradient",
    "Autograd detail",
    "Unknown",
)
#: Layers in grey.
_GREY = ("Unknown", "other lines")
#: Windows of a chart; each shows the moment with the most memory.
_WINDOWS = 400


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory in use, from each time to the next."""

    #: Microseconds, ascending.
    times: Sequence[float]
    #: Bytes at each time, by category.
    sizes: Sequence[Sequence[int]]
    categories: Sequence[str]

    @property
    def peak(self) -> int:
        """The index of the time with the most memory in use."""
        return max(range(len(self.times)), key=lambda index: sum(self.sizes[index]))


def of_points(times: Sequence[int], sizes: Sequence[Sequence[int]]) -> Timeline:
    """A timeline of what ``export_memory_timeline`` of torch.profiler writes.

    Its times are microseconds; its sizes are bytes by category, after a zero.
    """
    # Torch estimates what was allocated before the recording, so that a sum may be negative.
    return Timeline(times, [[max(size, 0) for size in row[1:]] for row in sizes], CATEGORIES)


def of_events(events: Iterable[Event], device: str) -> Timeline:
    """A timeline of the allocations of a device, such as ``cuda:0``, in a trace: no categories."""
    kind, _, number = device.partition(":")
    points = sorted(
        (event["ts"], max(event["args"]["Total Allocated"], 0))
        for event in events
        if event.get("name") == "[memory]"
        and (event["args"]["Device Type"] == 0) == (kind == "cpu")
        and (kind == "cpu" or event["args"]["Device Id"] == int(number or 0))
    )
    return Timeline([time for time, _ in points], [[size] for _, size in points], ["Allocated"])


def memory_page(timeline: Timeline, device: str) -> str:
    """A page with the chart, and what the memory was used for at its peak."""
    shown = memory_areas(timeline) if timeline.times else "No allocation was recorded."
    return page(f"Memory timeline of {device}", [shown])


def memory_areas(timeline: Timeline) -> Areas:
    """The chart of a timeline, with sizes and shares at the peak as its legend."""
    peak, start = timeline.peak, timeline.times[0]
    span = (timeline.times[-1] - start) / 1e6 or 1e-6
    most, sizes, width = sum(timeline.sizes[peak]), _windows(timeline), span / _WINDOWS
    scale, unit = time_unit(span)
    when = duration((timeline.times[peak] - start) / 1e6)
    return Areas(
        edges=[width * window for window in range(_WINDOWS + 1)],
        windows=[f"{width * window * scale:.3f} {unit}" for window in range(_WINDOWS)],
        layers=[
            Layer(
                name,
                COLOURS[OTHER] if name in _GREY else PALETTE[index % len(PALETTE)],
                [row[index] for row in sizes],
                timeline.sizes[peak][index],
                timeline.sizes[peak][index] / (most or 1),
            )
            for index, name in enumerate(timeline.categories)
        ],
        top=most * 1.04 or 1.0,
        unit=bytes_unit,
        text=bytes_text,
        x_ticks=[(tick / scale, f"{tick:,.10g}") for tick in ticks(0.0, span * scale)],
        x_label=f"time in {unit}",
        y_label="",
        legend=("at the peak", "memory", "share"),
        summary=f"Peak {bytes_text(most)}, {when} after the first of {len(timeline.times):,} "
        "changes.",
    )


def _windows(timeline: Timeline) -> list[Sequence[int]]:
    """The sizes in windows of equal length: in each, those with the largest sum."""
    first, before = timeline.times[0], timeline.sizes[0]
    windows: list[Sequence[int]] = []
    width = (timeline.times[-1] - first) / _WINDOWS or 1.0
    for time, sizes in zip(timeline.times, timeline.sizes, strict=True):
        window = min(int((time - first) / width), _WINDOWS - 1)
        windows += [before] * (window + 1 - len(windows))
        windows[window] = max(windows[window], sizes, key=sum)
        before = sizes
    return windows + [before] * (_WINDOWS - len(windows))


def main() -> None:
    """Write the page of a file of points, or of a trace."""
    points, target, device = sys.argv[1:]
    content = json.loads(Path(points).read_text(encoding="utf-8"))
    if isinstance(content, dict):
        timeline = of_events(content["traceEvents"], device)
    else:
        timeline = of_points(*content)
    Path(target).write_text(memory_page(timeline, device), encoding="utf-8")


if __name__ == "__main__":
    main()
