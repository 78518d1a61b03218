"""A trace of torch.profiler as arrays of numbers, and the sums of its operators."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.traces.events import CutShort, TraceError, microseconds, stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from lightning_perf.traces.events import Event

#: Addresses of objects, removed so that all calls of a function have one name.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Rounding may make a call end this many nanoseconds after its caller: one for each of the two.
_SLACK = 2
#: Events of the host, and of the devices, that are used at most.
MOST_EVENTS = 3_000_000
#: Calls that are nested at once.
_PIECE = 100_000
#: Characters of the longest name; bytes of all names and places, and of one beside its characters.
_LONGEST_NAME, _MOST_NAMES, _NAME = 1 << 12, 1 << 26, 100
#: The largest number of a column.
_LARGEST = (1 << 63) - 1
#: The start of the names of steps' annotations, and the name that all of them get.
_STEP, STEP = "ProfilerStep#", "ProfilerStep*"
#: The name of changes of the memory in use, and the number of the CPU among devices' types.
_MEMORY, _CPU = "[memory]", 0


class Kind(IntEnum):
    """Kinds of events. Those from ``KERNEL`` on are of a device."""

    OPERATOR = 0
    ANNOTATION = 1
    #: Of a device's interface, such as CUDA's.
    CALL = 2
    #: A Python function.
    FRAME = 3
    KERNEL = 4
    COPY = 5


_KINDS = {
    "cpu_op": Kind.OPERATOR, "user_annotation": Kind.ANNOTATION, "python_function": Kind.FRAME,
    "kernel": Kind.KERNEL, "gpu_memcpy": Kind.COPY, "gpu_memset": Kind.COPY,
}  # fmt: skip
_INTERFACES = ("_runtime", "_driver")


class EventTable(NamedTuple):
    """One row per event."""

    #: Nanoseconds.
    start: NDArray[Any]
    end: NDArray[Any]
    #: Position in ``TraceEvents.names``.
    name: NDArray[Any]
    #: A number per thread, or per device.
    place: NDArray[Any]
    #: The operator's number, which its kernels have too; 0 without one.
    link: NDArray[Any]

    def at(self, rows: NDArray[Any]) -> EventTable:
        """Some of the rows."""
        return EventTable(*(column[rows] for column in self))


class MemoryTable(NamedTuple):
    """One row per change of the memory in use."""

    #: Nanoseconds.
    time: NDArray[Any]
    #: Whether it is the CPU's memory, and the change in bytes.
    on_cpu: NDArray[Any]
    size: NDArray[Any]


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events that were read from a trace."""

    #: The calls of each thread by their start, and for each the row of its caller, or -1.
    host: EventTable
    callers: NDArray[Any]
    device: EventTable
    memory: MemoryTable
    names: list[tuple[Kind, str]]
    #: All events of the file, also those of other kinds.
    count: int
    #: Reasons why some events are missing.
    notes: list[str]


def read(path: Path, most: int = MOST_EVENTS) -> TraceEvents:
    """Read a trace of torch.profiler; of a truncated one, the events up to its end.

    At most ``most`` events of the host, of the devices, and of memory are kept.
    """
    reader, head, notes = _Reader(most), dict[str, Any](), list[str]()
    try:
        for event in stream(path, head):
            reader.add(event)
    except CutShort:
        if not reader.host[0]:
            raise
        notes.append(f"the file is cut short or damaged after {reader.count:,} events")
    if not reader.host[0]:
        maker = ": it is one of VizTracer" if "viztracer_metadata" in head else ""
        raise TraceError(f"{path} is not a trace of torch.profiler{maker}")
    tables = []
    for columns, place in (
        (reader.host, "host"), (reader.device, "devices"), (reader.memory, "memory"),
    ):  # fmt: skip
        if len(columns[0]) == most:
            notes.append(f"only the first {most:,} events of the {place} are used")
        tables.append([np.frombuffer(column, dtype=column.typecode) for column in columns])
    if reader.named > _MOST_NAMES:
        notes.append(f"events with new names are not used after {len(reader.names):,} names")
    host, callers = _nested(EventTable(*tables[0]))
    device, names = EventTable(*tables[1]), list(reader.names)
    memory = MemoryTable(*tables[2])
    return TraceEvents(host, callers, device, memory, names, reader.count, notes)


def _nanoseconds(value: float) -> int:
    """A trace's microseconds as an integer: sums of floats would lose the three decimals."""
    return round(microseconds(value) * 1000)


