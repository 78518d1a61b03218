"""Timings that are checked against clocks of the tests."""

from __future__ import annotations

import time
from typing import Any

from lightning_perf import Timings


class Stopped(Timings):
    """Holds watches of its own around the first and the last of what is counted."""

    began: tuple[float, float] | None = None
    ended = (0.0, 0.0)

    def on_start(self, context: Any) -> None:
        before = time.perf_counter()
        super().on_start(context)
        self.began = self.began or (before, time.perf_counter())

    def collect(self, context: Any, at_end: bool) -> Any:
        before = time.perf_counter()
        found = super().collect(context, at_end)
        self.ended = before, time.perf_counter()
        return found

    @property
    def wall(self) -> tuple[float, float]:
        """The least and the most seconds that may have been counted, give or take 1 %."""
        assert self.began is not None
        (b0, b1), (e0, e1) = self.began, self.ended
        return 0.99 * (e0 - b1), 1.01 * (e1 - b0)
