"""Programs that process the files of profilers, which takes seconds and holds the GIL.

``python -m lightning_perf.profilers.programs COMMAND SOURCE FILE...`` runs one:

- ``memory CAPTURE TEXT`` writes a summary of a memray capture and prints its metrics.
- ``flamegraph CAPTURE PAGE`` is memray's own.
- ``merge TRACE CHILD...`` adds VizTracer's traces of child processes to that of their parent.
- ``operators TRACE TEXT`` writes a table of the operators in a trace of torch.profiler.
- ``timeline POINTS PAGE DEVICE`` draws memory over time, of what torch.profiler exports.
- ``history|segments SNAPSHOT PAGE`` draws a snapshot of CUDA memory.
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
from pathlib import Path
from stat import S_ISREG
from typing import Any, TextIO

from lightning_perf.charts.memory import history, memory_page, of_points, segments
from lightning_perf.files import write_text
from lightning_perf.units import bytes_text

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


def _main(command: str, first: str, *others: str) -> None:
    if hasattr(os, "nice"):
        os.nice(10)  # training comes first
    tokenize.open = _open_source  # linecache reads with it
    source = Path(first)
    if command == "merge":
        merge(source, [*map(Path, others)])
    elif command == "flamegraph":
        from memray.commands import main

        sys.exit(main([command, "--no-web", "--force", "--output", *others, first]))
    else:
        target, *device = others
        write_text(Path(target), _text(command, source, *device))


def _text(command: str, source: Path, device: str = "") -> str:
    match command:
        case "memory":
            text, numbers = summarize(source)
            sys.stdout.write(json.dumps(numbers))
            return text
        case "operators":
            from lightning_perf.traces.summary import key_averages, read, table  # imports numpy

            events = read(source)
            return "\n".join([table(key_averages(events)), *events.notes, ""])
        case "timeline":
            return memory_page(of_points(*json.loads(source.read_bytes())), device)
        case _:
            snapshot = pickle.loads(source.read_bytes())  # noqa: S301  our own file of just now
            return history(snapshot) if command == "history" else segments(snapshot)


if __name__ == "__main__":
    _main(*sys.argv[1:])
