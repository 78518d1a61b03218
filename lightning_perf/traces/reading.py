"""Reads Chrome traces and sums the times of their operators."""

from __future__ import annotations

import gzip
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """The events of a trace in Chrome's format, gzipped or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise ValueError(f"{path} has no traceEvents")
    return events


def nanoseconds(microseconds: float) -> int:
    """A trace's microseconds as an integer: sums of floats would lose the three decimals."""
    return round(microseconds * 1000)


_PYTHON = "python_function"
_ON_CPU = {"cpu_op", "user_annotation", _PYTHON}
_CONTEXTS = ("_runtime", "_context")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
#: The number of the CPU among a trace's device types.
_CPU = 0
#: Events that are not in torch's table either.
_UNSEEN = {
    "profiler::_record_function_enter", "profiler::_record_function_enter_new",
    "profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version",
}  # fmt: skip
#: Addresses of objects, removed so that all calls of a function are one row.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Nanoseconds by which rounding may make a call end after its caller: one for each.
SLACK = 2


@dataclass(slots=True)
class Row:
    """All calls of one name; times in nanoseconds, memory in bytes.

    "Self" excludes the calls within. Memory is the bytes allocated minus the bytes freed during
    the calls, on all threads.
    """

    name: str
    calls: int = 0
    self_cpu: int = 0
    cpu: int = 0
    #: The time of the kernels that the calls launched, or of the kernel itself.
    self_device: int = 0
    device: int = 0
    self_cpu_memory: int = 0
    cpu_memory: int = 0
    self_device_memory: int = 0
    device_memory: int = 0
    #: Whether it is a Python frame, as recorded with stacks.
    python: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    python: bool
    start: int
    end: int
    kernels: int = 0
    device: int = 0
    cpu_memory: int = 0
    device_memory: int = 0
    children: list[_Call] = field(default_factory=list)


