"""Summaries of torch.profiler traces: idle time, communication, operators, synchronization."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.traces.events import SLACK, STEP, EventTable, Kind, read
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from lightning_perf.traces.events import Events

#: Events of the host, and of the devices, that are used at most.
MOST_EVENTS = 3_000_000
#: Rows of each table, and sorted events that are walked through at once.
_MOST_ROWS, _PIECE = 10, 100_000
#: Characters of a name that tables show.
_WIDTH = 80
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
    #: Of the kernels that it launched.
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
    kinds = np.array([kind for kind, _ in events.names])
    steps = kinds[host.name] == Kind.ANNOTATION
    steps &= np.array([name == STEP for _, name in events.names])[host.name]
    marks = [host.at(steps)] if steps.any() else [host, *([device] if len(device.name) else [])]
    begin = int(min(each.start.min() for each in marks))
    end = int(max(each.end.max() for each in marks))
    walk = _walk(host, events.names, begin, end)
    operators = host.at((kinds[host.name] == Kind.OPERATOR) & (host.link > 0))
    if steps.any():
        begin, end = _on_device(operators, device, begin, end)
    device = device.at((device.end > begin) & (device.start < end))
    launched = _launched(operators, device, len(kinds))
    table = [
        Operator(name, walk.calls[number], walk.nanoseconds[number] / 1e9, launched[number])
        for number, (kind, name) in enumerate(events.names)
        if kind == Kind.OPERATOR and walk.calls[number]
    ]
    key = "device_seconds" if len(device.name) else "cpu_seconds"
    waits = [Synchronization(*place, *cost) for place, cost in walk.waits.items()]
    return TraceSummary(
        events.count,
        (end - begin) / 1e9,
        int(steps.sum()),
        _device_time(events, device, kinds, begin, end) if len(device.name) else None,
        sorted(table, key=lambda each: -getattr(each, key))[:_MOST_ROWS],
        _kernels(events, device),
        sorted(waits, key=lambda each: -each.seconds)[:_MOST_ROWS] if len(device.name) else [],
        events.notes,
    )


class _Walk(NamedTuple):
    """Sums over the calls of all threads."""

    #: By the number of the name: self time on the CPU, and calls.
    nanoseconds: list[int]
    calls: list[int]
    #: By call, operator and line: calls and seconds.
    waits: dict[tuple[str, str, str], tuple[int, float]]


def _walk(host: EventTable, names: Sequence[tuple[Kind, str]], begin: int, end: int) -> _Walk:
    """Nest the calls of each thread by their times, and sum those that start in a span."""
    found = _Walk([0] * len(names), [0] * len(names), {})
    waiting = [_SYNCHRONIZING.fullmatch(name) is not None for _, name in names]
    order = np.lexsort((-host.end, host.start, host.place))
    running: list[tuple[int, int]] = []
    thread = -1
    for piece in range(0, len(order), _PIECE):
        rows = host.at(order[piece : piece + _PIECE])
        for start, stop, name, place, _ in zip(*(each.tolist() for each in rows), strict=True):
            if place != thread:
                thread = place
                running.clear()
            while running and not (start < running[-1][0] and stop <= running[-1][0] + SLACK):
                running.pop()
            if begin <= start < end:
                found.calls[name] += 1
                found.nanoseconds[name] += stop - start
                if running:
                    found.nanoseconds[running[-1][1]] -= stop - start
                if waiting[name] and not any(waiting[each] for _, each in running):
                    where = (names[name][1], *_where([names[each] for _, each in running]))
                    calls, seconds = found.waits.get(where, (0, 0.0))
                    found.waits[where] = calls + 1, seconds + (stop - start) / 1e9
            running.append((stop, name))
    return found


def _where(running: Sequence[tuple[Kind, str]]) -> tuple[str, str]:
    """The outermost operator of nested calls, and the innermost line that is not of a library."""
    operator = next((name for kind, name in running if kind == Kind.OPERATOR), "")
    lines = [name for kind, name in running if kind == Kind.FRAME and _LINE.fullmatch(name)]
    own = [line for line in lines if not _LIBRARY.search(line)]
    return operator, (own or lines or [""])[-1]


def _on_device(operators: EventTable, device: EventTable, begin: int, end: int) -> tuple[int, int]:
    """When the devices do what the host launches between two times, if that is later.

    They begin with it after the end of what was launched before.
    """
    within = (operators.start >= begin) & (operators.start < end)
    own = np.isin(device.link, operators.link[within])
    if not own.any():
        return begin, end
    before = ~own & (device.start < device.start[own].min())
    begin = max([begin, *device.end[before].tolist()])
    return begin, max(end, int(device.end[own].max()))


def _launched(operators: EventTable, device: EventTable, count: int) -> list[float]:
    """Seconds on the device of what each name's operators launched."""
    if not len(operators.link):
        return [0.0] * count
    order = np.argsort(operators.link)
    links = operators.link[order]
    position = np.searchsorted(links, device.link).clip(max=len(links) - 1)
    known = links[position] == device.link
    owners = operators.name[order][position[known]]
    seconds = (device.end - device.start)[known] / 1e9
    found: list[float] = np.bincount(owners, seconds, count).tolist()
    return found


