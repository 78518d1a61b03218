"""Sums the times of a trace's operators, as ``torch.profiler.profile.key_averages()`` does."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_perf.traces.events import ADDRESS, SLACK, Event, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_PYTHON = "python_function"
_ON_CPU = {"cpu_op", "user_annotation", _PYTHON}
#: The ends of the categories of calls of a device's interface; Triton's kernels use the driver's.
_CALLS = ("_runtime", "_driver", "_context")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
#: The number of the CPU among a trace's device types.
_CPU = 0
#: Events that torch's table omits, too.
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
    #: Whether it is a Python frame, as recorded with stacks.
    python: bool = False
    calls: int = 0
    total: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    python: bool
    start: int
    end: int
    #: Nanoseconds of the kernels that it launched itself.
    kernels: int
    total: Counter[str] = field(default_factory=Counter)
    children: list[_Call] = field(default_factory=list)


def key_averages(events: Iterable[Event]) -> list[Row]:
    """Sum the calls of each name.

    Calls are nested by thread and time. Annotations that torch repeats on the device's timeline
    are skipped: their kernels are counted. Rows are sorted by self device time, then self CPU
    time, the largest first; Python frames come last.

    Example:
        >>> call = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
        >>> linear = call | {"name": "aten::linear", "ts": 10.0, "dur": 5.0}
        >>> addmm = call | {"name": "aten::addmm", "ts": 11.0, "dur": 3.5}
        >>> [(row.name, row.own["cpu"], row.total["cpu"]) for row in key_averages([linear, addmm])]
        [('aten::addmm', 3500, 3500), ('aten::linear', 1500, 5000)]
    """
    events = list(events)
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    rows: dict[tuple[str, str], Row] = {}
    launched: Counter[object] = Counter()
    for kernel in timed:
        if kernel.get("cat") in _ON_DEVICE:
            took = nanoseconds(kernel["dur"])
            launched[kernel.get("args", {}).get("External id")] += took
            row = rows.setdefault(("device", kernel["name"]), Row(kernel["name"]))
            row.calls += 1
            row.total["device"] += took
            row.own["device"] += took
    memory = _memory(events)
    for calls in _by_thread(timed, launched):
        _nest(calls)
        for call in reversed(_without_repeats(calls)):  # children first
            name = ADDRESS.sub("", call.name)
            _add(rows.setdefault(("cpu", name), Row(name, call.python)), call, memory(call))
    return sorted(rows.values(), key=lambda r: (r.python, -r.own["device"], -r.own["cpu"]))


def _by_thread(events: list[Event], launched: Counter[object]) -> Iterable[list[_Call]]:
    threads: dict[object, list[_Call]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat", ""), event["name"]
        if name in _UNSEEN or not (category in _ON_CPU or category.endswith(_CALLS)):
            continue
        start, identity = nanoseconds(event["ts"]), event.get("args", {}).get("External id")
        # Driver calls have the id of their operator, which already has the kernels.
        kernels = launched[identity] if identity and category in _ON_CPU else 0
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


def _add(row: Row, call: _Call, memory: dict[str, int]) -> None:
    within: Counter[str] = Counter()
    for child in call.children:
        within.update(child.total)
    device = call.kernels + within["device"]
    call.total.update(memory, cpu=call.end - call.start, device=device)
    row.calls += 1
    row.total.update(call.total)
    row.own.update(call.total)
    row.own.subtract(within)


def _memory(events: Iterable[Event]) -> Callable[[_Call], dict[str, int]]:
    """A function for the bytes allocated minus the bytes freed during a call."""
    changes = sorted(
        (nanoseconds(event["ts"]), event["args"]["Device Type"] == _CPU, event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and "Bytes" in event.get("args", {})
    )
    times = [time for time, _, _ in changes]
    sums = {
        name: list(accumulate((size * (cpu == on_cpu) for _, cpu, size in changes), initial=0))
        for name, on_cpu in (("cpu_memory", True), ("device_memory", False))
    }

    def during(call: _Call) -> dict[str, int]:
        first, last = bisect_left(times, call.start), bisect_right(times, call.end)
        return {name: each[last] - each[first] for name, each in sums.items()}

    return during


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
    columns = [["name", *map(_short, shown)]]
    if rows:
        columns.append(["calls", *(str(row.calls) for row in shown)])
    if all_cpu := sum(row.own["cpu"] for row in rows):
        columns.append(["self CPU %", *(f"{row.own['cpu'] / all_cpu:.1%}" for row in shown)])
    for key, title in _SUMS.items():
        for heading, sums in (
            (f"self {title}", [row.own[key] for row in rows]),
            (title, [row.total[key] for row in rows]),
        ):
            if any(sums):
                columns.append([heading, *(f"{each / 1e6:.3f}" for each in sums[:limit])])
    names, *numbers = columns
    padded = [
        [cell.ljust(max(map(len, names))) for cell in names],
        *([cell.rjust(max(map(len, column))) for cell in column] for column in numbers),
    ]
    texts = ["  ".join(line) for line in zip(*padded, strict=True)]
    texts.insert(1, "-" * len(texts[0]))
    if len(rows) > limit:
        texts.append(f"and {len(rows) - limit} more with less time")
    return "\n".join(texts)


def _short(row: Row) -> str:
    """The start of a long name; of a Python frame the end, which has the function."""
    if len(row.name) <= _WIDTH:
        return row.name
    return f"...{row.name[3 - _WIDTH :]}" if row.python else f"{row.name[: _WIDTH - 3]}..."
