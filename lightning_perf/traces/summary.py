"""Summaries of torch.profiler traces: idle time, communication, operators, synchronization."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.traces.tables import MOST_EVENTS, STEP, Kind, key_averages, read
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from lightning_perf.traces.tables import EventTable, TraceEvents

#: Rows of each table.
_MOST_ROWS = 10
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
    begin = int(min(table.start.min() for table in marks))
    end = int(max(table.end.max() for table in marks))
    inside = (begin <= host.start) & (host.start < end)
    if steps.any():
        begin, end = _on_device(host.link[inside], device, begin, end)
    device = device.at((device.end > begin) & (device.start < end))
    events, has_device = replace(events, device=device), len(device.name) > 0
    rows = [
        (row.kind, Operator(row.name, row.calls, row.own["cpu"] / 1e9, row.own["device"] / 1e9))
        for row in key_averages(events, inside)
    ]
    return TraceSummary(
        events.count,
        (end - begin) / 1e9,
        int(steps.sum()),
        _device_time(events, kinds, begin, end) if has_device else None,
        [row for kind, row in rows if kind is Kind.OPERATOR][:_MOST_ROWS],
        [row for kind, row in rows if kind >= Kind.KERNEL][:_MOST_ROWS],
        _waits(events, inside) if has_device else [],
        events.notes,
    )


def _waits(events: TraceEvents, inside: NDArray[Any]) -> list[Synchronization]:
    """The places in which the host waits for the device, the costliest first."""
    calls, names = events.host, events.names
    waiting = np.array([_SYNCHRONIZING.fullmatch(name) is not None for _, name in names])
    costs: dict[tuple[str, str, str], tuple[int, float]] = {}
    # What runs during a call, by the call's row; each is derived from that of its caller.
    running = {-1: _Running()}
    for row in np.flatnonzero(waiting[calls.name] & inside).tolist():
        above = [int(events.callers[row])]
        while above[-1] not in running:
            above.append(int(events.callers[above[-1]]))
        for outer, inner in pairwise(reversed(above)):
            name = calls.name[inner]
            running[inner] = running[outer].within(names[name], waits=bool(waiting[name]))
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
        """The same with one more call within."""
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


def _device_time(events: TraceEvents, kinds: NDArray[Any], begin: int, end: int) -> DeviceTime:
    host, device, names = events.host, events.device, [name for _, name in events.names]

    def are(test: Callable[[str], object], table: EventTable) -> NDArray[np.bool_]:
        passed: NDArray[np.bool_] = np.array([bool(test(name)) for name in names])[table.name]
        return passed

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
    on_device = bool(summary.get("device"))

    def cells(row: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
        times = (duration(row[key]) for key in keys if key != "device_seconds" or on_device)
        return _short(row["name"]), f"{row['calls']:,}", *times

    rows = [cells(row, "cpu_seconds", "device_seconds") for row in summary.get("operators", ())]
    headings = ("operator", "calls", "self CPU", *(("device",) if on_device else ()))
    yield "Operators", headings, rows
    if kernels := summary.get("kernels"):
        rows = [cells(row, "device_seconds") for row in kernels]
        yield "Kernels", ("kernel", "calls", "device"), rows
    if waits := summary.get("synchronizations"):
        rows = [
            (" > ".join(filter(None, (wait["operator"], wait["call"]))),
             wait["line"] or "unknown: record with with_stack=True", f"{wait['calls']:,}",
             duration(wait["seconds"]))
            for wait in waits
        ]  # fmt: skip
        yield "Calls that wait for the device", ("call", "line", "calls", "time"), rows


def _short(name: str) -> str:
    """The start of a kernel's long name."""
    return name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}..."
