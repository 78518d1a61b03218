"""The device's own time between the boundaries of a step, without ever waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.errors import describe, warn
from lightning_perf.timings import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable

#: Batches that pass before an event is asked whether it is done.
_LAG = 2
#: Events on their way at most: some forty batches.
_MOST_WAITING = 256
#: The mark that ends a batch.
_END = "other"


def _make_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Records an event at each boundary and reads them when the device has come past them.

    The time between two events belongs to what the later one ends. Events show no idle time
    between them, and nothing of other streams. What is captured into a CUDA graph has none.

    Args:
        make_event: Makes an event with ``record``, ``query`` and ``elapsed_time`` (milliseconds).
        capturing: Tells whether the stream is being captured, when events may not be touched.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = _make_event,
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._make, self._capturing = make_event, capturing
        self._stage = ""
        self._batch = 0
        self._free: list[Any] = []
        # The batch, what the event ends (None where nothing connected precedes it), the event.
        self._waiting: deque[tuple[int, Action | None, Any]] = deque()
        self._last: Any = None
        self._connected = False
        self._costs: dict[Action, Cost] = {}
        self._failed = False

    @property
    def costs(self) -> dict[Action, Cost]:
        """Seconds by what they went into, as far as the device is known to have come."""
        return dict(self._costs)

    def begin(self, stage: str) -> None:
        """Another stage begins: what lies between belongs to none."""
        self._stage, self._connected = stage, False

    def mark(self, category: str) -> None:
        """What came since the last mark was of this category."""
        if self._failed:
            return
        try:
            self._mark(category)
        except Exception as error:
            self._give_up(error)

    def end_batch(self) -> None:
        """A batch has ended: mark it, and read the events of earlier ones."""
        self.mark(_END)
        if self._failed:
            return
        self._batch += 1
        try:
            if not self._capturing():
                self._read()
        except Exception as error:
            self._give_up(error)

    def _mark(self, category: str) -> None:
        if self._capturing() or len(self._waiting) >= _MOST_WAITING:
            self._connected = False
            return
        event = self._free.pop() if self._free else self._make()
        event.record()
        ended = Action(self._stage, category, "device") if self._connected else None
        self._waiting.append((self._batch, ended, event))
        self._connected = True

    def _read(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] + _LAG < self._batch and waiting[0][2].query():
            _, ended, event = waiting.popleft()
            if ended is not None:
                seconds, calls = self._costs.get(ended, Cost(0.0, 0))
                seconds += self._last.elapsed_time(event) / 1e3
                self._costs[ended] = Cost(seconds, calls + 1)
            if self._last is not None:
                self._free.append(self._last)
            self._last = event

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self._waiting.clear()
        warn(
            f"CUDA events failed ({describe(error)}): no timings/device from here on. Training "
            "goes on."
        )
