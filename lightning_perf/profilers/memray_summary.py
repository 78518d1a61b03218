"""A summary of a memray capture, as text and as metrics.

A program, since memray's reader holds the GIL: ``python -m
lightning_perf.profilers.memray_summary CAPTURE TEXT`` writes the text and prints the metrics.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_perf.units import bytes_text

_LINES = 15
_UNKNOWN = ("<no Python frame>", "", 0)

Location = tuple[str, str, int]  # function, file, line


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
            "Allocated in all, freed or not", Counter(dict(total.top_locations_by_size))
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
        source = linecache.getline(file, line).strip() if file else ""
        if source:
            yield f"{'':12}{source[:88]}"


def _number(name: str, value: int) -> str:
    return f"{value:,}" if name == "total_allocations" else f"{bytes_text(value)} ({value:,} bytes)"


if __name__ == "__main__":
    os.nice(10)  # training comes first
    text, numbers = summarize(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(text, encoding="utf-8")
    sys.stdout.write(json.dumps(numbers))