class _Reader:
    def __init__(self, most: int) -> None:
        self._most, self.count, self.named = most, 0, 0
        self.host, self.device, self.memory = (
            [array(code) for code in codes] for codes in ("qqiiq", "qqiiq", "qbq")
        )
        self.names: dict[tuple[Kind, str], int] = {}
        self._places: dict[object, int] = {}

    def add(self, event: Event) -> None:
        """Add an event, unless it is of another kind."""
        self.count += 1
        try:
            columns, row = self._row(event)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # other tools' events, such as those of VizTracer
        if row and max(map(abs, row)) <= _LARGEST:
            for column, value in zip(columns, row, strict=True):
                column.append(value)

    def _row(self, event: Event) -> tuple[Sequence[array[int]], tuple[int, ...]]:
        """The columns of an event's kind, and its values; none where it is not used."""
        start, arguments = _nanoseconds(event["ts"]), event.get("args", {})
        if event["name"] == _MEMORY:
            on_cpu, size = arguments["Device Type"] == _CPU, int(arguments["Bytes"])
            return self.memory, (start, on_cpu, size) if len(self.memory[0]) < self._most else ()
        category = event["cat"]
        kind = Kind.CALL if category.endswith(_INTERFACES) else _KINDS[category]
        columns = self.device if kind >= Kind.KERNEL else self.host
        if event["ph"] != "X" or len(columns[0]) == self._most:
            return columns, ()
        name, end = event["name"], start + _nanoseconds(event["dur"])
        if kind is Kind.FRAME:
            name = _ADDRESS.sub("", name)
        elif name.startswith(_STEP):
            name = STEP
        place = event["pid"] if kind >= Kind.KERNEL else (event["pid"], event["tid"])
        number = self._number(self.names, (kind, name[:_LONGEST_NAME]))
        place = self._number(self._places, place)
        return columns, (start, end, number, place, int(arguments.get("External id", 0)))

    def _number(self, numbers: dict[Any, int], key: object) -> int:
        """The number of a name or a place; raises `ValueError` if there are too many to keep."""
        if (number := numbers.get(key)) is None:
            self.named += _NAME + len(str(key))
            if self.named > _MOST_NAMES:
                raise ValueError("too many names")
            number = numbers[key] = len(numbers)
        return number


def _nested(host: EventTable) -> tuple[EventTable, NDArray[Any]]:
    """The calls of each thread by their start, and for each the row of its caller, or -1."""
    host = host.at(np.lexsort((-host.end, host.start, host.place)))
    callers = array("i")
    running: list[tuple[int, int]] = []  # end and row
    thread = -1
    for first in range(0, len(host.start), _PIECE):
        piece = (column[first : first + _PIECE].tolist() for column in host[:4])
        for row, (start, end, _, place) in enumerate(zip(*piece, strict=True), first):
            if place != thread:
                thread = place
                running.clear()
            while running and not (start < running[-1][0] and end <= running[-1][0] + _SLACK):
                running.pop()
            callers.append(running[-1][1] if running else -1)
            running.append((end, row))
    return host, np.frombuffer(callers, dtype=callers.typecode)


# -- sums of operators, as by torch.profiler.profile.key_averages() -------------------------------

#: TraceEvents that torch's table omits, too.
_UNSEEN = {
    "profiler::_record_function_enter", "profiler::_record_function_enter_new",
    "profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version",
}  # fmt: skip
#: What is summed, with its title: nanoseconds, and bytes allocated minus bytes freed, on all
#: threads. The device's time is that of the kernels that a call launched, or of the kernel itself.
_SUMS = {
    "cpu": "CPU ms", "device": "device ms", "cpu_memory": "CPU MB", "device_memory": "device MB",
}  # fmt: skip
_WIDTH = 60


@dataclass(slots=True)
class Row:
    """All calls of one name: the sums of `_SUMS`, with and without the calls within."""

    name: str
    kind: Kind = Kind.OPERATOR
    calls: int = 0
    total: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)


