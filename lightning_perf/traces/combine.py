"""Merges the traces of all ranks of one window into one file for Perfetto."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from lightning_perf.core.progress import STAGES
from lightning_perf.errors import DAMAGE, describe, shown
from lightning_perf.files import files_below, gzipped_whole, written_whole
from lightning_perf.traces.events import TraceError, microseconds, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from lightning_perf.traces.events import Event

#: Traces of ranks, as all profilers name them by default.
TRACE_NAME = re.compile(r"rank(\d{1,7})\.(.+?)(?:\.pt\.trace)?\.json(?:\.gz)?")
#: The first line of a merged file, by which its name is known to be free.
BEGINNING = b'{"displayTimeUnit":"ms","traceEvents":[\n'
#: Keys of a trace's head that are equal on all ranks of a window.
_SHARED = ("run_name", "stage", "batch", "world_size")
#: The most processes of a rank in the merged file.
_PROCESSES = 1000
#: The largest world size that is believed.
_MOST_RANKS = 10**6
#: Maximum windows that a message names.
_MOST_NAMED = 8


@dataclass(eq=False)
class RankTrace:
    """One rank's file, and its metadata."""

    rank: int
    path: Path
    #: The keys of the file other than its events.
    head: dict[str, Any] = field(default_factory=dict)
    #: Microseconds to which the file's times are relative.
    base: float = 0.0


def find_window(folder: Path, window: str | None = None) -> list[RankTrace]:
    """The traces of one window below a folder, by rank.

    If there are several, ``window`` names one: ``"12"`` for ``rank0.12.pt.trace.json.gz``, and
    ``"validate/12"`` for that of validation.
    """
    windows: dict[Path, dict[int, RankTrace]] = defaultdict(dict)
    for path in files_below(folder):
        if (name := TRACE_NAME.fullmatch(path.name)) is None:
            continue
        rank, found = int(name[1]), path.relative_to(folder).with_name(name[2])
        if window is None or f"/{found.as_posix()}".endswith(f"/{window}"):
            trace = windows[found].setdefault(rank, RankTrace(rank, path))
            if trace.path != path:
                raise TraceError(f"rank {rank} has two traces: {trace.path} and {path}")
    if not windows:
        which = "" if window is None else f" of the window {window}"
        raise TraceError(f"{folder} has no traces of ranks{which}, such as rank0.12.json.gz")
    of_training = [found for found in windows if found.parent.name not in STAGES]
    chosen = sorted(windows if window is None else of_training or windows)
    if len(chosen) > 1:
        more = ", ..." if len(chosen) > _MOST_NAMED else ""
        raise TraceError(
            f"{folder} has traces of {len(chosen)} windows or runs "
            f"({', '.join(map(str, chosen[:_MOST_NAMED]))}{more}). Name the folder of one run, and "
            f"the window, such as --window {chosen[0].name}"
        )
    return [trace for _, trace in sorted(windows[chosen[0]].items())]


def read_head(trace: RankTrace) -> None:
    """Read the metadata of a trace, some of which comes after its events."""
    with _damage_named(trace.path):
        deque(stream(trace.path, trace.head), maxlen=0)
        trace.head["world_size"] = int(trace.head.get("world_size", 0))
        if trace.head["world_size"] > _MOST_RANKS:
            raise ValueError(f"its world_size is {trace.head['world_size']:,}")
        head = trace.head.get("viztracer_metadata", trace.head)
        trace.base = microseconds(head.get("baseTimeNanoseconds", 0) / 1e3)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise `TraceError` with the file's name where its content is damaged or not as expected."""
    try:
        yield
    except TraceError:
        raise
    except DAMAGE as error:
        raise TraceError(f"{path} is damaged ({describe(error)})") from error


def check(traces: Sequence[RankTrace]) -> None:
    """Raise `TraceError` if the traces are not of one window of one run."""
    first, *others = traces
    for trace, key in product(others, _SHARED):
        expected, value = first.head.get(key), trace.head.get(key)
        if value != expected:
            raise TraceError(
                f"{first.path.name} and {trace.path.name} are not of one window: their {key} is "
                f"{shown(expected)} and {shown(value)}"
            )


def write(traces: Iterable[RankTrace], target: Path, base: float = 0.0) -> int:
    """Write one file with a process per rank, in bounded memory; return the number of events.

    Its times are relative to ``base``. It is gzipped if its name ends in ``.gz``. Raises
    `NotRegularError` if the target is something else than a file, such as a device.
    """
    count = 0
    with (gzipped_whole if target.suffix == ".gz" else written_whole)(target) as file:
        file.write(BEGINNING)
        for trace in traces:
            with _damage_named(trace.path):
                for event in _renamed(trace, trace.base - base):
                    text = json.dumps(event, separators=(",", ":"), allow_nan=False)
                    file.write((",\n" if count else "").encode() + text.encode())
                    count += 1
        file.write(b"\n]}\n")
    return count


def _renamed(trace: RankTrace, offset: float) -> Iterator[Event]:
    """A trace's events, ``offset`` later, with processes and ids that no other rank has."""
    processes: dict[object, int] = {}
    named: set[int] = set()
    for event in stream(trace.path, {}):
        if "pid" not in event:
            continue
        old, first = event["pid"], trace.rank * _PROCESSES + 1
        pid = event["pid"] = processes.setdefault(old, first + len(processes))
        if len(processes) > _PROCESSES:
            raise ValueError(f"it has more than {_PROCESSES:,} processes")
        if event.get("name") in ("process_name", "process_sort_index"):
            continue
        if pid not in named:
            named.add(pid)
            name = f"rank {trace.rank}" if pid == first else f"rank {trace.rank}: {old}"
            about = {"ph": "M", "pid": pid, "tid": 0}
            yield about | {"name": "process_name", "args": {"name": name}}
            yield about | {"name": "process_sort_index", "args": {"sort_index": pid}}
        for key, shift in (("ts", offset), ("dur", 0.0)):
            if key in event:
                event[key] = round(microseconds(event[key]) + shift, 3)
        for key in ("id", "bind_id"):
            if key in event:
                number = event[key]
                # Perfetto takes only numbers for flows.
                whole = isinstance(number, int)
                event[key] = (trace.rank << 32) + number if whole else f"{trace.rank}.{number}"
        yield event
