"""Programs that process the files of profilers, which takes seconds and holds the GIL.

``python -m lightning_perf.profilers.programs COMMAND SOURCE FILE...`` runs one:

- ``memory CAPTURE TEXT`` writes a summary of a memray capture and prints its metrics.
- ``flamegraph CAPTURE PAGE`` is memray's own.
- ``merge TRACE CHILD...`` adds VizTracer's traces of child processes to that of their parent.
- ``timeline POINTS PAGE DEVICE`` draws memory over time, of what torch.profiler exports.
- ``history SNAPSHOT PAGE`` draws a snapshot of CUDA memory.
"""

from __future__ import annotations

import json
import linecache
import os
import pickle
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from stat import S_ISREG
from typing import Any, TextIO, TypeAlias

from lightning_perf.charts import (
    COLOURS,
    OTHER,
    PALETTE,
    Areas,
    FlameGraph,
    Heading,
    Layer,
    Part,
    fold,
    page,
    ticks,
)
from lightning_perf.files import write_text
from lightning_perf.units import bytes_text, bytes_unit, duration, time_unit

# -- memory over time ----------------------------------------------------------------------------

#: Torch's categories, in the order of its columns.
CATEGORIES = (
    "Parameter", "Optimizer state", "Input", "Temporary", "Activation", "Gradient",
    "Autograd detail", "Unknown",
)  # fmt: skip
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


# -- snapshots of the CUDA allocator ---------------------------------------------------------------

Snapshot = dict[str, Any]
Frames = Sequence[dict[str, Any]]

#: Time and size of an allocation, or of a free with a negative size, and the allocation's stack.
_Change: TypeAlias = tuple[int, int, "Frames | None"]

#: Source lines with a layer of their own in a chart; the others share one.
_LAYERS = 6
_OTHER_LINES, _BEFORE = "other lines", "allocated before the recording"
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")
#: Frames of these are not the user's code.
_LIBRARIES = ("/torch/", "/lightning/", "/pytorch_lightning/", "/lightning_fabric/")


def history(snapshot: Snapshot) -> str:
    """A page about memory over time by source line, and the stacks at the peak."""
    parts = [
        part
        for number, events in enumerate(snapshot["device_traces"])
        if events
        for part in _device_history(number, events, snapshot["segments"])
    ]
    return page("Memory history", parts or ["No history was recorded: no window was open."])


def _device_history(
    number: int, events: list[dict[str, Any]], segments: list[Any]
) -> Iterator[Part]:
    here = (each for each in segments if each.get("device", 0) == number)
    blocks = (block for each in here for block in each["blocks"] if block["state"] in _IN_USE)
    memory, stacks = of_history(events, blocks)
    yield Heading(f"Device {number}")
    for event in events:
        if event["action"] == "oom":
            free = bytes_text(event.get("device_free", 0))
            size = bytes_text(event["size"])
            yield f"An allocation of {size} failed; the device had {free} free."
    yield memory_areas(memory)
    yield FlameGraph(fold(stacks), "Allocated at the peak", bytes_text)


def of_history(
    events: Iterable[dict[str, Any]], in_use: Iterable[dict[str, Any]]
) -> tuple[Timeline, list[tuple[list[str], int]]]:
    """Memory of one device over time by source line, and the stacks at the peak.

    ``in_use`` are the blocks that are allocated after the last event.
    """
    changes, before = _changes(events, in_use)
    totals = list(accumulate((size for _, size, _ in changes), initial=before))
    peak = totals.index(max(totals))
    by_stack: Counter[tuple[str, ...]] = Counter()
    by_line: Counter[str] = Counter()
    for _, size, frames in changes[:peak]:
        # Calls from the outermost to the innermost.
        by_stack[tuple(map(_call, reversed(frames or ())))] += size
        by_line[_line(frames)] += size
    by_line.pop(_BEFORE, None)
    largest = [name for name, size in by_line.most_common(_LAYERS) if size > 0]
    names = [*largest, _OTHER_LINES, _BEFORE]
    sizes = dict.fromkeys(names, 0) | {_BEFORE: before}
    rows, times = [tuple(sizes.values())], [changes[0][0] if changes else 0]
    for time, size, frames in changes:
        line = _line(frames)
        sizes[line if line in sizes else _OTHER_LINES] += size
        rows.append(tuple(sizes.values()))
        times.append(time)
    stacks = [(list(stack), size) for stack, size in by_stack.items() if stack and size > 0]
    kept = before + by_stack[()]
    if kept > 0:
        stacks.append(([_BEFORE], kept))
    return Timeline(times, rows, names), stacks


def _changes(
    events: Iterable[dict[str, Any]], in_use: Iterable[dict[str, Any]]
) -> tuple[list[_Change], int]:
    """Allocations and frees, and the bytes that were allocated before the first of them."""
    live: dict[int, Frames] = {}
    changes: list[_Change] = []
    before = 0
    for number, event in enumerate(events):
        action, time = event["action"], event.get("time_us", number)
        if action == "alloc":
            live[event["addr"]] = event["frames"]
            changes.append((time, event["size"], event["frames"]))
        elif action == "free_completed":
            frames = live.pop(event["addr"], None)
            before += event["size"] if frames is None else 0
            changes.append((time, -event["size"], frames))
    before += sum(block["size"] for block in in_use if block["address"] not in live)
    return changes, before


