"""Events on the device's own line of time: read when it has come past them, never waited for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lightning_perf.errors import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

#: Devices that have events.
CLOCKED = {"cuda"}

Tag = TypeVar("Tag")


def clocked(trainer: Trainer) -> bool:
    """Whether the trainer's device has a clock of its own."""
    return trainer.strategy.root_device.type in CLOCKED


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
