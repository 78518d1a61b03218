"""The events of a torch.profiler trace as arrays of numbers, read in bounded memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_perf.traces.stream import ADDRESS, CutShort, TraceError, nanoseconds, stream

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from lightning_perf.traces.stream import Event

#: The largest number of a column.
_LARGEST = (1 << 63) - 1
#: The name of all steps' annotations.
STEP = "ProfilerStep"


class Kind(IntEnum):
    """Kinds of events. Those from ``KERNEL`` on are of a device."""

    OPERATOR = 0
    ANNOTATION = 1
    #: Of CUDA's interface.
    CALL = 2
    #: A Python function.
    FRAME = 3
    KERNEL = 4
    COPY = 5


_KINDS = {
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.CALL,
    "cuda_driver": Kind.CALL,
    "python_function": Kind.FRAME,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
}


class Table(NamedTuple):
    """One row per event."""

    #: Nanoseconds.
    start: NDArray[Any]
    end: NDArray[Any]
    #: Position in ``Events.names``.
    name: NDArray[Any]
    #: A number per thread, or per device.
    place: NDArray[Any]
    #: The operator's number, which its kernels have too; 0 without one.
    link: NDArray[Any]

    def at(self, rows: NDArray[Any]) -> Table:
        """Some of the rows."""
        return Table(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True)
class Events:
    """What was read of a trace."""

    host: Table
    device: Table
    names: list[tuple[Kind, str]]
    #: All events of the file, also those of other kinds.
    count: int
    #: Why some are not here.
    notes: list[str]


def read(path: Path, most: int) -> Events:
    """Read a trace of torch.profiler; of one that is cut short, the events that are there.

    At most ``most`` events of the host, and of the devices, are kept.
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
    for columns, what in ((reader.host, "host"), (reader.device, "devices")):
        if len(columns[0]) == most:
            notes.append(f"only the first {most:,} events of the {what} are used")
    host, device = (
        Table(*(np.frombuffer(each, dtype=each.typecode) for each in columns))
        for columns in (reader.host, reader.device)
    )
    return Events(host, device, list(reader.names), reader.count, notes)


class _Reader:
    def __init__(self, most: int) -> None:
        self._most, self.count = most, 0
        self.host, self.device = ([array(code) for code in "qqiiq"] for _ in range(2))
        self.names: dict[tuple[Kind, str], int] = {}
        self._places: dict[object, int] = {}

    def add(self, event: Event) -> None:
        """Add an event, unless it is of another kind."""
        self.count += 1
        try:
            kind = _KINDS[event["cat"]]
            columns = self.device if kind >= Kind.KERNEL else self.host
            if event["ph"] != "X" or len(columns[0]) == self._most:
                return
            name, start = str(event["name"]), nanoseconds(event["ts"])
            if kind is Kind.FRAME:
                name = ADDRESS.sub("", name)
            elif name.startswith(STEP):
                name = STEP
            place = event["pid"] if kind >= Kind.KERNEL else (event["pid"], event["tid"])
            end = start + nanoseconds(event["dur"])
            identity = int(event.get("args", {}).get("External id", 0))
            if max(abs(start), abs(end), abs(identity)) > _LARGEST:
                return
            row = (
                start,
                end,
                self.names.setdefault((kind, name), len(self.names)),
                self._places.setdefault(place, len(self._places)),
                identity,
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            return  # other tools' events, such as those of VizTracer
        for column, value in zip(columns, row, strict=True):
            column.append(value)
