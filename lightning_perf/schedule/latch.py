"""Where a moment stands in a unit, and a window that stays open from there on."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning_perf.time import Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from lightning_perf.moment import Moment

#: Fractions are quotients, so 3 of 10 steps are a little less than three times 0.1.
ROUNDING = 1e-9


def _fraction(moment: Moment) -> float:
    return (moment.fraction or 0.0) + ROUNDING


def _previous_fraction(moment: Moment) -> float:
    return (moment.previous_fraction or 0.0) + ROUNDING


_COUNTS = {
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.STEP: "step",
    TimeUnit.SECOND: "total_wct",
}
#: How far a moment is, by unit; and how far the moment before it was.
POSITION: dict[TimeUnit, Callable[[Moment], float]] = {
    TimeUnit.DURATION: _fraction,
    **{unit: attrgetter(f"timestamp.{name}") for unit, name in _COUNTS.items()},
}
PREVIOUS: dict[TimeUnit, Callable[[Moment], float]] = {
    TimeUnit.DURATION: _previous_fraction,
    **{unit: attrgetter(f"previous.{name}") for unit, name in _COUNTS.items()},
}


@dataclass(slots=True)
class _Opening:
    window: Hashable
    first_batch: int
    #: Where the window began, in the unit of its length; None until it has.
    origin: float | None = None


class Latch:
    """A window for each stage that something opens and that then lasts for a length.

    Args:
        lasting: The length.
    """

    def __init__(self, lasting: Time) -> None:
        self._position = POSITION[lasting.unit]
        self._length = lasting.value
        self._openings: dict[str, _Opening] = {}

    def open(self, window: Hashable, moment: Moment, delay: int = 0) -> None:
        """Open a window in the stage of a moment, some batches after it."""
        self._openings[moment.stage] = _Opening(window, moment.timestamp.batch + delay)
        self.observe(moment)

    def observe(self, moment: Moment) -> None:
        """Note where a window begins: once a batch."""
        opening = self._openings.get(moment.stage)
        if opening and opening.origin is None and moment.timestamp.batch >= opening.first_batch:
            opening.origin = self._position(moment)

    def window(self, moment: Moment) -> Hashable | None:
        """Tell the window that is open at a moment, or None."""
        opening = self._openings.get(moment.stage)
        if opening is None or moment.timestamp.batch < opening.first_batch:
            return None
        # Without an origin, the moment is one that is foreseen.
        if opening.origin is None or self._position(moment) - opening.origin < self._length:
            return opening.window
        return None

    def reset(self) -> None:
        """Forget every window."""
        self._openings.clear()
