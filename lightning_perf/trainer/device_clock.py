"""The device's own time between the boundaries of a step, without ever waiting for the device."""

from __future__ import annotations

from lightning_perf.timings import Action, Cost
from lightning_perf.trainer.events import Events

#: Batches that pass before an event is asked whether it is done.
_LAG = 2
#: Events on their way at most: some forty batches.
_MOST_WAITING = 256
_LOSS = "no timings/device from here on"
#: The mark that ends a batch.
_END = "other"


class DeviceClock:
    """Records an event at each boundary and reads them when the device has come past them.

    Args:
        events: The boundaries: of each its batch, and what it ends.
    """

    def __init__(self, events: Events[tuple[int, Action]] | None = None) -> None:
        self._events = events or Events(_LOSS, _MOST_WAITING)
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
