"""The events of a trace in Chrome's format, one at a time or as arrays, in bounded memory."""

from __future__ import annotations

import json
import re
import zlib
from array import array
from codecs import getincrementaldecoder
from dataclasses import dataclass
from enum import IntEnum
from gzip import BadGzipFile, GzipFile
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_perf.files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

Event = dict[str, Any]
#: Addresses of objects, removed so that all calls of a function have one name.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Rounding may make a call end this many nanoseconds after its caller: one for each of the two.
_SLACK = 2

#: Bytes per read.
_CHUNK = 1 << 20
#: Characters of the longest event; a file with a longer one is damaged or no trace.
_MOST_CHARACTERS = 1 << 22
#: A gzipped file may have this many bytes, and so many times its own. Of traces it is 10 to 30
#: times; of a file that was made to fill a memory or a disk, up to 1000.
_UNPACKED, _RATIO = 1 << 24, 200
#: The keys beside the events that are used; VizTracer's others hold all source files.
_HEAD = (
    "baseTimeNanoseconds", "batch", "host_name", "run_name", "stage", "viztracer_metadata",
    "world_size",
)  # fmt: skip
_GZIPPED = b"\x1f\x8b"
#: Times beyond this (microseconds) do not fit into 64 bits as nanoseconds.
_LATEST = 9e15
#: NaN and Infinity, which no other reader of JSON takes, become null.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_SPACE = re.compile(r"[\s,]*")
#: What a value is skipped by: quotes, brackets, and pairs of a backslash and a character.
_MARK = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class TraceError(ValueError):
    """A file that is not a trace; the message says why, in one line."""


class CutShort(TraceError):
    """A trace that ends early or is damaged, after the events that were read."""


def microseconds(value: float) -> float:
    """A time of a trace; raises `ValueError` for one that is not finite or too large."""
    if not abs(number := float(value)) <= _LATEST:
        raise ValueError(f"{number} is not a time")
    return number


def _nanoseconds(value: float) -> int:
    """A trace's microseconds as an integer: sums of floats would lose the three decimals."""
    return round(microseconds(value) * 1000)


def stream(path: Path, head: dict[str, Any]) -> Iterator[Event]:
    """The events of a trace, gzipped or not.

    ``head`` receives those of the file's other keys that are used: those before the events first,
    the rest at the end.
    Raises `TraceError` if the file is not a trace, `CutShort` if it ends early, and `OSError` if it
    cannot be read.
    """
    buffer = _Buffer(path)
    if buffer.peek("{"):
        buffer.skip()
        while not buffer.peek("}"):
            key = str(buffer.value())
            if not buffer.peek(":"):
                raise CutShort(f"{path} is damaged")
            buffer.skip()
            if key == "traceEvents" and buffer.peek("["):
                yield from buffer.elements()
            elif key in _HEAD:
                head[key] = buffer.value()
            else:
                buffer.skip_value()
    elif buffer.peek("["):
        yield from buffer.elements()
    else:
        raise TraceError(f"{path} is not a trace in Chrome's format")


def _texts(path: Path) -> Iterator[str]:
    """The text of a file in pieces; of a truncated gzipped file, all that can be read."""
    decode, size = getincrementaldecoder("utf-8")().decode, 0
    with opened(path) as raw:
        file = GzipFile(fileobj=raw) if raw.peek(2).startswith(_GZIPPED) else raw
        try:
            # Not more than one call of the decompressor: an error in the next one loses nothing.
            while content := file.read1(_CHUNK):
                size += len(content)
                if size > max(_UNPACKED, _RATIO * raw.tell()):
                    raise CutShort(f"{path} unpacks to more than {_RATIO} times its size")
                yield decode(content)
        except EOFError:  # the gzipped file is cut short, and with it the text
            return
        except (BadGzipFile, zlib.error, UnicodeDecodeError) as error:
            raise CutShort(f"{path} is damaged ({error})") from error


class _Buffer:
    """The part of a file that is being parsed."""

    def __init__(self, path: Path) -> None:
        self._path, self._texts = path, _texts(path)
        self._text, self._at = "", 0

    def peek(self, mark: str) -> bool:
        """Whether the next character, after spaces and commas, is this one."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None  # it matches nothing, too
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at] == mark
            self._more()

    def skip(self) -> None:
        """Skip one character."""
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        self.peek("")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                self._more()
                continue
            except (ValueError, RecursionError) as error:  # a number of too many digits
                raise CutShort(f"{self._path} is damaged ({error})") from error
            if end == len(self._text):  # a number may continue in the next piece
                self._more()
                continue
            self._at = end
            return value

    def skip_value(self) -> None:
        """Skip the next value, which may be of any size."""
        self.peek("")
        if self._text[self._at] not in '"[{':
            self.value()
            return
        depth, quoted = 0, False
        while True:
            for found in _MARK.finditer(self._text, self._at):
                self._at, mark = found.end(), found[0]
                if mark == '"':
                    quoted = not quoted
                elif not quoted and mark in "[]{}":
                    depth += 1 if mark in "[{" else -1
                if not (depth or quoted):
                    return
            # A backslash at the end belongs to the next character.
            self._at = max(self._at, len(self._text) - self._text.endswith("\\"))
            self._more()

    def elements(self) -> Iterator[Any]:
        """The elements of an array."""
        self.skip()
        while not self.peek("]"):
            yield self.value()
        self.skip()

    def _more(self) -> None:
        """Read as much again as there is: a long value is not parsed once per piece."""
        pieces = [self._text[self._at :]]
        if (length := len(pieces[0])) > _MOST_CHARACTERS:
            raise CutShort(f"{self._path} is damaged, or not a trace in Chrome's format")
        more = 0
        while more <= length:
            try:
                piece = next(self._texts, None)
            except CutShort:
                if not more:
                    raise
                piece = None
            if piece is None:
                break
            pieces.append(piece)
            more += len(piece)
        if not more:
            raise CutShort(f"{self._path} is cut short, or not a trace in Chrome's format")
        self._text, self._at = "".join(pieces), 0


# -- as arrays of numbers -------------------------------------------------------------------------

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
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.FRAME,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
}
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
    import numpy as np

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
    import numpy as np

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


def launched(calls: EventTable, device: EventTable) -> NDArray[Any]:
    """Nanoseconds on the device of what each call launched, without the calls within."""
    import numpy as np

    links, places = np.unique(np.append(0, calls.link), return_inverse=True)
    position = np.searchsorted(links[:-1], device.link)
    known = (links[position] == device.link) & (device.link > 0)
    took = (device.end - device.start)[known]
    sums: NDArray[Any] = np.bincount(position[known], took, len(links))[places[1:]]
    return sums
