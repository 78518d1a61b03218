"""Timings that are checked against the tests' own clocks."""

from __future__ import annotations

from typing import Any

from lightning_perf import Timings
from lightning_perf.timing import clock


class Stopped(Timings):
    """Reads the clock before and after the first and the last snapshot."""

    began: tuple[float, float] | None = None
    ended = (0.0, 0.0)
    _before = 0.0

    def prepare(self, context: Any) -> None:
        super().prepare(context)
        enter = context.windows.enter

        def timed(*args: Any) -> None:
            before = clock.perf_counter()
            enter(*args)
            self.began = self.began or (before, clock.perf_counter())

        context.windows.enter = timed
        interrupt = context.windows.interrupt

        def interrupted() -> None:
            before = clock.perf_counter()
            interrupt()
            self.ended = before, clock.perf_counter()

        context.windows.interrupt = interrupted

    def window_due(self, context: Any, at_end: bool) -> bool:
        self._before = clock.perf_counter()
        return super().window_due(context, at_end)

    def on_window(self, window: Any) -> Any:
        self.ended = self._before, clock.perf_counter()
        return super().on_window(window)

    @property
    def wall(self) -> tuple[float, float]:
        """Bounds for the counted seconds, with a tolerance of 1 %."""
        assert self.began is not None
        (b0, b1), (e0, e1) = self.began, self.ended
        return 0.99 * (e0 - b1), 1.01 * (e1 - b0)
