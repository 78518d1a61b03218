"""The page about a memory timeline, which opens without a network.

It is made of what torch exports, ``[times, sizes by category]``, or of a trace, in a process of its
own::

    python -m lightning_perf.charts.memory POINTS PAGE DEVICE
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_perf.traces.reading import Event

#: Torch's, in the order of its columns.
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
        """The index of the time at which the most memory was in use."""
        return max(range(len(self.times)), key=lambda index: sum(self.sizes[index]))


def of_points(times: Sequence[int], sizes: Sequence[Sequence[int]]) -> Timeline:
    """A timeline of what ``export_memory_timeline`` of torch.profiler writes.

    Args:
        times: Microseconds, ascending; what was there before is at the first of them.
        sizes: Bytes by category, after a zero.

    Example:
        >>> parameters = [0, 512, 0, 0, 0, 0, 0, 0, 0]
        >>> timeline = of_points([10, 20], [parameters, [0, 512, 0, 0, 0, 64, 0, 0, 0]])
        >>> dict(zip(timeline.categories, timeline.sizes[timeline.peak]))["Activation"]
        64
    """
    # What was there before is a guess of torch's, from which more may be freed.
    return Timeline(times, [[max(size, 0) for size in row[1:]] for row in sizes], CATEGORIES)


def of_events(events: Iterable[Event], device: str) -> Timeline:
    """A timeline of the allocations in a trace, which do not tell what they are for.

    Args:
        events: Of a trace that was recorded with ``profile_memory=True``.
        device: As torch names it, such as ``cpu`` or ``cuda:0``.
    """
    kind, _, number = device.partition(":")
    points = sorted(
        (event["ts"], max(event["args"]["Total Allocated"], 0))
        for event in events
        if event.get("name") == "[memory]"
        and (event["args"]["Device Type"] == 0) == (kind == "cpu")
        and (kind == "cpu" or event["args"]["Device Id"] == int(number or 0))
    )
    return Timeline([time for time, _ in points], [[size] for _, size in points], ["Allocated"])


#: Colours that the colour-blind tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#404040", "#cc79a7", "#d55e00", "#56b4e9", "#009e73", "#999999")
#: Moments that a page shows; of those that fall together, the one with the most memory.
_MOMENTS = 800
_WIDTH, _HEIGHT, _LEFT, _BELOW = 1000, 400, 70, 40


def page(timeline: Timeline, device: str) -> str:
    """The page: a chart, and what the memory was for when there was most of it.

    Args:
        timeline: What to show.
        device: What to call the memory.
    """
    if not timeline.times:
        return _PAGE.format(device=escape(device), said="No allocation was recorded.", body="")
    peak, start = timeline.peak, timeline.times[0]
    said = (
        f"Peak {_bytes(sum(timeline.sizes[peak]))}, {(timeline.times[peak] - start) / 1e3:.3f} ms "
        f"after the first of {len(timeline.times)} changes."
    )
    body = chart(timeline) + legend(timeline)
    return _PAGE.format(device=escape(device), said=said, body=body)


def _moments(timeline: Timeline) -> list[Sequence[int]]:
    """The sizes at equal distances: around each, those that were the most."""
    first, before = timeline.times[0], timeline.sizes[0]
    moments: list[Sequence[int]] = []
    distance = (timeline.times[-1] - first) / _MOMENTS or 1.0
    for time, sizes in zip(timeline.times, timeline.sizes, strict=True):
        moment = min(int((time - first) / distance), _MOMENTS - 1)
        moments += [before] * (moment + 1 - len(moments))
        moments[moment] = max(moments[moment], sizes, key=sum)
        before = sizes
    return moments + [before] * (_MOMENTS - len(moments))


def chart(timeline: Timeline) -> str:
    """A picture of the sizes over time, one layer on the other."""
    moments = _moments(timeline)
    scale = (_HEIGHT - _BELOW) / (max(map(sum, moments)) or 1)
    floor, shapes = [0.0] * _MOMENTS, []
    for index, name in enumerate(timeline.categories):
        top = [below + sizes[index] * scale for below, sizes in zip(floor, moments, strict=True)]
        if top != floor:
            shapes.append(
                f'<path fill="{_colour(name, timeline)}" d="{_area(floor, top)}">'
                f"<title>{escape(name)}</title></path>"
            )
        floor = top
    span = (timeline.times[-1] - timeline.times[0]) / 1e3
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Memory over time, by category">{"".join(shapes)}'
        f"{_axes(max(map(sum, moments)), span)}</svg>"
    )


def _area(bottom: Sequence[float], top: Sequence[float]) -> str:
    """The path around a layer: up its stairs, and back along the layer below."""
    there = _stairs(top, range(_MOMENTS), end=1)
    back = _stairs(bottom, range(_MOMENTS)[::-1], end=0)
    return f"M{_LEFT} {_y(bottom[0])}{there}{back}Z"


def _stairs(heights: Sequence[float], moments: Sequence[int], end: int) -> str:
    runs = (list(run)[-1] for _, run in groupby(moments, key=heights.__getitem__))
    return "".join(f"V{_y(heights[last])}H{_x(last + end)}" for last in runs)


def _x(moment: float) -> str:
    return f"{_LEFT + (_WIDTH - _LEFT) * moment / _MOMENTS:.1f}"


def _y(height: float) -> str:
    return f"{_HEIGHT - _BELOW - height:.1f}"


def _axes(most: int, span: float) -> str:
    ticks = []
    for part in range(5):
        height = (_HEIGHT - _BELOW - 12) * part / 4
        ticks.append(
            f'<text x="{_LEFT - 6}" y="{_y(height)}" text-anchor="end">'
            f"{_bytes(most * height / (_HEIGHT - _BELOW))}</text>"
        )
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        ticks.append(
            f'<text x="{_x(_MOMENTS * part / 4)}" y="{_HEIGHT - _BELOW + 18}" '
            f'text-anchor="{anchor}">{span * part / 4:.2f} ms</text>'
        )
    return "".join(ticks)


def legend(timeline: Timeline) -> str:
    """A table of the layers and their sizes at the peak."""
    at_peak = timeline.sizes[timeline.peak]
    total = sum(at_peak) or 1
    rows = "".join(
        f'<tr><td><i style="background:{_colour(name, timeline)}"></i>{escape(name)}</td>'
        f"<td>{_bytes(size)}</td><td>{size / total:.1%}</td></tr>"
        for name, size in zip(timeline.categories, at_peak, strict=True)
    )
    return f"<table><tr><th>At the peak</th><th>memory</th><th>share</th></tr>{rows}</table>"


def _colour(name: str, timeline: Timeline) -> str:
    names = CATEGORIES if name in CATEGORIES else timeline.categories
    return _COLOURS[names.index(name) % len(_COLOURS)]


def _bytes(size: float) -> str:
    if size < 1000:
        return f"{size:.0f} B"
    power = next((power for power in (1, 2) if size < 1000 ** (power + 1)), 3)
    return f"{size / 1000**power:.2f} {'kMG'[power - 1]}B"


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Memory timeline of {device}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 1.5em auto; padding: 0 1em }}
svg {{ width: 100% }} svg text {{ font-size: 11px; fill: currentColor }}
td, th {{ padding: .1em 1em .1em 0; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
i {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em }}
</style></head>
<body><h1>Memory timeline of {device}</h1><p>{said}</p>{body}</body></html>
"""


def main() -> None:
    """Write the page of a file of points, or of a trace."""
    points, target, device = sys.argv[1:]
    content = json.loads(Path(points).read_text(encoding="utf-8"))
    if isinstance(content, dict):
        timeline = of_events(content["traceEvents"], device)
    else:
        timeline = of_points(*content)
    Path(target).write_text(page(timeline, device), encoding="utf-8")


if __name__ == "__main__":
    main()
