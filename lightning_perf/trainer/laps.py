"""How long batches took on the device, which is known only when it has come to their end.

The host runs ahead of a GPU, by hundreds of launches: by its clock the first batches take no time,
and a window that is short makes training look faster than the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_perf.trainer.events import Events
from lightning_perf.trainer.waiting import wait_until

#: Events on their way at most: more than a GPU takes launches ahead.
_MOST_WAITING = 2048
_LOSS = "throughput and utilization are by the host's clock from here on"


@dataclass(slots=True)
class Lap:
    """One batch."""

    seconds: float = 0.0
    #: Whether the device has come to its end.
    known: bool = False
    #: Whether all of it was measured.
    whole: bool = True


class Laps:
    """The batches of all stages, of which an inner one interrupts the outer one's.

    Args:
        events: The boundaries: of each its lap, and whether it ends it.
    """

    def __init__(self, events: Events[tuple[Lap, bool]] | None = None) -> None:
        self._events = events or Events(_LOSS, _MOST_WAITING)
        self._open: list[Lap] = []
        #: Whether somebody wants to know.
        self.wanted = False

    @property
    def failed(self) -> bool:
        """Whether nothing will be known any more."""
        return self._events.failed

    def enter(self) -> None:
        """A stage begins."""
        self.pause()
        self._open.append(Lap())
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

    def end(self) -> Lap | None:
        """A batch has ended.

        Returns:
            What will be known of it; None if nothing will.
        """
        lap, self._open[-1] = self._open[-1], Lap()
        if not self.wanted or self.failed:
            return None
        self._mark(lap, True)
        return lap

    def read(self) -> bool:
        """Find out how far the device has come: whether to the last event."""
        for (lap, ends), seconds in self._events.read():
            lap.seconds += seconds
            lap.known |= ends
        return not self._events.waiting

    def wait(self, timeout: float) -> None:
        """Wait a bounded time for the device to come to the last event.

        Args:
            timeout: Seconds at most.
        """
        wait_until(self.read, timeout)

    def _mark(self, lap: Lap, ends: bool) -> None:
        if not self._events.mark((lap, ends)):
            lap.whole = False
            lap.known |= ends
