"""Times on a GPU, from CUDA events that are read later, without synchronizing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.background import wait_until
from lightning_perf.errors import describe, let_through, warn
from lightning_perf.timing.totals import Action, Cost, Floor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    #: A batch, the segment of it that has ended, if it is one, and whether the batch has, too.
    _Tag = tuple["DeviceBatchTime", Action | None, bool]


#: Device types that support events.
CLOCKED = {"cuda"}


def clocked(device: torch.device) -> bool:
    """Whether times on a device can be measured with events."""
    return device.type in CLOCKED


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Events:
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
        self._pending: deque[tuple[_Tag, bool, Any]] = deque()
        self._last: Any = None
        self._connected = False
        #: Whether an error ended the recording.
        self.failed = False

    @property
    def waiting(self) -> int:
        """The number of pending events."""
        return len(self._pending)

    def cut(self) -> None:
        """Ignore the time between the last event and the next one."""
        self._connected = False

    def mark(self, tag: _Tag) -> bool:
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

    def read(self) -> list[tuple[_Tag, float]]:
        """The completed intervals, in order, as tag and seconds."""
        found: list[tuple[_Tag, float]] = []
        pending = self._pending
        try:
            if self.failed or self._capturing():
                return found
            while pending and pending[0][2].query():
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
        let_through(error)
        self.failed = True
        self._pending.clear()
        warn(f"CUDA events failed ({describe(error)}): {self._loss}. Training continues.")


#: Maximum of pending events: more than a GPU can queue. From the second number on, those of
#: completed batches are read after each batch.
_MOST_WAITING, _MANY_WAITING = 2048, 256
_LOST = "throughput and utilization now use host time, and timings/device is no longer reported"
#: The category of the last segment of a batch.
_END = "other"


@dataclass(slots=True)
class DeviceBatchTime:
    """The device time of one batch."""

    seconds: float = 0.0
    #: Whether the device has completed the batch.
    known: bool = False
    #: Whether the whole batch was measured.
    whole: bool = True
    #: The segments so far, until the device has completed the batch.
    segments: list[tuple[Action, float]] = field(default_factory=list)


class DeviceTimer:
    """Device times of batches, and of their segments by category.

    Nested validation pauses the enclosing training batch.
    """

    def __init__(self, events: Events | None = None) -> None:
        self._events = events or Events(_LOST, _MOST_WAITING)
        self._open: list[DeviceBatchTime] = []
        #: Whether device times are used.
        self.wanted = False
        #: The stage of the next segments.
        self.stage = ""
        #: Cost of each segment by action, of whole batches that the device has completed.
        self.costs: dict[Action, Cost] = {}
        #: The time of each batch, for some categories.
        self.floors: dict[str, Floor] = {}

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
            self._mark(None)

    def resume(self) -> None:
        """Include the following time in the batch again."""
        self._events.cut()
        if self._open and self.wanted:
            self._events.mark((self._open[-1], None, False))

    def mark(self, category: str) -> None:
        """End a segment of this category."""
        if self._open:
            self._mark(Action(self.stage, category, "device"))

    def end(self) -> DeviceBatchTime | None:
        """End a batch; return its device time, filled in later, or None if not measured."""
        device_time = self._open[-1]
        if not self.wanted or self.failed:
            return None
        self._mark(Action(self.stage, _END, "device"), ends=True)
        self._open[-1] = DeviceBatchTime()
        if self._events.waiting > _MANY_WAITING:
            self.read()
        return device_time

    def read(self) -> bool:
        """Read the completed events; return whether none is pending."""
        for (device_time, action, ends), seconds in self._events.read():
            device_time.seconds += seconds
            device_time.known |= ends
            if action is not None:
                device_time.segments.append((action, seconds))
            if ends and device_time.whole:
                self._add(device_time.segments)
                device_time.segments = []
        return not self._events.waiting

    def _add(self, segments: Sequence[tuple[Action, float]]) -> None:
        for action, seconds in segments:
            spent, calls = self.costs.get(action, Cost(0.0, 0))
            self.costs[action] = Cost(spent + seconds, calls + 1)
        for name, floor in self.floors.items():
            if parts := [seconds for action, seconds in segments if action.category == name]:
                floor.add(sum(parts))

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the device to complete all batches."""
        wait_until(self.read, timeout)

    def _mark(self, action: Action | None, *, ends: bool = False) -> None:
        device_time = self._open[-1]
        if not self._events.mark((device_time, action, ends)):
            device_time.whole = False
            device_time.known |= ends
