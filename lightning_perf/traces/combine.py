"""Merges the traces of all ranks of one window into one file for Perfetto."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_perf.core.progress import STAGES
from lightning_perf.errors import DAMAGE, describe, shown
from lightning_perf.files import files_below, gzipped_whole, written_whole
from lightning_perf.traces.events import TraceError, microseconds, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lightning_perf.traces.events import Event

#: Traces of ranks, as all profilers name them by default.
TRACE_NAME = re.compile(r"rank(\d{1,7})\.(.+\.json)(?:\.gz)?")
#: The first line of a merged file, by which its name is known to be free.
BEGINNING = b'{"displayTimeUnit":"ms","traceEvents":[\n'
#: Keys of a trace's head that are equal on all ranks of a window.
_SHARED = ("run_name", "stage", "batch", "world_size")
#: Collectives that no rank leaves before the last rank has entered: names in gloo, NCCL's
#: annotations and NCCL's kernels.
_COLLECTIVE = re.compile(
    r"(?:gloo|nccl):(?:_?all_?reduce|all_?gather|_?reduce_scatter|all_?to_?all|barrier)\w*"
    r"|nccl(?:Dev)?Kernel_?(?:AllReduce|AllGather|ReduceScatter|SendRecv)\w*",
    re.IGNORECASE,
)
_KERNELS, _DEVICE = ("kernel", "gpu_user_annotation"), "device "
#: The most processes of a rank in the merged file.
_PROCESSES = 1000
#: The largest world size that is believed.
_MOST_RANKS = 10**7
#: The most characters in the names of a rank's collectives, each of which counts as some.
_MOST_MARKED, _MARKED = 1 << 22, 16
#: How often clocks are corrected, because the rank that arrives last depends on them.
_ROUNDS = 5
#: Maximum windows that a message names.
_MOST_NAMED = 8


class Marker(NamedTuple):
    """A collective of one rank, by that rank's clock in microseconds."""

    start: float
    end: float


@dataclass(eq=False)
class RankTrace:
    """One rank's file, and the data that is read before it is copied."""

    rank: int
    path: Path
    #: The keys of the file other than its events.
    head: dict[str, Any] = field(default_factory=dict)
    #: By name and process group, in the order of the file's clock.
    collectives: dict[str, list[Marker]] = field(default_factory=dict)
    #: Microseconds to which the file's times are relative.
    base: float = 0.0
    #: Added to the times of this rank, and the part of it that corrects its clock.
    shift: float = 0.0
    correction: float = 0.0
    #: The remaining error of the clock, in microseconds; None if the ranks share no collective.
    error: float | None = None


class Collective(NamedTuple):
    """One collective on all ranks that took part."""

    name: str
    #: Its number among the collectives of its name in the window.
    number: int
    #: The rank that arrived last, and microseconds that the others waited, by rank.
    last_rank: int
    waited_us: Mapping[int, float]


def _is_named(window: str, place: Path, rest: str) -> bool:
    names = (place / rest, place / rest.partition(".")[0])
    return any(f"/{name.as_posix()}".endswith(f"/{window}") for name in names)


def find_window(folder: Path, window: str | None = None) -> list[RankTrace]:
    """The traces of one window below a folder, by rank.

    If there are several, ``window`` names one: ``"12"`` for ``rank0.12.pt.trace.json.gz``, and
    ``"validate/12"`` for that of validation.
    """
    windows: dict[tuple[Path, str], list[RankTrace]] = defaultdict(list)
    for path in sorted(files_below(folder)):
        name = TRACE_NAME.fullmatch(path.name)
        place = path.relative_to(folder).parent
        if name and (window is None or _is_named(window, place, name[2])):
            windows[place, name[2]].append(RankTrace(int(name[1]), path))
    if window is not None:
        of_training = {key: ranks for key, ranks in windows.items() if key[0].name not in STAGES}
        windows = of_training or windows
    if not windows:
        which = "" if window is None else f" of the window {window}"
        raise TraceError(f"{folder} has no traces of ranks{which}, such as rank0.12.json.gz")
    if len(windows) > 1:
        names = [str(place / rest) for place, rest in windows]
        shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
        raise TraceError(
            f"{folder} has traces of {len(windows)} windows or runs ({shown}). Name the folder of "
            f"one run, and the window, such as --window {next(iter(windows))[1].partition('.')[0]}"
        )
    (traces,) = windows.values()
    traces.sort(key=lambda trace: trace.rank)
    for one, other in pairwise(traces):
        if one.rank == other.rank:
            raise TraceError(f"rank {one.rank} has two traces: {one.path} and {other.path}")
    return traces


def scan(trace: RankTrace) -> None:
    """Read the head and the collectives of a trace."""
    collectives: dict[str, list[Marker]] = defaultdict(list)
    room = _MOST_MARKED
    with _damage_named(trace.path):
        for event in stream(trace.path, trace.head):
            name = event.get("name")
            if event.get("ph") != "X" or not isinstance(name, str) or "dur" not in event:
                continue
            start = microseconds(event["ts"])
            end = start + microseconds(event["dur"])
            if _COLLECTIVE.fullmatch(name):
                name = _shared_name(name, event)
                room -= _MARKED if name in collectives else _MARKED + len(name)
                if room > 0:
                    collectives[name].append(Marker(start, end))
        trace.head["world_size"] = int(trace.head.get("world_size", 0))
        if trace.head["world_size"] > _MOST_RANKS:
            raise ValueError(f"its world_size is {trace.head['world_size']:,}")
        head = trace.head.get("viztracer_metadata", trace.head)
        trace.base = microseconds(head.get("baseTimeNanoseconds", 0) / 1e3)
    # NCCL's annotations on the host end when the kernel is launched: the kernels are more exact.
    exact = {name: markers for name, markers in collectives.items() if name.startswith(_DEVICE)}
    trace.collectives = {name: sorted(markers) for name, markers in (exact or collectives).items()}