def _line(frames: Frames | None) -> str:
    """The innermost source line outside of libraries."""
    if not frames:
        return _BEFORE if frames is None else _OTHER_LINES
    own = (f for f in frames if not any(part in f["filename"] for part in _LIBRARIES))
    return _call(next(own, frames[0]))


def _call(frame: dict[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


# -- captures of memray --------------------------------------------------------------------------

#: Source lines in each table of memory.
_LINES = 15
#: Bytes of the largest file that is read for its source lines.
_MOST_SOURCE = 16 << 20
_UNKNOWN = ("<no Python frame>", "", 0)
Location = tuple[str, str, int]  # function, file, line

_open = tokenize.open


def _open_source(filename: Any) -> TextIO:
    """As ``tokenize.open``: code may name a device or a pipe as its file, which never ends."""
    status = Path(filename).stat()
    if not S_ISREG(status.st_mode) or status.st_size > _MOST_SOURCE:
        raise OSError(f"{filename} is not a source file")
    return _open(filename)


def summarize(capture: Path) -> tuple[str, dict[str, float]]:
    """The text, and the metrics that ``Memray`` documents.

    Raises:
        OSError: The capture cannot be read.
    """
    from memray import FileReader

    with FileReader(capture) as reader:
        peak = _by_location(reader.get_high_watermark_allocation_records(merge_threads=True))
        unfreed = _by_location(reader.get_leaked_allocation_records(merge_threads=True))
    figures = {"peak_memory": peak.total(), "unfreed_memory": unfreed.total()}
    tables = [
        *_table("Largest at the peak", peak),
        *_table("Allocated in this window and not freed", unfreed),
    ]
    total = _statistics(capture)
    if total is not None:
        figures |= {
            "total_memory": total.total_memory_allocated,
            "total_allocations": total.total_num_allocations,
        }
        tables += _table(
            "Allocated in total, freed or not", Counter(dict(total.top_locations_by_size))
        )
    head = [
        f"{name.replace('_', ' '):<18}{_number(name, value)}" for name, value in figures.items()
    ]
    return "\n".join([*head, *tables, ""]), {key: float(value) for key, value in figures.items()}


def _statistics(capture: Path) -> Any:
    """Totals; None for aggregated captures and where memray lacks this private function."""
    try:
        from memray._memray import compute_statistics

        return compute_statistics(str(capture), num_largest=_LINES)
    except (ImportError, NotImplementedError, TypeError):
        return None


def _by_location(records: Iterable[Any]) -> Counter[Location]:
    """Bytes by the innermost Python source line."""
    sizes: Counter[Location] = Counter()
    for record in records:
        stack = record.stack_trace(max_stacks=1)
        sizes[stack[0] if stack else _UNKNOWN] += record.size
    return sizes


def _table(title: str, sizes: Counter[Location]) -> Iterator[str]:
    yield f"\n{title}\n{'-' * len(title)}"
    for (function, file, line), size in sorted(sizes.items(), key=lambda x: (-x[1], x[0]))[:_LINES]:
        place = f"{file}:{line}" if file else ""
        yield f"{bytes_text(size):>10}  {function}  {place}"
        # As memray does, because other files may contain secrets.
        source = linecache.getline(file, line).strip() if file.endswith(".py") else ""
        if source:
            yield f"{'':12}{source[:88]}"


def _number(name: str, value: int) -> str:
    return f"{value:,}" if name == "total_allocations" else f"{bytes_text(value)} ({value:,} bytes)"


# -- traces, and the command ---------------------------------------------------------------------


def merge(target: Path, others: Sequence[Path]) -> None:
    """Add events of other traces of this machine, within the time span of the first one."""
    whole = json.loads(target.read_bytes())
    calls = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    first = min((call["ts"] for call in calls), default=0.0)
    last = max((call["ts"] + call["dur"] for call in calls), default=0.0)
    for other in others:
        part = json.loads(other.read_bytes())
        whole["traceEvents"] += (
            event
            for event in part["traceEvents"]
            if event["ph"] == "M" or first <= event["ts"] + event.get("dur", 0.0) <= last
        )
        if part["viztracer_metadata"].get("overflow"):
            whole["viztracer_metadata"]["overflow"] = True
    write_text(target, json.dumps(whole))


def _main(command: str, first: str, target: str, *others: str) -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # training comes first
    tokenize.open = _open_source  # linecache reads with it
    source = Path(first)
    match command:
        case "merge":
            merge(source, [*map(Path, (target, *others))])
            return
        case "flamegraph":
            from memray.commands import main

            sys.exit(main([command, "--no-web", "--force", "--output", target, first]))
        case "memory":
            text, numbers = summarize(source)
            sys.stdout.write(json.dumps(numbers))
        case "timeline":
            text = memory_page(of_points(*json.loads(source.read_bytes())), *others)
        case _:
            text = history(pickle.loads(source.read_bytes()))  # noqa: S301  our own of just now
    write_text(Path(target), text)


if __name__ == "__main__":
    _main(*sys.argv[1:])
