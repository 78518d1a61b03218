"""Traces of torch.profiler as arrays of numbers, and their summaries.

Idle time, communication, synchronization, and operators.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.traces.events import CutShort, TraceError, microseconds, stream
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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
#: Characters of a name that tables show.
_WIDTH = 80
#: The start of the names of steps' annotations, and the name that all of them get.
_STEP, STEP = "ProfilerStep#", "ProfilerStep*"


class Kind(IntEnum):
    """Kinds of events. Those from ``KERNEL`` on are of a device."""

    OPERATOR = 0
    ANNOTATION = 1
    #: A function of a device's interface, such as CUDA's.
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


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events that were read from a trace."""

    #: The calls of each thread by their start, and for each the row of its caller, or -1.
    host: EventTable
    callers: NDArray[Any]
    device: EventTable
    names: list[tuple[Kind, str]]
    #: All events of the file, also those of other kinds.
    count: int
    #: Reasons why some events are missing.
    notes: list[str]

    def are(self, table: EventTable, test: Callable[[Kind, str], object]) -> NDArray[np.bool_]:
        """Whether events have a kind and a name that pass a test."""
        passed: NDArray[np.bool_] = np.array([bool(test(*each)) for each in self.names])[table.name]
        return passed


def read(path: Path, most: int = MOST_EVENTS) -> TraceEvents:
    """Read a trace of torch.profiler; of a truncated one, the events up to its end.

    At most ``most`` events of the host and of the devices are kept.
    """
    reader, head, notes = _Reader(most), dict[str, Any](), list[str]()
    try:
        for event in stream(path, head):
            reader.add(event)
    except CutShort:
        if not reader.host:
            raise
        notes.append(f"the file is cut short or damaged after {reader.count:,} events")
    if not reader.host:
        maker = ": it is one of VizTracer" if "viztracer_metadata" in head else ""
        raise TraceError(f"{path} is not a trace of torch.profiler{maker}")
    tables = []
    for rows, place in ((reader.host, "host"), (reader.device, "devices")):
        table = np.frombuffer(rows, np.int64).reshape(-1, len(EventTable._fields))
        if len(table) == most:
            notes.append(f"only the first {most:,} events of the {place} are used")
        tables.append(EventTable(*table.T))
    if reader.named > _MOST_NAMES:
        notes.append(f"events with new names are not used after {len(reader.names):,} names")
    host, callers = _nested(tables[0])
    return TraceEvents(host, callers, tables[1], list(reader.names), reader.count, notes)


def _nanoseconds(value: float) -> int:
    """A trace's microseconds as an integer: sums of floats would lose the three decimals."""
    return round(microseconds(value) * 1000)


class _Reader:
    """Collects the rows of both tables, one after the other."""

    def __init__(self, most: int) -> None:
        self._most, self.count, self.named = most, 0, 0
        self.host, self.device = array("q"), array("q")
        self.names: dict[tuple[Kind, str], int] = {}
        self._places: dict[object, int] = {}

    def add(self, event: Event) -> None:
        """Add an event, unless it is of another kind."""
        self.count += 1
        try:
            rows, row = self._row(event)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # other tools' events, such as those of VizTracer
        if len(rows) < self._most * len(row) and max(map(abs, row)) <= _LARGEST:
            rows.extend(row)

    def _row(self, event: Event) -> tuple[array[int], tuple[int, ...]]:
        """The table of an event's kind, and its values there; none where it is not used."""
        start, arguments = _nanoseconds(event["ts"]), event.get("args", {})
        category = event["cat"]
        kind = Kind.CALL if category.endswith(_INTERFACES) else _KINDS[category]
        if event["ph"] != "X":
            return self.host, ()
        name, end = event["name"], start + _nanoseconds(event["dur"])
        if kind is Kind.FRAME:
            name = _ADDRESS.sub("", name)
        elif name.startswith(_STEP):
            name = STEP
        on_device = kind >= Kind.KERNEL
        place = event["pid"] if on_device else (event["pid"], event["tid"])
        number = self._number(self.names, (kind, name[:_LONGEST_NAME]))
        place = self._number(self._places, place)
        row = (start, end, number, place, int(arguments.get("External id", 0)))
        return self.device if on_device else self.host, row

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


# -- the summary ----------------------------------------------------------------------------------