def _shared_name(name: str, event: Event) -> str:
    """The name of a collective with its process group, after ``_DEVICE`` if it is a kernel."""
    arguments = event.get("args", {})
    group = arguments.get("Process Group Ranks") or arguments.get("Process Group Name", "")
    on_device = _DEVICE if event.get("cat") in _KERNELS else ""
    return f"{on_device}{name} {group}".strip()


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
    first = traces[0]
    for trace in traces[1:]:
        for key in _SHARED:
            expected, value = first.head.get(key), trace.head.get(key)
            if value != expected:
                raise TraceError(
                    f"{first.path.name} and {trace.path.name} are not of one window: their {key} "
                    f"is {shown(expected)} and {shown(value)}"
                )


def align(traces: Sequence[RankTrace]) -> None:
    """Set each rank's shift to the first rank's clock, from the collectives that they share.

    No rank leaves a collective before the last rank has entered it. A rank that then waits for a
    CPU leaves it late, but not every time: its shortest delay after the last rank's start is about
    that of the other ranks. A clock that agrees already is left alone.
    """
    first = traces[0]
    first.error = 0.0
    for trace in traces[1:]:
        trace.shift = trace.base - first.base
    shared = [match.markers for match in _matched([trace.collectives for trace in traces])]
    offsets = _offsets(traces, shared)
    halves = [_offsets(traces, shared[part::2]) for part in (0, 1)]
    for rank, trace in enumerate(traces[1:], start=1):
        if rank not in offsets:
            continue
        offset = offsets[rank]
        # The dependence on the choice of collectives.
        spread = max((abs(offset - half[rank]) for half in halves if rank in half), default=0.0)
        host = first.head.get("host_name")
        same_clock = host is not None and host == trace.head.get("host_name")
        if same_clock:
            trace.error = abs(offset)
        elif abs(offset) <= 3 * spread:
            trace.error = max(abs(offset), spread)
        else:
            trace.correction = -offset
            trace.shift += trace.correction
            trace.error = spread


class _Match(NamedTuple):
    """A collective of several ranks."""

    name: str
    #: Its number among those of its name.
    number: int
    #: By the index of the rank.
    markers: dict[int, Marker]


def _matched(marked: Sequence[Mapping[str, Sequence[Marker]]]) -> Iterator[_Match]:
    """Match what the ranks have by name and order."""
    for name in sorted({name for own in marked for name in own}):
        ranks = [rank for rank, own in enumerate(marked) if name in own]
        if len(ranks) > 1:
            by_rank = (marked[rank][name] for rank in ranks)
            for number, markers in enumerate(zip(*by_rank, strict=False)):
                yield _Match(name, number, dict(zip(ranks, markers, strict=True)))


def _offsets(
    traces: Sequence[RankTrace], shared: Sequence[Mapping[int, Marker]]
) -> dict[int, float]:
    """The offset of each rank's shifted clock from the first rank's."""
    apart = defaultdict(list)
    for markers in shared:
        if 0 in markers:
            for rank, marker in markers.items():
                apart[rank].append(marker.end + traces[rank].shift - markers[0].end)
    ahead = {rank: median(distances) for rank, distances in apart.items()}
    known = [markers for markers in shared if markers.keys() <= ahead.keys()]
    for _ in range(_ROUNDS):
        delays = dict.fromkeys(ahead, inf)
        for markers in known:
            last = max(m.start + traces[rank].shift - ahead[rank] for rank, m in markers.items())
            for rank, m in markers.items():
                delay = m.end + traces[rank].shift - ahead[rank] - last
                delays[rank] = min(delays[rank], delay)
        for rank, delay in delays.items():
            ahead[rank] += delay - delays[0]
    return ahead


def collectives(traces: Sequence[RankTrace]) -> list[Collective]:
    """The collectives of all ranks, the longest waiting first."""
    waits = []
    for name, number, markers in _matched([trace.collectives for trace in traces]):
        starts = {traces[i].rank: m.start + traces[i].shift for i, m in markers.items()}
        last = max(starts, key=starts.__getitem__)
        waited = {rank: starts[last] - start for rank, start in starts.items()}
        waits.append(Collective(name, number, last, waited))
    return sorted(waits, key=lambda wait: -max(wait.waited_us.values()))


def write(traces: Iterable[RankTrace], target: Path) -> int:
    """Write one file with a process per rank, in bounded memory; return the number of events.

    It is gzipped if its name ends in ``.gz``. Raises `NotRegularError` if the target is something
    else than a file, such as a device.
    """
    count = 0
    with (gzipped_whole if target.suffix == ".gz" else written_whole)(target) as file:
        file.write(BEGINNING)
        for trace in traces:
            with _damage_named(trace.path):
                for event in _renamed(trace):
                    text = json.dumps(event, separators=(",", ":"), allow_nan=False)
                    file.write((",\n" if count else "").encode() + text.encode())
                    count += 1
        file.write(b"\n]}\n")
    return count


def _renamed(trace: RankTrace) -> Iterator[Event]:
    """A trace's events by the shared clock, with processes and ids that no other rank has."""
    processes: dict[object, int] = {}
    named: set[int] = set()
    for event in stream(trace.path, trace.head):
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
        if "ts" in event:
            event["ts"] = round(microseconds(event["ts"]) + trace.shift, 3)
        for key in ("id", "bind_id"):
            if key in event:
                number = event[key]
                # Perfetto takes only numbers for flows.
                whole = isinstance(number, int)
                event[key] = (trace.rank << 32) + number if whole else f"{trace.rank}.{number}"
        yield event
