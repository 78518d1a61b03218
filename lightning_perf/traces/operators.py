"""Sums the times of a trace's operators, as ``torch.profiler.profile.key_averages()`` does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_perf.traces.events import Kind, launched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lightning_perf.traces.events import TraceEvents

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
    import numpy as np

    calls, device, kinds = events.host, events.device, [kind for kind, _ in events.names]
    rows = [Row(name, kind) for kind, name in events.names]
    shown = np.array([name not in _UNSEEN for _, name in events.names])[calls.name]
    # Driver calls have the id of their operator, which already has the kernels.
    kernels = launched(calls, device) * (np.array(kinds)[calls.name] != Kind.CALL)

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


def _memory(events: TraceEvents) -> dict[str, NDArray[Any]]:
    """The bytes allocated minus the bytes freed during each call."""
    import numpy as np

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
                columns.append([heading, *(f"{total / 1e6:.3f}" for total in sums[:limit])])
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
    return (
        f"...{row.name[3 - _WIDTH :]}" if row.kind is Kind.FRAME else f"{row.name[: _WIDTH - 3]}..."
    )
