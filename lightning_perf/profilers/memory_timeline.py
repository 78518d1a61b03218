"""How much memory was in use, and for what, over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_perf.profilers.chrome_trace import Event

#: Torch's, in the order of its columns.
CATEGORIES = (
    "Parameter",
    "Optimizer state",
    "Input",
    "Temporary",
    "Activation",
    "Gradient",
    "Autograd detail",
    "Unknown",
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory in use, from each time to the next."""

    #: Microseconds, ascending.
    times: Sequence[float]
    #: Bytes at each time, by category.
    sizes: Sequence[Sequence[int]]
    categories: Sequence[str]

    @property
    def peak(self) -> int:
        """The index of the time at which the most memory was in use."""
        return max(range(len(self.times)), key=lambda index: sum(self.sizes[index]))


def of_points(times: Sequence[int], sizes: Sequence[Sequence[int]]) -> Timeline:
    """A timeline of what ``export_memory_timeline`` of torch.profiler writes.

    Args:
        times: Microseconds, ascending; what was there before is at the first of them.
        sizes: Bytes by category, after a zero.

    Example:
        >>> parameters = [0, 512, 0, 0, 0, 0, 0, 0, 0]
        >>> timeline = of_points([10, 20], [parameters, [0, 512, 0, 0, 0, 64, 0, 0, 0]])
        >>> dict(zip(timeline.categories, timeline.sizes[timeline.peak]))["Activation"]
        64
    """
    # What was there before is a guess of torch's, from which more may be freed.
    return Timeline(times, [[max(size, 0) for size in row[1:]] for row in sizes], CATEGORIES)


def of_events(events: Iterable[Event], device: str) -> Timeline:
    """A timeline of the allocations in a trace, which do not tell what they are for.

    Args:
        events: Of a trace that was recorded with ``profile_memory=True``.
        device: As torch names it, such as ``cpu`` or ``cuda:0``.
    """
    kind, _, number = device.partition(":")
    points = sorted(
        (event["ts"], max(event["args"]["Total Allocated"], 0))
        for event in events
        if event.get("name") == "[memory]"
        and (event["args"]["Device Type"] == 0) == (kind == "cpu")
        and (kind == "cpu" or event["args"]["Device Id"] == int(number or 0))
    )
    return Timeline([time for time, _ in points], [[size] for _, size in points], ["Allocated"])