#: Rows of each table.
_MOST_ROWS = 10
_INPUT = "enumerate(DataLoader)"
_COMMUNICATION = re.compile(r"(?:void )?(?:nccl|rccl|msccl)", re.IGNORECASE)
#: Kernels that use tensor cores have one of these in their names, such as the instruction's shape
#: (s16816gemm), and none of the others.
_TENSOR_CORES = re.compile(
    r"884|1688|16816|16832|[hi]mma|wgmma|tensorop|nvjet|xmma_|flash_(?:fwd|bwd)|fmha", re.IGNORECASE
)
_NO_TENSOR_CORES = re.compile(r"simt|ffma|sgemm", re.IGNORECASE)
#: Calls in which the host waits for the device.
_SYNCHRONIZING = re.compile(
    r"aten::item|aten::_local_scalar_dense|(?:cuda|hip)(?:Stream|Device|Event)Synchronize"
    r"|cudaMemcpy|hipMemcpy|hipMemcpyWithStream"
)
#: A Python frame with a line, and those of libraries.
_LINE = re.compile(r"[^<].*\.py\(\d+\): .+")
_LIBRARY = re.compile(
    r"(?:^|/)(?:torch|lightning|lightning_fabric|pytorch_lightning|lightning_perf)/"
)


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of an operator, without the operators within; or of a kernel."""

    name: str
    calls: int
    cpu_seconds: float
    #: The device time of the kernels that it launched.
    device_seconds: float


@dataclass(frozen=True, slots=True)
class Synchronization:
    """All calls at one place in which the host waits for the device."""

    call: str
    #: The operator that makes the call; empty if none does.
    operator: str
    #: ``file(line): function``; empty without ``with_stack=True``.
    line: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Times of the devices in seconds; the mean over devices if there are several."""

    devices: int
    busy: float
    #: Idle while the host waited for the DataLoader.
    idle_input: float
    #: Idle while the host was in operators or launched kernels: launch-bound.
    idle_launch: float
    #: Idle while the host did something else, such as Python code between operators.
    idle_other: float
    communication: float
    #: Communication while no other kernel ran.
    exposed_communication: float
    #: The sum of all other kernels, and of those that use tensor cores.
    kernels: float
    tensor_cores: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The summary of a trace from the start of its first step to the end of its last one.

    The host does not wait for a device, which may do the work of these steps later: times are then
    those of the device.
    """

    events: int
    seconds: float
    #: 0 if the trace marks no steps: then the seconds are those from its first to its last event.
    steps: int
    #: None on a trace without a device.
    device: DeviceTime | None
    #: By self time, on the device if there is one, the most costly first.
    operators: Sequence[Operator]
    kernels: Sequence[Operator]
    synchronizations: Sequence[Synchronization]
    #: Data that is missing from the summary, and why.
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def summarize(path: Path, most: int = MOST_EVENTS) -> TraceSummary:
    """Summarize a trace of torch.profiler, in bounded memory.

    A truncated file is summarized up to its end. The first ``most`` events of the host and of the
    devices are used. Raises `TraceError` if the file is not such a trace, and `OSError` if it
    cannot be read.
    """
    events = read(path, most)
    host, device = events.host, events.device
    steps = events.are(host, lambda *event: event == (Kind.ANNOTATION, STEP))
    marks = [host.at(steps)] if steps.any() else [host, *([device] if len(device.name) else [])]
    begin = int(min(table.start.min() for table in marks))
    end = int(max(table.end.max() for table in marks))
    inside = (begin <= host.start) & (host.start < end)
    if steps.any():
        begin, end = _on_device(host.link[inside], device, begin, end)
    device = device.at((device.end > begin) & (device.start < end))
    events, has_device = replace(events, device=device), len(device.name) > 0
    rows = _operators(events, inside)
    return TraceSummary(
        events.count,
        (end - begin) / 1e9,
        int(steps.sum()),
        _device_time(events, begin, end) if has_device else None,
        [row for kind, row in rows if kind is Kind.OPERATOR][:_MOST_ROWS],
        [row for kind, row in rows if kind >= Kind.KERNEL][:_MOST_ROWS],
        _waits(events, inside) if has_device else [],
        events.notes,
    )


#: Events of the profiler itself, and operators that only look at a tensor, as in torch's tables.
_UNSEEN = {
    "profiler::_record_function_enter", "profiler::_record_function_enter_new",
    "profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version",
}  # fmt: skip


def _operators(events: TraceEvents, inside: NDArray[np.bool_]) -> list[tuple[Kind, Operator]]:
    """The calls of each name, the most costly first: on the device, then on the CPU."""
    calls, device, count = events.host, events.device, len(events.names)
    shown = events.are(calls, lambda _, name: name not in _UNSEEN)
    counted, within = inside & shown, events.callers >= 0
    took = (calls.end - calls.start) * counted
    own = took - np.bincount(events.callers[within], took[within], len(took)) * counted
    # A call and the only one within it count once if they have one name.
    inner = np.bincount(events.callers[within & shown], minlength=len(took))
    repeats = within & (inner == 1)[events.callers] & (calls.name == calls.name[events.callers])
    # Driver calls have the id of their operator, which already has the kernels.
    launched = _launched(calls, device) * events.are(calls, lambda kind, _: kind != Kind.CALL)
    on_cpu = np.bincount(calls.name, own, count)
    on_device = np.bincount(calls.name, launched * counted, count)
    on_device += np.bincount(device.name, device.end - device.start, count)
    numbers = np.bincount(np.append(calls.name[counted & ~repeats], device.name), minlength=count)
    columns = numbers.tolist(), (on_cpu / 1e9).tolist(), (on_device / 1e9).tolist()
    rows = [
        (kind, Operator(name, *figures))
        for (kind, name), *figures in zip(events.names, *columns, strict=True)
        if figures[0]
    ]
    return sorted(rows, key=lambda row: (-row[1].device_seconds, -row[1].cpu_seconds))


def _launched(calls: EventTable, device: EventTable) -> NDArray[Any]:
    """Nanoseconds on the device of what each call launched, without the calls within."""
    links, places = np.unique(np.append(0, calls.link), return_inverse=True)
    position = np.searchsorted(links[:-1], device.link)
    known = (links[position] == device.link) & (device.link > 0)
    took = (device.end - device.start)[known]
    sums: NDArray[Any] = np.bincount(position[known], took, len(links))[places[1:]]
    return sums


def _waits(events: TraceEvents, inside: NDArray[Any]) -> list[Synchronization]:
    """The places in which the host waits for the device, the costliest first."""
    calls, names = events.host, events.names
    waiting = events.are(calls, lambda _, name: _SYNCHRONIZING.fullmatch(name))
    costs: dict[tuple[str, str, str], tuple[int, float]] = {}
    # What runs during a call, by the call's row; each is derived from that of its caller.
    running = {-1: _Running()}
    for row in np.flatnonzero(waiting & inside).tolist():
        above = [int(events.callers[row])]
        while above[-1] not in running:
            above.append(int(events.callers[above[-1]]))
        for outer, inner in pairwise(reversed(above)):
            call = names[calls.name[inner]]
            running[inner] = running[outer].within(call, waits=bool(waiting[inner]))
        where = running[above[0]]
        if not where.waits:
            place = (names[calls.name[row]][1], where.operator, where.own or where.line)
            times, seconds = costs.get(place, (0, 0.0))
            costs[place] = times + 1, seconds + float(calls.end[row] - calls.start[row]) / 1e9
    sums = [Synchronization(*place, *cost) for place, cost in costs.items()]
    return sorted(sums, key=lambda wait: -wait.seconds)[:_MOST_ROWS]


class _Running(NamedTuple):
    """What nested calls are, the innermost included."""

    #: Whether one of them waits for the device.
    waits: bool = False
    #: The outermost operator.
    operator: str = ""
    #: The innermost line, and the innermost one that is not of a library.
    line: str = ""
    own: str = ""

    def within(self, call: tuple[Kind, str], waits: bool) -> _Running:
        """What these calls are with one more call within."""
        (kind, name), operator, line, own = call, self.operator, self.line, self.own
        if kind == Kind.OPERATOR:
            operator = operator or name
        elif kind == Kind.FRAME and _LINE.fullmatch(name):
            line, own = name, own if _LIBRARY.search(name) else name
        return _Running(self.waits or waits, operator, line, own)


def _on_device(launched: NDArray[Any], device: EventTable, begin: int, end: int) -> tuple[int, int]:
    """When the devices do what calls between two times have ``launched``, if that is later.

    They begin with it after the end of what was launched before.
    """
    own = np.isin(device.link, launched[launched > 0])
    if not own.any():
        return begin, end
    before = ~own & (device.start < device.start[own].min())
    begin = max([begin, *device.end[before].tolist()])
    return begin, max(end, int(device.end[own].max()))


def _device_time(events: TraceEvents, begin: int, end: int) -> DeviceTime:
    host, device = events.host, events.device
    loading = events.are(host, lambda k, name: k == Kind.ANNOTATION and name.startswith(_INPUT))
    working = loading | events.are(host, lambda kind, _: kind in (Kind.OPERATOR, Kind.CALL))
    communicates = events.are(device, lambda _, name: _COMMUNICATION.match(name))
    computes = ~communicates & events.are(device, lambda kind, _: kind == Kind.KERNEL)
    on_tensor_cores = computes & events.are(
        device, lambda _, name: _TENSOR_CORES.search(name) and not _NO_TENSOR_CORES.search(name)
    )
    times = np.r_[device.start, device.end, host.start[working], host.end[working], begin, end]
    points = np.unique(times.clip(begin, end))
    lengths = np.diff(points) / 1e9

    def during(table: EventTable, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether one of these events runs, from each of the points to the next."""
        begun, over = (
            np.searchsorted(np.sort(column[rows]), points[:-1], "right")
            for column in (table.start, table.end)
        )
        runs: NDArray[np.bool_] = begun > over
        return runs

    in_loader, in_operators = during(host, loading), during(host, working)
    seconds = (device.end - device.start) / 1e9
    devices = []
    for place in np.unique(device.place):
        here = device.place == place
        busy, talking = during(device, here), during(device, here & communicates)
        exposed = talking & ~during(device, here & computes)
        devices.append({
            "busy": lengths[busy].sum(),
            "idle_input": lengths[~busy & in_loader].sum(),
            "idle_launch": lengths[~busy & in_operators & ~in_loader].sum(),
            "idle_other": lengths[~busy & ~in_operators].sum(),
            "communication": lengths[talking].sum(),
            "exposed_communication": lengths[exposed].sum(),
            "kernels": seconds[here & computes].sum(),
            "tensor_cores": seconds[here & on_tensor_cores].sum(),
        })  # fmt: skip
    mean = {key: fmean(float(times[key]) for times in devices) for key in devices[0]}
    return DeviceTime(len(devices), **mean)


