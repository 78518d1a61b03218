"""Time in which a thread does not run: garbage collections, and waiting for a CPU."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: The stage of what `run_queue` returns.
QUEUE = "run queue"


def run_queue(stat: Path = Path("/proc/thread-self/schedstat")) -> dict[Action, Cost]:
    """Seconds that this thread ran, and that it was ready to run and waited for a CPU.

    Returns:
        Nothing where the kernel does not say.
    """
    try:
        with stat.open("rb", buffering=0) as file:  # no text: far faster
            ran, waited, times = map(int, file.read().split())
    except (OSError, ValueError):
        return {}
    return {
        Action(QUEUE, "", "running"): Cost(ran / 1e9, times),
        Action(QUEUE, "", "waiting"): Cost(waited / 1e9, times),
    }


class GcTimer:
    """Times collections while it is open.

    Args:
        running: Returns what the training thread does; a ReferenceError closes the timer.

    Example:
        >>> timer = GcTimer(lambda: Action("train", "forward", "training_step"))
        >>> timer.open()
        >>> _ = gc.collect()
        >>> timer.close()
        >>> [action.name for action in timer.costs]
        ['training_step']
    """

    def __init__(self, running: Callable[[], Action | None]) -> None:
        self._running = running
        self._costs: dict[Action, Cost] = {}
        self._began = 0.0
        self._called = self._collected

    @property
    def costs(self) -> Mapping[Action, Cost]:
        """Seconds and collections, with ``gc`` as stage and the category and name of the action."""
        return dict(self._costs)

    def open(self) -> None:
        """Start."""
        gc.callbacks.append(self._called)

    def close(self) -> None:
        """Stop; may be called more than once."""
        with suppress(ValueError):
            gc.callbacks.remove(self._called)

    def _collected(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = perf_counter()
            return
        spent = perf_counter() - self._began
        try:
            action = self._running()
        except ReferenceError:
            self.close()
            return
        if action is not None:
            key = Action("gc", action.category, action.name)
            seconds, calls = self._costs.get(key, (0.0, 0))
            self._costs[key] = Cost(seconds + spent, calls + 1)