def key_averages(events: TraceEvents, counted: NDArray[Any] | None = None) -> list[Row]:
    """Sum the calls of each name: all of them, or those that are to be ``counted``.

    Rows are sorted by self device time, then self CPU time, the largest first; Python frames come
    last.
    """
    calls, device, kinds = events.host, events.device, [kind for kind, _ in events.names]
    rows = [Row(name, kind) for kind, name in events.names]
    shown = np.array([name not in _UNSEEN for _, name in events.names])[calls.name]
    # Driver calls have the id of their operator, which already has the kernels.
    kernels = _launched(calls, device) * (np.array(kinds)[calls.name] != Kind.CALL)

    # A call whose only child has the same name is merged with that child.
    inner = events.callers >= 0
    alone = np.bincount(events.callers[inner & shown], minlength=len(shown))[events.callers] == 1
    repeats = inner & alone & (calls.name == calls.name[events.callers])
    into = np.arange(len(repeats))
    for call in np.flatnonzero(repeats).tolist():  # callers first
        into[call] = into[events.callers[call]]
        kernels[into[call]] = kernels[call]
    kernels[repeats] = 0
    callers = np.where(inner, into[events.callers], -1)
    counted = shown & ~repeats & (True if counted is None else counted)

    launches, above = kernels.tolist(), callers.tolist()
    for call in range(len(above) - 1, -1, -1):  # those within first
        if above[call] >= 0:
            launches[above[call]] += launches[call]
    sums = {"cpu": calls.end - calls.start, "device": np.array(launches), **_memory(events)}
    for key, values in sums.items():
        total = values * counted
        own = total - np.bincount(callers[inner], total[inner], len(total)) * counted
        totals = [np.bincount(calls.name, column, len(rows)) for column in (total, own)]
        if key == "device":
            took = np.bincount(device.name, device.end - device.start, len(rows))
            totals = [column + took for column in totals]
        for row, *both in zip(rows, *totals, strict=True):
            row.total[key], row.own[key] = map(int, both)
    numbers = np.bincount(np.append(calls.name[counted], device.name), minlength=len(rows))
    for row, number in zip(rows, numbers.tolist(), strict=True):
        row.calls = number
    called = [row for row in rows if row.calls]
    return sorted(called, key=lambda r: (r.kind is Kind.FRAME, -r.own["device"], -r.own["cpu"]))


def _launched(calls: EventTable, device: EventTable) -> NDArray[Any]:
    """Nanoseconds on the device of what each call launched, without the calls within."""
    links, places = np.unique(np.append(0, calls.link), return_inverse=True)
    position = np.searchsorted(links[:-1], device.link)
    known = (links[position] == device.link) & (device.link > 0)
    took = (device.end - device.start)[known]
    sums: NDArray[Any] = np.bincount(position[known], took, len(links))[places[1:]]
    return sums


def _memory(events: TraceEvents) -> dict[str, NDArray[Any]]:
    """The bytes allocated minus the bytes freed during each call."""
    order = np.argsort(events.memory.time)
    times, on_cpu, sizes = (column[order] for column in events.memory)
    last = times.searchsorted(events.host.end, "right")
    first = times.searchsorted(events.host.start)
    changes = {}
    for name, is_cpu in (("cpu_memory", 1), ("device_memory", 0)):
        sums = np.append(0, np.cumsum(sizes * (on_cpu == is_cpu)))
        changes[name] = sums[last] - sums[first]
    return changes


def table(rows: Sequence[Row], limit: int = 100) -> str:
    """The first rows as a text table, without empty columns.

    Example:
        >>> row = Row("aten::addmm", calls=2)
        >>> row.own["cpu"], row.total["cpu"] = 3_500_000, 4_000_000
        >>> print(table([row]))
        name         calls  self CPU %  self CPU ms  CPU ms
        ---------------------------------------------------
        aten::addmm      2      100.0%        3.500   4.000
    """
    shown = rows[:limit]
    columns = [["name", *map(_short, shown)], ["calls", *(str(row.calls) for row in shown)]]
    if all_cpu := sum(row.own["cpu"] for row in rows):
        columns.append(["self CPU %", *(f"{row.own['cpu'] / all_cpu:.1%}" for row in shown)])
    for key, title in _SUMS.items():
        own, total = [row.own[key] for row in rows], [row.total[key] for row in rows]
        for heading, sums in ((f"self {title}", own), (title, total)):
            if any(sums):
                columns.append([heading, *(f"{value / 1e6:.3f}" for value in sums[:limit])])
    widths = [max(map(len, column)) for column in columns]
    formats = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    lines = ["  ".join(map(format, line, formats)) for line in zip(*columns, strict=True)]
    lines.insert(1, "-" * len(lines[0]))
    if len(rows) > limit:
        lines.append(f"and {len(rows) - limit} more with less time")
    return "\n".join(lines)


def _short(row: Row) -> str:
    """The start of a long name; of a Python frame the end, which has the function."""
    if len(row.name) <= _WIDTH:
        return row.name
    if row.kind is Kind.FRAME:
        return f"...{row.name[3 - _WIDTH :]}"
    return f"{row.name[: _WIDTH - 3]}..."