# -- views ----------------------------------------------------------------------------------------


def facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A summary as a dictionary, without its tables: names, and values with their units."""
    seconds, steps, device = summary["seconds"], summary["steps"], summary.get("device")
    if steps:
        step = duration(seconds / steps)
        yield "steps", f"{steps} in {duration(seconds)}, {step} each"
    else:
        yield "time", duration(seconds)
    yield "events", f"{summary['events']:,}"
    if device is None:
        yield "devices", "none: the trace is of the CPU only"
        return
    for name, value in {
        "device busy": device["busy"],
        "idle, host in operators (launch-bound)": device["idle_launch"],
        "idle, host waits for data": device["idle_input"],
        "idle, host does something else": device["idle_other"],
        "communication": device["communication"],
        "communication, exposed": device["exposed_communication"],
    }.items():
        yield name, f"{value / (seconds or 1):.1%}"
    if device["kernels"]:
        yield (
            "kernels on tensor cores",
            f"{device['tensor_cores'] / device['kernels']:.1%} of their time",
        )


def tables(
    summary: Mapping[str, Any],
) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The tables of a summary: title, headings and rows; those without rows are left out."""
    times = {"cpu_seconds": "self CPU", "device_seconds": "device"}
    if not summary.get("device"):
        del times["device_seconds"]
    rows = [_cells(row, _short(row["name"]), *times) for row in summary.get("operators", ())]
    yield "Operators", ("operator", "calls", *times.values()), rows
    if kernels := summary.get("kernels"):
        rows = [_cells(row, _short(row["name"]), "device_seconds") for row in kernels]
        yield "Kernels", ("kernel", "calls", "device"), rows
    if waits := summary.get("synchronizations"):
        rows = []
        for wait in waits:
            call = " > ".join(filter(None, (wait["operator"], wait["call"])))
            line = wait["line"] or "unknown: record with with_stack=True"
            rows.append((call, *_cells(wait, line, "seconds")))
        yield "Calls that wait for the device", ("call", "line", "calls", "time"), rows


def _cells(row: Mapping[str, Any], name: str, *times: str) -> tuple[str, ...]:
    return name, f"{row['calls']:,}", *(duration(row[key]) for key in times)


def _short(name: str) -> str:
    """The start of a long name."""
    return name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
