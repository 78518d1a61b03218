"""Times on a GPU, from CUDA events that are read late and never waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lightning_perf.background.waiting import wait_until
from lightning_perf.errors import describe, warn
from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable


#: Devices that have events.
CLOCKED = {"cuda"}

Tag = TypeVar("Tag")


def clocked(device: torch.device) -> bool:
    """Whether a device has a clock of its own."""
    return device.type in CLOCKED


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Events(Generic[Tag]):
    """Marks boundaries, and tells later how far they lay apart.

    The time between two events belongs to the later one's tag. Events show no idle time between
    them, and nothing of other streams. What is captured into a CUDA graph has none. An error of
    the device's is said once, and ends them.

    Args:
        loss: What the user does without if they fail.
        most: How many may be on their way.
        make: Makes an event with ``record``, ``query`` and ``elapsed_time`` (milliseconds).
        capturing: Tells whether the stream is being captured, when events may not be touched.
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
        # The tag, whether something connected precedes it, the event.
        self._waiting: deque[tuple[Tag, bool, Any]] = deque()
        self._last: Any = None
        self._connected = False
        #: Whether there was an error.
        self.failed = False

    @property
    def waiting(self) -> bool:
        """Whether some have not been read."""
        return bool(self._waiting)

    def cut(self) -> None:
        """What lies between the last event and the next one belongs to none."""
        self._connected = False

    def mark(self, tag: Tag) -> bool:
        """What came since the last mark is this.

        Returns:
            Whether the time of it will be told: not if nothing connected precedes it.
        """
        preceded, self._connected = self._connected, False
        try:
            if self.failed or self._capturing() or len(self._waiting) >= self._most:
                return False
            event = self._free.pop() if self._free else self._make()
            event.record()
        except Exception as error:
            self._give_up(error)
            return False
        self._waiting.append((tag, preceded, event))
        self._connected = True
        return preceded

    def read(self, due: Callable[[Tag], bool] = lambda _: True) -> list[tuple[Tag, float]]:
        """The tags that the device has come past, in order, with their seconds.

        Args:
            due: Whether to ask for a tag already.
        """
        found: list[tuple[Tag, float]] = []
        try:
            if not (self.failed or self._capturing()):
                self._read(due, found)
        except Exception as error:
            self._give_up(error)
        return found

    def _read(self, due: Callable[[Tag], bool], found: list[tuple[Tag, float]]) -> None:
        waiting = self._waiting
        while waiting and due(waiting[0][0]) and waiting[0][2].query():
            tag, preceded, event = waiting.popleft()
            if preceded:
                found.append((tag, self._last.elapsed_time(event) / 1e3))
            if self._last is not None:
                self._free.append(self._last)
            self._last = event

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        self._waiting.clear()
        warn(f"CUDA events failed ({describe(error)}): {self._loss}. Training goes on.")


#: Batches that pass before an event is asked whether it is done.
_LAG = 2
#: Events on their way at most: some forty batches.
_MOST_SEGMENTS_WAITING = 256
_SEGMENTS_LOST = "no timings/device from here on"
#: The mark that ends a batch.
_END = "other"


class DeviceSegmentTimer:
    """Records an event at each boundary and reads them when the device has come past them.

    Args:
        events: The boundaries: of each its batch, and what it ends.
    """

    def __init__(self, events: Events[tuple[int, Action]] | None = None) -> None:
        self._events = events or Events(_SEGMENTS_LOST, _MOST_SEGMENTS_WAITING)
        self._stage = ""
        self._batch = 0
        self._costs: dict[Action, Cost] = {}

    @property
    def costs(self) -> dict[Action, Cost]:
        """Seconds by what they went into, as far as the device is known to have come."""
        return dict(self._costs)

    def begin(self, stage: str) -> None:
        """Another stage begins: what lies between belongs to none."""
        self._stage = stage
        self._events.cut()

    def mark(self, category: str) -> None:
        """What came since the last mark was of this category."""
        self._events.mark((self._batch, Action(self._stage, category, "device")))

    def end_batch(self) -> None:
        """A batch has ended: mark it, and read the events of earlier ones."""
        self.mark(_END)
        self._batch += 1
        for (_, ended), spent in self._events.read(self._due):
            seconds, calls = self._costs.get(ended, Cost(0.0, 0))
            self._costs[ended] = Cost(seconds + spent, calls + 1)

    def _due(self, tag: tuple[int, Action]) -> bool:
        return tag[0] + _LAG < self._batch


#: Events on their way at most: more than a GPU takes launches ahead.
_MOST_BATCHES_WAITING = 2048
_BATCHES_LOST = "throughput and utilization are by the host's clock from here on"


@dataclass(slots=True)
class DeviceBatchTime:
    """One batch."""

    seconds: float = 0.0
    #: Whether the device has come to its end.
    known: bool = False
    #: Whether all of it was measured.
    whole: bool = True


class DeviceBatchTimer:
    """The batches of all stages, of which an inner one interrupts the outer one's.

    Args:
        events: The boundaries: of each its lap, and whether it ends it.
    """

    def __init__(self, events: Events[tuple[DeviceBatchTime, bool]] | None = None) -> None:
        self._events = events or Events(_BATCHES_LOST, _MOST_BATCHES_WAITING)
        self._open: list[DeviceBatchTime] = []
        #: Whether somebody wants to know.
        self.wanted = False

    @property
    def failed(self) -> bool:
        """Whether nothing will be known any more."""
        return self._events.failed

    def enter(self) -> None:
        """A stage begins."""
        self.pause()
        self._open.append(DeviceBatchTime())
        self.resume()

    def exit(self) -> None:
        """The present stage is over."""
        self._open.pop()
        self.resume()

    def pause(self) -> None:
        """What follows is not the batch's."""
        if self._open and self.wanted:
            self._mark(self._open[-1], False)

    def resume(self) -> None:
        """What follows is the batch's."""
        self._events.cut()
        if self._open and self.wanted:
            self._events.mark((self._open[-1], False))

    def end(self) -> DeviceBatchTime | None:
        """A batch has ended.

        Returns:
            What will be known of it; None if nothing will.
        """
        device_time, self._open[-1] = self._open[-1], DeviceBatchTime()
        if not self.wanted or self.failed:
            return None
        self._mark(device_time, True)
        return device_time

    def read(self) -> bool:
        """Find out how far the device has come: whether to the last event."""
        for (device_time, ends), seconds in self._events.read():
            device_time.seconds += seconds
            device_time.known |= ends
        return not self._events.waiting

    def wait(self, timeout: float) -> None:
        """Wait a bounded time for the device to come to the last event.

        Args:
            timeout: Seconds at most.
        """
        wait_until(self.read, timeout)

    def _mark(self, device_time: DeviceBatchTime, ends: bool) -> None:
        if not self._events.mark((device_time, ends)):
            device_time.whole = False
            device_time.known |= ends
