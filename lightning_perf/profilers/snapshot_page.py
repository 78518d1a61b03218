"""Pages about a snapshot of CUDA's memory, which open without a network.

Run as a program, since reading a snapshot takes seconds and holds the interpreter's lock: ``python
-m lightning_perf.profilers.snapshot_page history|segments SNAPSHOT PAGE``.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning_perf.charts.flame import bytes_text, flame_graph, fold
from lightning_perf.charts.memory import Timeline, chart, legend

Snapshot = dict[str, Any]
Frames = Sequence[dict[str, Any]]

#: Lines of source with a colour of their own; the others are one.
_SITES = 6
_OTHER, _BEFORE = "other lines", "allocated before the recording"
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_COLOURS = dict.fromkeys(_IN_USE, "#e69f00") | {"active_allocated": "#0072b2"}
#: Frames of these say how memory was asked for, and not what for.
_LIBRARIES = ("/torch/", "/lightning/", "/pytorch_lightning/", "/lightning_fabric/")
#: Segments that are drawn, the largest ones.
_MOST_SEGMENTS = 500


@dataclass(frozen=True, slots=True)
class _Change:
    """An allocation, or a negative one, by the stack that asked for it."""

    time: int
    size: int
    frames: Frames | None


def history(snapshot: Snapshot) -> str:
    """What was allocated over time, by line of source, and what filled the memory at its peak."""
    devices = [
        _device_history(number, events, snapshot["segments"])
        for number, events in enumerate(snapshot["device_traces"])
        if events
    ]
    body = "\n".join(devices) or "<p>No history was recorded: no window was open.</p>"
    return _page("Memory history", body)


def segments(snapshot: Snapshot) -> str:
    """What each segment that the allocator took from the device holds."""
    found = sorted(snapshot["segments"], key=lambda each: -each["total_size"])
    widest = found[0]["total_size"] if found else 1
    used = sum(_in_use(block) for segment in found for block in segment["blocks"])
    total = sum(segment["total_size"] for segment in found)
    left_out = f" The largest {_MOST_SEGMENTS} are drawn." if len(found) > _MOST_SEGMENTS else ""
    body = (
        f"<p>{len(found)} segments of {bytes_text(total)}, of which {bytes_text(used)} are in use."
        f"{left_out} Blue is allocated, orange waits for a stream, grey is free.</p>\n<table>"
        "<tr><th>device, stream, address</th><th>size</th><th>in use</th><th>blocks</th></tr>\n"
        + "\n".join(_segment_row(segment, widest) for segment in found[:_MOST_SEGMENTS])
        + "</table>"
    )
    return _page("Segments of the allocator", body)


def timeline(
    events: Iterable[dict[str, Any]], in_use: Iterable[dict[str, Any]]
) -> tuple[Timeline, list[tuple[list[str], int]]]:
    """Memory over time by line of source, and the stacks at the peak.

    Args:
        events: The allocator's, of one device, in order.
        in_use: The device's blocks that are allocated after the last event, with their addresses.

    Example:
        >>> frame = {"filename": "train.py", "line": 7, "name": "forward"}
        >>> alloc = {"action": "alloc", "addr": 1, "size": 512, "frames": [frame], "time_us": 3}
        >>> timeline([alloc], [])[1]
        [(['train.py:7 forward'], 512)]
    """
    changes, before = _changes(events, in_use)
    totals = list(accumulate((change.size for change in changes), initial=before))
    peak = max(range(len(totals)), key=totals.__getitem__)
    by_stack: Counter[tuple[str, ...]] = Counter()
    for change in changes[:peak]:
        by_stack[_stack(change.frames)] += change.size
    by_site: Counter[str] = Counter()
    for change in changes[:peak]:
        by_site[_site(change.frames)] += change.size
    by_site.pop(_BEFORE, None)
    names = [name for name, size in by_site.most_common(_SITES) if size > 0] + [_OTHER, _BEFORE]
    place = {name: index for index, name in enumerate(names)}
    sizes = [0] * (len(names) - 1) + [before]
    rows, times = [tuple(sizes)], [changes[0].time if changes else 0]
    for change in changes:
        sizes[place.get(_site(change.frames), len(names) - 2)] += change.size
        rows.append(tuple(sizes))
        times.append(change.time)
    stacks = [(list(stack), size) for stack, size in by_stack.items() if stack and size > 0]
    kept = before + by_stack[()]
    if kept > 0:
        stacks.append(([_BEFORE], kept))
    return Timeline(times, rows, names), stacks


def _changes(
    events: Iterable[dict[str, Any]], in_use: Iterable[dict[str, Any]]
) -> tuple[list[_Change], int]:
    """Allocations and frees, and how much was allocated before the first of them."""
    live: dict[int, Frames] = {}
    changes, before = [], 0
    for number, event in enumerate(events):
        action, time = event["action"], event.get("time_us", number)
        if action == "alloc":
            live[event["addr"]] = event["frames"]
            changes.append(_Change(time, event["size"], event["frames"]))
        elif action == "free_completed":
            frames = live.pop(event["addr"], None)
            before += event["size"] if frames is None else 0
            changes.append(_Change(time, -event["size"], frames))
    before += sum(block["size"] for block in in_use if block["address"] not in live)
    return changes, before


def _device_history(number: int, events: list[dict[str, Any]], found: list[Any]) -> str:
    blocks = [block for each in found if each.get("device", 0) == number for block in _used(each)]
    line, stacks = timeline(events, blocks)
    failed = "".join(
        f"<p>An allocation of {bytes_text(event['size'])} failed, when the device had "
        f"{bytes_text(event.get('device_free', 0))} free.</p>"
        for event in events
        if event["action"] == "oom"
    )
    graph = flame_graph(fold(stacks), "Allocated at the peak", bytes_text)
    peak = bytes_text(sum(line.sizes[line.peak]))
    return (
        f"<h2>Device {number}</h2>\n<p>Peak {peak}, in {len(line.times) - 1} changes.</p>{failed}\n"
        f"{chart(line)}\n{legend(line)}\n{graph}"
    )


def _used(segment: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks in use, with their addresses, which older torch leaves out."""
    starts = accumulate((block["size"] for block in segment["blocks"]), initial=segment["address"])
    placed = (
        {"address": start, **block} for start, block in zip(starts, segment["blocks"], strict=False)
    )
    return [block for block in placed if _in_use(block)]


