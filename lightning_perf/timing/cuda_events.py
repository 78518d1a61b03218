"""Times on a GPU, from CUDA events that are read later, without synchronizing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lightning_perf.errors import describe, warn
from lightning_perf.timing.totals import Action, Cost, Floor

if TYPE_CHECKING:
    from collections.abc import Callable


#: Device types that support events.
CLOCKED = {"cuda"}

Tag = TypeVar("Tag")


def clocked(device: torch.device) -> bool:
    """Whether times on a device can be measured with events."""
    return device.type in CLOCKED


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Events(Generic[Tag]):
    """Records events at boundaries and later returns the time between adjacent ones.

    The time between two events belongs to the tag of the later one. It includes idle time, but no
    other streams. Work captured into a CUDA graph has no events. After an error of the device, no
    more events are recorded, with one warning.

    ``loss`` says in the warning what is lost, and ``most`` is the number of pending events.
    """

    def __init__(
        self,
        loss: str,
        most: int,
        make: Callable[[], Any] = _make_event,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._loss, self._most = loss, most
        self._make, self._capturing = make, capturing
        self._free: list[Any] = []
        # Tag, whether the previous event is the start of this interval, and the event.
        self._pending: deque[tuple[Tag, bool, Any]] = deque()
        self._last: Any = None
        self._connected = False
        #: Whether an error ended the recording.
        self.failed = False

    @property
    def waiting(self) -> bool:
        """Whether events are pending."""
        return bool(self._pending)

    def cut(self) -> None:
        """Ignore the time between the last event and the next one."""
        self._connected = False

    def mark(self, tag: Tag) -> bool:
        """End an interval; return whether its time will be known: not after `cut` or a failure."""
        preceded, self._connected = self._connected, False
        try:
            if self.failed or self._capturing() or len(self._pending) >= self._most:
                return False
            event = self._free.pop() if self._free else self._make()
            event.record()
        except Exception as error:
            self._fail(error)
            return False
        self._pending.append((tag, preceded, event))
        self._connected = True
        return preceded

    def read(self, due: Callable[[Tag], bool] = lambda _: True) -> list[tuple[Tag, float]]:
        """The completed intervals whose tag is due, in order, as tag and seconds."""
        found: list[tuple[Tag, float]] = []
        pending = self._pending
        try:
            if self.failed or self._capturing():
                return found
            while pending and due(pending[0][0]) and pending[0][2].query():
                tag, preceded, event = pending.popleft()
                if preceded:
                    found.append((tag, self._last.elapsed_time(event) / 1e3))
                if self._last is not None:
                    self._free.append(self._last)
                self._last = event
        except Exception as error:
            self._fail(error)
        return found

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self._pending.clear()
        warn(f"CUDA events failed ({describe(error)}): {self._loss}. Training continues.")


#: Maximum of pending events: more than a GPU can queue.
_MOST_WAITING = 2048
#: Batches to wait before an event is queried.
_LAG = 2
_SEGMENTS_LOST = "timings/device is no longer reported"
#: The category of the last segment of a batch.
_END = "other"


class DeviceSegmentTimer:
    """Measures the segments of a batch on the device."""

    def __init__(self, events: Events[tuple[int, Action]] | None = None) -> None:
        self._events = events or Events(_SEGMENTS_LOST, _MOST_WAITING)
        self._stage = ""
        self._batch = 0
        self._costs: dict[Action, Cost] = {}
        # The segments that the device has completed of a batch that it has not.
        self._begun: list[tuple[Action, float]] = []
        #: The minimum time of each batch, for some categories.
        self.floors: dict[str, Floor] = {}

    @property
    def costs(self) -> dict[Action, Cost]:
        """Cost by action, for the batches that the device has completed."""
        return dict(self._costs)

    def begin(self, stage: str) -> None:
        """Begin a stage. The time since the last event is ignored."""
        self._stage = stage
        self._events.cut()

    def mark(self, category: str) -> None:
        """End a segment of this category."""
        self._events.mark((self._batch, Action(self._stage, category, "device")))

    def end_batch(self) -> None:
        """End a batch and read the events of earlier ones."""
        self.mark(_END)
        self._batch += 1
        self.read(self._batch - _LAG)

    def read(self, before: float = inf) -> bool:
        """Read the completed events of batches before one; return whether none is pending."""
        for (_, ended), spent in self._events.read(lambda tag: tag[0] < before):
            self._begun.append((ended, spent))
            if ended.category == _END:
                self._add_batch()
        return not self._events.waiting

    def _add_batch(self) -> None:
        for ended, spent in self._begun:
            seconds, calls = self._costs.get(ended, Cost(0.0, 0))
            self._costs[ended] = Cost(seconds + spent, calls + 1)
            if ended.category in self.floors:
                self.floors[ended.category].add(spent)
        self._begun.clear()


_BATCHES_LOST = "throughput and utilization now use host time"


@dataclass(slots=True)
class DeviceBatchTime:
    """The device time of one batch."""

    seconds: float = 0.0
    #: Whether the device has completed the batch.
    known: bool = False
    #: Whether the whole batch was measured.
    whole: bool = True


class DeviceBatchTimer:
    """Device times of batches. Nested validation pauses the enclosing training batch."""

    def __init__(self, events: Events[tuple[DeviceBatchTime, bool]] | None = None) -> None:
        self._events = events or Events(_BATCHES_LOST, _MOST_WAITING)
        self._open: list[DeviceBatchTime] = []
        #: Whether device times are used.
        self.wanted = False

    @property
    def failed(self) -> bool:
        """Whether device times are no longer available."""
        return self._events.failed

    def enter(self) -> None:
        """Begin a stage."""
        self.pause()
        self._open.append(DeviceBatchTime())
        self.resume()

    def exit(self) -> None:
        """End the current stage."""
        self._open.pop()
        self.resume()

    def pause(self) -> None:
        """Exclude the following time from the batch."""
        if self._open and self.wanted:
            self._mark(self._open[-1], False)

    def resume(self) -> None:
        """Include the following time in the batch again."""
        self._events.cut()
        if self._open and self.wanted:
            self._events.mark((self._open[-1], False))

    def end(self) -> DeviceBatchTime | None:
        """End a batch; return its device time, filled in later, or None if not measured."""
        device_time, self._open[-1] = self._open[-1], DeviceBatchTime()
        if not self.wanted or self.failed:
            return None
        self._mark(device_time, True)
        return device_time

    def read(self) -> bool:
        """Read the completed events; return whether none is pending."""
        for (device_time, ends), seconds in self._events.read():
            device_time.seconds += seconds
            device_time.known |= ends
        return not self._events.waiting

    def _mark(self, device_time: DeviceBatchTime, ends: bool) -> None:
        if not self._events.mark((device_time, ends)):
            device_time.whole = False
            device_time.known |= ends