def _kernels(events: Events, device: EventTable) -> list[Operator]:
    count = len(events.names)
    seconds = np.bincount(device.name, (device.end - device.start) / 1e9, count)
    calls = np.bincount(device.name, minlength=count)
    costly = np.argsort(-seconds)[:_MOST_ROWS]
    return [
        Operator(events.names[number][1], int(calls[number]), 0.0, float(seconds[number]))
        for number in costly
        if calls[number]
    ]


def _device_time(
    events: Events, device: EventTable, kinds: NDArray[Any], begin: int, end: int
) -> DeviceTime:
    host, names = events.host, [name for _, name in events.names]

    def are(test: Callable[[str], object], table: EventTable) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = np.array([bool(test(name)) for name in names])[table.name]
        return found

    loading = are(lambda name: name.startswith(_INPUT), host)
    loading &= kinds[host.name] == Kind.ANNOTATION
    working = loading | np.isin(kinds[host.name], [Kind.OPERATOR, Kind.CALL])
    communicates, is_kernel = are(_COMMUNICATION.match, device), kinds[device.name] == Kind.KERNEL
    computes = is_kernel & ~communicates
    on_tensor_cores = computes & are(
        lambda name: _TENSOR_CORES.search(name) and not _NO_TENSOR_CORES.search(name), device
    )
    times = np.r_[device.start, device.end, host.start[working], host.end[working], begin, end]
    points = np.unique(times.clip(begin, end))
    lengths = np.diff(points) / 1e9

    def during(table: EventTable, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether one of these events runs, from each of the points to the next."""
        begun, over = (
            np.searchsorted(np.sort(each[rows]), points[:-1], "right")
            for each in (table.start, table.end)
        )
        found: NDArray[np.bool_] = begun > over
        return found

    in_loader, in_operators = during(host, loading), during(host, working)
    seconds = (device.end - device.start) / 1e9
    each_device = []
    for place in np.unique(device.place):
        here = device.place == place
        busy, talking = during(device, here), during(device, here & communicates)
        exposed = talking & ~during(device, here & computes)
        each_device.append({
            "busy": lengths[busy].sum(),
            "idle_input": lengths[~busy & in_loader].sum(),
            "idle_launch": lengths[~busy & in_operators & ~in_loader].sum(),
            "idle_other": lengths[~busy & ~in_operators].sum(),
            "communication": lengths[talking].sum(),
            "exposed_communication": lengths[exposed].sum(),
            "kernels": seconds[here & computes].sum(),
            "tensor_cores": seconds[here & on_tensor_cores].sum(),
        })  # fmt: skip
    mean = {key: fmean(float(each[key]) for each in each_device) for key in each_device[0]}
    return DeviceTime(len(each_device), **mean)


# -- views ----------------------------------------------------------------------------------------


def facts(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    """The summary without its tables: names, and values with their units."""
    seconds, device = summary.seconds, summary.device
    if summary.steps:
        each = duration(seconds / summary.steps)
        yield "steps", f"{summary.steps} in {duration(seconds)}, {each} each"
    else:
        yield "time", duration(seconds)
    yield "events", f"{summary.events:,}"
    if device is None:
        yield "devices", "none: the trace is of the CPU only"
        return
    for name, value in {
        "device busy": device.busy,
        "idle, host in operators (launch-bound)": device.idle_launch,
        "idle, host waits for data": device.idle_input,
        "idle, host does something else": device.idle_other,
        "communication": device.communication,
        "communication, exposed": device.exposed_communication,
    }.items():
        yield name, f"{value / (seconds or 1):.1%}"
    if device.kernels:
        yield "kernels on tensor cores", f"{device.tensor_cores / device.kernels:.1%} of their time"


def tables(summary: TraceSummary) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The tables of a summary: title, headings and rows; those without rows are left out."""
    on_device = summary.device is not None
    rows: list[tuple[str, ...]] = [
        (_short(each.name), f"{each.calls:,}", duration(each.cpu_seconds),
         *((duration(each.device_seconds),) if on_device else ()))
        for each in summary.operators
    ]  # fmt: skip
    headings = ("operator", "calls", "self CPU", *(("device",) if on_device else ()))
    yield "Operators", headings, rows
    if summary.kernels:
        rows = [
            (_short(each.name), f"{each.calls:,}", duration(each.device_seconds))
            for each in summary.kernels
        ]
        yield "Kernels", ("kernel", "calls", "device"), rows
    if summary.synchronizations:
        rows = [
            (f"{each.operator} > {each.call}" if each.operator else each.call,
             each.line or "unknown: record with with_stack=True", f"{each.calls:,}",
             duration(each.seconds))
            for each in summary.synchronizations
        ]  # fmt: skip
        yield "Calls that wait for the device", ("call", "line", "calls", "time"), rows


def _short(name: str) -> str:
    """The start of a kernel's long name."""
    return name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