def _in_use(block: dict[str, Any]) -> int:
    return int(block["size"]) if block["state"] in _IN_USE else 0


def _segment_row(segment: dict[str, Any], widest: int) -> str:
    left, shapes = 0.0, []
    for block in segment["blocks"]:
        width = 1000 * block["size"] / widest
        what = " < ".join(reversed(_stack(block.get("frames")))) or "no stack was recorded"
        shapes.append(
            f'<rect x="{left:.2f}" width="{width:.2f}" height="14" stroke="#fff" '
            f'stroke-width=".5" fill="{_COLOURS.get(block["state"], "#cccccc")}">'
            f"<title>{bytes_text(block['size'])}, {escape(block['state'])}: {escape(what)}</title>"
            "</rect>"
        )
        left += width
    used = sum(map(_in_use, segment["blocks"])) / (segment["total_size"] or 1)
    place = f"{segment.get('device', 0)}, {segment['stream']}, {segment['address']:#x}"
    return (
        f"<tr><td>{place}</td><td>{bytes_text(segment['total_size'])}</td><td>{used:.0%}</td>"
        f'<td><svg viewBox="0 0 1000 14" preserveAspectRatio="none" height="14">{"".join(shapes)}'
        "</svg></td></tr>"
    )


def _stack(frames: Frames | None) -> tuple[str, ...]:
    """Calls from the outermost to the innermost."""
    return tuple(map(_call, reversed(frames or ())))


def _site(frames: Frames | None) -> str:
    """The innermost line of source that is not a library's."""
    if not frames:
        return _BEFORE if frames is None else _OTHER
    theirs = (f for f in frames if not any(part in f["filename"] for part in _LIBRARIES))
    return _call(next(theirs, frames[0]))


def _call(frame: dict[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 80em; margin: 1.5em auto; padding: 0 1em }}
svg {{ width: 100% }} svg text {{ fill: currentColor; font-size: 11px }} g text {{ fill: #000 }}
td, th {{ padding: .1em 1em .1em 0; text-align: left }} td:last-child {{ min-width: 25em }}
i {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em }}
</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def main() -> None:
    """Write one page."""
    os.nice(10)  # training comes first
    kind, source, target = sys.argv[1:]
    snapshot = pickle.loads(Path(source).read_bytes())  # noqa: S301  our own file of just now
    draw = {"history": history, "segments": segments}[kind]
    Path(target).write_text(draw(snapshot), encoding="utf-8")


if __name__ == "__main__":
    main()
