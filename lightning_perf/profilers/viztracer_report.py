"""Programs that process VizTracer's files, since reading them takes seconds.

``python -m lightning_perf.profilers.viztracer_report merge TRACE CHILD...`` adds the traces of
child processes to that of their parent; ``page TRACE PAGE`` draws flame graphs; ``check PACKED``
reads a ``.cvf`` file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_perf.charts import FlameGraph, fold, page

Event = dict[str, Any]

_SUMMARY = """Time by call path, summed over the window. Click a frame to zoom in, the root to zoom
out; the field finds a name. The trace itself, for ui.perfetto.dev or vizviewer, holds the time of
each call."""


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
    target.write_text(json.dumps(whole))


def check(packed: Path) -> None:
    """Fail on a truncated ``.cvf``, which VizTracer leaves on a full disk without an error."""
    from viztracer.vcompressor import VCompressor  # type: ignore[import-untyped]

    VCompressor().decompress(str(packed))


def calls_page(events: Sequence[Event], title: str) -> str:
    """A page with a flame graph of each thread, in which calls of the same path are merged."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    calls = sorted(
        (e for e in events if e["ph"] == "X"),
        key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]),
    )
    graphs = [
        FlameGraph(fold(self_times(list(thread))), _title(names, *key), _milliseconds)
        for key, thread in groupby(calls, key=lambda e: (e["pid"], e["tid"]))
    ]
    return page(title, [_SUMMARY, *graphs])


def self_times(calls: Sequence[Event]) -> Iterator[tuple[list[str], int]]:
    """The stack of each call of one thread, and its nanoseconds without calls inside of it.

    Calls are sorted by start, then by duration, the longest first.

    Example:
        >>> outer = {"name": "f", "ts": 0, "dur": 5}
        >>> inner = {"name": "g", "ts": 1, "dur": 3}
        >>> list(self_times([outer, inner]))
        [(['f', 'g'], 3000), (['f'], 2000)]
    """
    stack: list[tuple[str, float, list[float]]] = []  # name, end, [its own time]

    def leave() -> tuple[list[str], int]:
        names = [name for name, _, _ in stack]
        return names, max(0, round(stack.pop()[2][0] * 1000))

    for call in calls:
        while stack and stack[-1][1] <= call["ts"]:
            yield leave()
        if stack:
            stack[-1][2][0] -= call["dur"]
        stack.append((call["name"], call["ts"] + call["dur"], [call["dur"]]))
    while stack:
        yield leave()


def _title(names: Mapping[tuple[str, int, int], str], pid: int, tid: int) -> str:
    process = (name for (kind, of, _), name in names.items() if (kind, of) == ("process_name", pid))
    return f"{next(process, pid)}, {names.get(('thread_name', pid, tid), tid)}"


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"


if __name__ == "__main__":
    os.nice(10)  # training comes first
    task, source, *others = sys.argv[1], *map(Path, sys.argv[2:])
    if task == "merge":
        merge(source, others)
    elif task == "check":
        check(source)
    else:
        traced = json.loads(source.read_bytes())["traceEvents"]
        others[0].write_text(calls_page(traced, "Python calls"), encoding="utf-8")