def key_averages(events: Sequence[Event]) -> list[Row]:
    """Sum the calls of each name, as ``torch.profiler.profile.key_averages()`` does.

    Calls are nested by thread and time. Annotations that torch repeats on the device's timeline
    are skipped: their kernels are counted. Rows are sorted by self device time, then self CPU
    time, the largest first; Python frames come last.

    Example:
        >>> call = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
        >>> linear = call | {"name": "aten::linear", "ts": 10.0, "dur": 5.0}
        >>> addmm = call | {"name": "aten::addmm", "ts": 11.0, "dur": 3.5}
        >>> [(row.name, row.self_cpu, row.cpu) for row in key_averages([linear, addmm])]
        [('aten::addmm', 3500, 3500), ('aten::linear', 1500, 5000)]
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") in _ON_DEVICE]
    rows: dict[tuple[str, str], Row] = {}
    launched: dict[object, int] = defaultdict(int)
    for kernel in kernels:
        took = nanoseconds(kernel["dur"])
        launched[kernel.get("args", {}).get("External id")] += took
        row = rows.setdefault(("device", kernel["name"]), Row(kernel["name"]))
        row.calls += 1
        row.self_device += took
        row.device += took
    memory = _Memory(events)
    for calls in _by_thread(timed, launched):
        _nest(calls)
        _add(rows, _without_repeats(calls), memory)
    return sorted(rows.values(), key=lambda row: (row.python, -row.self_device, -row.self_cpu))


def _by_thread(events: list[Event], launched: dict[object, int]) -> Iterable[list[_Call]]:
    threads: dict[object, list[_Call]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat", ""), event["name"]
        if name in _UNSEEN or not (category in _ON_CPU or category.endswith(_CONTEXTS)):
            continue
        start, identity = nanoseconds(event["ts"]), event.get("args", {}).get("External id")
        # Driver calls have the id of their operator, which already has the kernels.
        kernels = launched.get(identity, 0) if identity and category in _ON_CPU else 0
        name = "ProfilerStep*" if name.startswith("ProfilerStep#") else name
        call = _Call(name, category == _PYTHON, start, start + nanoseconds(event["dur"]), kernels)
        threads[event["pid"], event["tid"]].append(call)
    return threads.values()


def _nest(calls: list[_Call]) -> None:
    """Sort the calls of one thread by start time and set their children."""
    calls.sort(key=lambda call: (call.start, -call.end))
    running: list[_Call] = []
    for call in calls:
        while running and not (
            call.start < running[-1].end and call.end <= running[-1].end + SLACK
        ):
            running.pop()
        if running:
            running[-1].children.append(call)
        running.append(call)


def _without_repeats(calls: list[_Call]) -> list[_Call]:
    """Merge each call whose only child has the same name with that child."""
    repeats: set[int] = set()
    for call in calls:
        while len(call.children) == 1 and call.children[0].name == call.name:
            (same,) = call.children
            repeats.add(id(same))
            call.kernels, call.children = same.kernels, same.children
    return [call for call in calls if id(call) not in repeats]


def _add(rows: dict[tuple[str, str], Row], calls: list[_Call], memory: _Memory) -> None:
    for call in reversed(calls):  # children first
        call.device = call.kernels + sum(child.device for child in call.children)
        call.cpu_memory, call.device_memory = memory.between(call.start, call.end)
        name = ADDRESS.sub("", call.name)
        row = rows.setdefault(("cpu", name), Row(name, python=call.python))
        inner = call.children
        row.calls += 1
        row.cpu += call.end - call.start
        row.self_cpu += call.end - call.start - sum(child.end - child.start for child in inner)
        row.device += call.device
        row.self_device += call.kernels
        row.cpu_memory += call.cpu_memory
        row.self_cpu_memory += call.cpu_memory - sum(child.cpu_memory for child in inner)
        row.device_memory += call.device_memory
        row.self_device_memory += call.device_memory - sum(child.device_memory for child in inner)


class _Memory:
    """Bytes allocated minus bytes freed between two times."""

    def __init__(self, events: Iterable[Event]) -> None:
        changes = sorted(
            (nanoseconds(event["ts"]), event["args"]["Device Type"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and "Bytes" in event.get("args", {})
        )
        self._times = [time for time, _, _ in changes]
        self._cpu = _sums(size if device == _CPU else 0 for _, device, size in changes)
        self._device = _sums(0 if device == _CPU else size for _, device, size in changes)

    def between(self, start: int, end: int) -> tuple[int, int]:
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        return self._cpu[last] - self._cpu[first], self._device[last] - self._device[first]


def _sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


_WIDTH = 60


def table(rows: Sequence[Row], limit: int = 100) -> str:
    """The first rows as a text table, without empty columns.

    Example:
        >>> print(table([Row("aten::addmm", calls=2, self_cpu=3_500_000, cpu=4_000_000)]))
        name         calls  self CPU %  self CPU ms  CPU ms
        ---------------------------------------------------
        aten::addmm      2      100.0%        3.500   4.000
    """
    lines = [["name"], *([_short(row)] for row in rows[:limit])]
    for title, value, show in _COLUMNS:
        values = [value(row) for row in rows]
        if any(values):
            lines[0].append(title)
            for line, each in zip(lines[1:], values, strict=False):
                line.append(show(each, sum(values)))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    texts = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    texts.insert(1, "-" * len(texts[0]))
    if len(rows) > limit:
        texts.append(f"and {len(rows) - limit} more with less time")
    return "\n".join(texts)


def _short(row: Row) -> str:
    """The start of a long name; of a Python frame the end, which has the function."""
    if len(row.name) <= _WIDTH:
        return row.name
    return f"...{row.name[3 - _WIDTH :]}" if row.python else f"{row.name[: _WIDTH - 3]}..."


def _share(value: int, total: int) -> str:
    return f"{value / (total or 1):.1%}"


def _millionths(value: int, _: int) -> str:
    return f"{value / 1e6:.3f}"


_COLUMNS: tuple[tuple[str, Callable[[Row], int], Callable[[int, int], str]], ...] = (
    ("calls", lambda row: row.calls, lambda value, _: str(value)),
    ("self CPU %", lambda row: row.self_cpu, _share),
    ("self CPU ms", lambda row: row.self_cpu, _millionths),
    ("CPU ms", lambda row: row.cpu, _millionths),
    ("self device ms", lambda row: row.self_device, _millionths),
    ("device ms", lambda row: row.device, _millionths),
    ("self CPU MB", lambda row: row.self_cpu_memory, _millionths),
    ("CPU MB", lambda row: row.cpu_memory, _millionths),
    ("self device MB", lambda row: row.self_device_memory, _millionths),
    ("device MB", lambda row: row.device_memory, _millionths),
)


def main() -> None:
    """Write the table of a trace to a file."""
    trace, target = map(Path, sys.argv[1:])
    target.write_text(table(key_averages(read_events(trace))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
