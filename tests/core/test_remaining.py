"""How long a training will still take, on a clock that only the training moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small import Records, Small, TwoOptimizers, trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf import SpeedMonitor
from lightning_perf.core.progress import Limits, Timestamp
from lightning_perf.core.remaining import RemainingTime
from lightning_perf.run import stages

KEY = "time/remaining_estimate"
#: Seconds that a batch of training and a whole validation of four batches take.
BATCH, VALIDATION = 0.5, 8.0


class Clock:
    """Stands still but where a module moves it on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock that batches and validations are timed by."""
    clock = Clock()
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=clock))
    return clock


class ContextPatch(Small):
    """Batches and validations of a known length; 16 batches an epoch."""

    def __init__(self, clock: Clock, seconds: Callable[[int], float] = lambda batch: BATCH) -> None:
        super().__init__()
        self.clock, self.seconds, self.trained = clock, seconds, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.now += self.seconds(self.trained)
        self.trained += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.now += VALIDATION / 4


def estimates(folder: Path, module: Small, fit: Any = None, **options: Any) -> list[float]:
    """What a run says at each of its batches but the first."""
    records = Records()
    monitor = SpeedMonitor(time_unit="seconds")
    trainer(folder, monitor, logger=records, **options).fit(module, **fit or {})
    return [seconds for _, seconds in records.of(KEY)]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_epochs": 3}, 48),
        ({"max_epochs": -1, "max_steps": 40}, 40),
        ({"max_epochs": 2, "max_steps": 40}, 32),
        ({"max_epochs": 9, "max_steps": 20}, 20),
    ],
)
def test_constant_batches_are_foretold_exactly(
    tmp_path: Path, clock: Clock, options: dict[str, Any], batches: int
) -> None:
    """With n batches of t seconds left until the first limit, n * t seconds are left."""
    expected = [BATCH * left for left in range(batches - 2, -1, -1)]
    assert estimates(tmp_path, ContextPatch(clock), **options) == pytest.approx(expected)


def test_the_first_batch_does_not_count(tmp_path: Path, clock: Clock) -> None:
    """A first batch that compiles for ten minutes is no pace."""
    module = ContextPatch(clock, lambda batch: 600.0 if batch == 0 else BATCH)
    assert estimates(tmp_path, module)[0] == pytest.approx(14 * BATCH)


def test_a_time_limit_counts_validation_and_decides_where_it_comes_first(
    tmp_path: Path, clock: Clock
) -> None:
    """Of max_time is left what neither training nor validation has used up."""
    found = estimates(tmp_path, ContextPatch(clock), max_time={"seconds": 20}, limit_val_batches=4)
    assert found[0] == pytest.approx(14 * BATCH)  # the epoch ends first
    found = estimates(tmp_path, ContextPatch(clock), max_time={"seconds": 20}, max_epochs=99)
    assert found[0] == pytest.approx(20 - 2 * BATCH)
    options = {"max_time": {"seconds": 20}, "max_epochs": 99, "limit_val_batches": 4}
    found = estimates(tmp_path, ContextPatch(clock), **options)
    assert found[15] == pytest.approx(20 - VALIDATION - 17 * BATCH)


def test_without_a_limit_nothing_is_said(tmp_path: Path, clock: Clock) -> None:
    """A training that only the user ends has no end to foretell."""

    class Ends(ContextPatch):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = self.trained == 20

    assert estimates(tmp_path, Ends(clock), max_epochs=-1) == []


@pytest.mark.parametrize("interval", [4, 8, 1.0])
def test_validation_is_projected_once_it_was_seen(
    tmp_path: Path, clock: Clock, interval: float
) -> None:
    """After the first validation, those still to come are counted, the one at the end included."""
    every = int(interval * 16) if isinstance(interval, float) else interval
    options = {"max_epochs": 3, "val_check_interval": interval, "limit_val_batches": 4}
    found = dict(enumerate(estimates(tmp_path, ContextPatch(clock), **options), start=2))
    for batch, seconds in found.items():
        # That of a batch's end comes after its report.
        to_come = 48 // every - (batch - 1) // every if batch > every else 0
        assert seconds == pytest.approx((48 - batch) * BATCH + to_come * VALIDATION), batch


def test_uneven_intervals_of_validation_are_averaged() -> None:
    """Three validations in each epoch of 16 batches, after 5, 10 and 15 of them."""
    limits = Limits(max_epochs=4, batches_per_epoch=16)
    remaining = RemainingTime(limits, Timestamp())
    remaining.add(1.0)
    batches = [epoch * 16 + within for epoch in range(3) for within in (5, 10, 15)]
    for number, batch in enumerate(batches):
        remaining.validation_begins(batch, number * 2.0)
    now = Timestamp(epoch=3, batch=48, batch_in_epoch=0)
    assert remaining.seconds(now, len(batches) * 2.0) == pytest.approx(16 + 3 * 2.0)


def test_the_first_validation_counts_until_there_is_another() -> None:
    """It warms up: once there is a second one, that one tells how long they take."""
    remaining = RemainingTime(Limits(max_epochs=4, batches_per_epoch=10), Timestamp())
    remaining.add(1.0)
    remaining.validation_begins(10, 0.0)
    assert remaining.seconds(Timestamp(epoch=1, batch=10), 60.0) == pytest.approx(30 + 3 * 60)
    remaining.validation_begins(20, 60.0)
    assert remaining.seconds(Timestamp(epoch=2, batch=20), 65.0) == pytest.approx(20 + 2 * 5)


def test_a_resumed_run_tells_its_own_pace(tmp_path: Path, clock: Clock) -> None:
    """A machine twice as fast halves what is left, whatever the run did before."""
    options = {"max_epochs": 2, "limit_val_batches": 4}
    first = trainer(tmp_path, SpeedMonitor(), **options)
    first.fit(ContextPatch(clock))
    first.save_checkpoint(tmp_path / "last.ckpt")
    module = ContextPatch(clock, lambda batch: BATCH / 2)
    fit = {"ckpt_path": tmp_path / "last.ckpt"}
    found = estimates(tmp_path, module, fit, **options | {"max_epochs": 4})
    assert len(found) == 31
    assert found[0] == pytest.approx(30 * BATCH / 2)
    assert found[-1] == pytest.approx(VALIDATION)


def test_a_resume_just_before_a_validation_does_not_multiply_it() -> None:
    """One validation after one batch of this run is no sign of one after every batch."""
    limits = Limits(max_epochs=20, batches_per_epoch=100)
    start = Timestamp(epoch=9, batch=998, batch_in_epoch=98)
    for before, to_come in ((9, 10), (0, 1)):  # known from our state, or not
        remaining = RemainingTime(limits, start, before)
        remaining.add(1.0)
        remaining.validation_begins(1000, 50.0)
        now = Timestamp(epoch=10, batch=1001, batch_in_epoch=1)
        assert remaining.seconds(now, 55.0) == pytest.approx(999 + to_come * 5.0)
        remaining.validation_begins(1100, 55.0)
        now = Timestamp(epoch=11, batch=1100)
        assert remaining.seconds(now, 60.0) == pytest.approx(900 + 9 * 5.0)


def test_a_slowdown_is_followed() -> None:
    """When batches take twice as long from now on, the estimate says so within the window."""
    remaining = RemainingTime(Limits(max_steps=1_000_000), Timestamp(), horizon=100)
    for _ in range(10_000):
        remaining.add(1.0)
    for _ in range(300):
        remaining.add(2.0)
    now = Timestamp(batch=10_300, step=10_300)
    assert remaining.seconds(now) == pytest.approx(2.0 * (1_000_000 - 10_300), rel=0.05)


def test_rare_stalls_are_spread_over_the_run() -> None:
    """A checkpoint of half a minute every 1,000 batches makes no saw-tooth of the estimate."""
    total, done, found = 10_000, Timestamp(), []
    remaining = RemainingTime(Limits(max_steps=total), done, horizon=100)
    for batch in range(1, 5_001):
        remaining.add(30.0 if batch % 1_000 == 0 else 0.1)
        found.append(remaining.seconds(Timestamp(batch=batch, step=batch)))
    assert found[-1] == pytest.approx(5_000 * 0.1 + 5 * 29.9)
    later = found[3_000:]
    assert max(abs(b - a) for a, b in pairwise(later)) < 0.15 * min(later)


def test_an_epoch_of_unknown_length_is_as_long_as_those_before(
    tmp_path: Path, clock: Clock
) -> None:
    """A stream tells nothing in its first epoch, and from the second on what is left."""

    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(torch.ones(8), torch.ones(1))] * 20)

    class Streamed(ContextPatch):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(), batch_size=4)

    found = estimates(tmp_path, Streamed(clock), max_epochs=3)
    assert found == pytest.approx([BATCH * left for left in range(9, -1, -1)])


def test_accumulated_gradients_are_understood(tmp_path: Path, clock: Clock) -> None:
    """What max_steps leaves is counted in batches, of which each step takes four."""
    options = {"max_epochs": -1, "max_steps": 10, "accumulate_grad_batches": 4}
    found = estimates(tmp_path, ContextPatch(clock), **options)
    assert found == pytest.approx([BATCH * left for left in range(36, -1, -4)])


def test_two_optimizers_are_understood(tmp_path: Path, clock: Clock) -> None:
    """Lightning's steps then advance by two in a batch: 24 steps are twelve batches."""

    class Both(TwoOptimizers):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            clock.now += BATCH
            super().training_step(batch, batch_idx)

    found = estimates(tmp_path, Both(), max_epochs=-1, max_steps=24)
    assert found == pytest.approx([BATCH * left for left in range(10, -1, -1)])


def test_it_is_told_in_the_unit_of_the_callback(tmp_path: Path, clock: Clock) -> None:
    """time_unit holds for what is left as for what was spent."""
    records = Records()
    trainer(tmp_path, SpeedMonitor(time_unit="minutes"), logger=records).fit(ContextPatch(clock))
    assert records.of(KEY)[0] == (1, pytest.approx(14 * BATCH / 60))
