"""A clock that only tests advance, and a model whose batches have known durations."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
from torch import Tensor
from typing_extensions import override

from helpers.small import Small
from lightning_perf.run import context, flop_meter, spans, stages
from lightning_perf.timing import clock


class FakeClock:
    """Time advances only in `sleep`. A forked process has its own copy."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def replace_clocks(self, patch: pytest.MonkeyPatch) -> None:
        """Time spans, batches and garbage collections by this clock."""
        for module in (clock, spans, stages, context, flop_meter):
            patch.setattr(module, "perf_counter", self)
        patch.setattr(flop_meter, "waited_for_cpu", lambda: None)  # by the kernel's clock


class JumpingClock(FakeClock):
    """Real time, except that `sleep` jumps ahead, so that a busy machine hardly matters."""

    def __call__(self) -> float:
        return perf_counter() + self.now


class Planned(Small):
    """Batches of 1 s and validation batches of 4 s, by the clock of `Timings`."""

    def __init__(self, patch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(**options)
        self.clock = FakeClock()
        patch.setattr(clock, "perf_counter", self.clock)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.sleep(1.0)
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.sleep(4.0)
