"""Remaining time, with a fake clock that only training advances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import Records, Small, TwoOptimizers, trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf import SpeedMonitor
from lightning_perf.core.progress import Limits, Timestamp
from lightning_perf.run import context, flop_meter, stages

KEY = "time/remaining_estimate"
#: Seconds per training batch, and per validation of four batches.
BATCH, VALIDATION = 0.5, 8.0


class Clock:
    """A clock that only modules advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock that times batches and validations."""
    clock = Clock()
    for module in (stages, context, flop_meter):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(flop_meter, "waited_for_cpu", lambda: None)  # by another clock
    return clock


class Timed(Small):
    """Batches and validations of a known duration; 16 batches per epoch."""

    flops_per_batch = 1e6  # a batch that is counted would have no estimate

    def __init__(self, clock: Clock, seconds: Callable[[int], float] = lambda batch: BATCH) -> None:
        super().__init__()
        self.clock, self.seconds, self.trained = clock, seconds, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.now += self.seconds(self.trained)
        self.trained += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.now += VALIDATION / 4


def estimates(
    folder: Path, module: Small, fit: Any = None, window: int = 100, **options: Any
) -> list[float]:
    """The estimates at each batch of a run, except the first batch."""
    records = Records()
    monitor = SpeedMonitor(window, time_unit="seconds")
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
def test_constant_batches_are_estimated_exactly(
    tmp_path: Path, clock: Clock, options: dict[str, Any], batches: int
) -> None:
    """With n batches of t seconds left until the first limit, the estimate is n * t."""
    expected = [BATCH * left for left in range(batches - 2, -1, -1)]
    assert estimates(tmp_path, Timed(clock), **options) == pytest.approx(expected)


def test_the_first_batch_is_excluded(tmp_path: Path, clock: Clock) -> None:
    """A first batch that compiles for ten minutes does not affect the estimate."""
    module = Timed(clock, lambda batch: 600.0 if batch == 0 else BATCH)
    assert estimates(tmp_path, module)[0] == pytest.approx(14 * BATCH)


def test_max_time_includes_validation(tmp_path: Path, clock: Clock) -> None:
    """max_time limits the estimate if it is reached first, with validation included."""
    found = estimates(tmp_path, Timed(clock), max_time={"seconds": 20}, limit_val_batches=4)
    assert found[0] == pytest.approx(14 * BATCH)  # the epoch ends first
    found = estimates(tmp_path, Timed(clock), max_time={"seconds": 20}, max_epochs=9)
    assert found[0] == pytest.approx(20 - 2 * BATCH)
    options = {"max_time": {"seconds": 20}, "max_epochs": 9, "limit_val_batches": 4}
    found = estimates(tmp_path, Timed(clock), **options)
    assert found[15] == pytest.approx(20 - VALIDATION - 17 * BATCH)


def test_without_a_limit_there_is_no_estimate(tmp_path: Path, clock: Clock) -> None:
    """A training without a limit has no estimate."""

    class Ends(Timed):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = self.trained == 20

    assert estimates(tmp_path, Ends(clock), max_epochs=-1) == []


@pytest.mark.parametrize("interval", [4, 8, 1.0])
def test_validation_is_estimated_after_the_first_one(
    tmp_path: Path, clock: Clock, interval: float
) -> None:
    """After the first validation, the estimate includes all later ones."""
    every = int(interval * 16) if isinstance(interval, float) else interval
    options = {"max_epochs": 3, "val_check_interval": interval, "limit_val_batches": 4}
    *found, last = estimates(tmp_path, Timed(clock), **options)
    assert last == 0  # after the last validation
    for batch, seconds in enumerate(found, start=2):
        # The estimate of a batch's end comes after its report.
        to_come = 48 // every - (batch - 1) // every if batch > every else 0
        assert seconds == pytest.approx((48 - batch) * BATCH + to_come * VALIDATION), batch


@pytest.mark.parametrize("limit", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 64}])
def test_work_at_the_end_of_epochs_is_estimated_after_the_first_one(
    tmp_path: Path, clock: Clock, limit: dict[str, int]
) -> None:
    """It is no part of the pace of batches, whose window it is in for a while."""

    class Samples(Timed):
        def on_train_epoch_end(self) -> None:
            clock.now += 5.0

    found = dict(enumerate(estimates(tmp_path, Samples(clock), window=8, **limit), start=2))
    for batch, seconds in found.items():
        ends = 4 - (batch - 1) // 16 if batch > 16 else 0
        assert seconds == pytest.approx((64 - batch) * BATCH + ends * 5.0), batch


def test_an_epoch_of_another_length_changes_the_estimate(tmp_path: Path, clock: Clock) -> None:
    """If the data grows from 16 to 32 batches between two epochs, 32 batches remain."""

    class Growing(Timed):
        def train_dataloader(self) -> Any:
            self.batch_size = 4 - 2 * bool(self.trained)
            return super().train_dataloader()

    options = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    found = estimates(tmp_path, Growing(clock), **options)
    assert found[15:] == pytest.approx([BATCH * left for left in range(31, -1, -1)])


def test_the_mean_time_of_validation_is_to_come() -> None:
    """Epochs of 16 batches have three validations of 2 s each: 6 s per epoch."""
    limits = Limits(max_epochs=4, batches_per_epoch=16)
    now = Timestamp(epoch=3, batch=48, batch_in_epoch=0)
    left = limits.seconds_left(Timestamp(), now, 1.0, (48, 9 * 2.0))
    assert left == pytest.approx(16 + 6.0)


def test_a_resumed_run_uses_its_own_speed(tmp_path: Path, clock: Clock) -> None:
    """Batches count at the speed of this run, and validations as before until there is one."""
    options = {"max_epochs": 2, "limit_val_batches": 4}
    first = trainer(tmp_path, SpeedMonitor(), **options)
    first.fit(Timed(clock))
    first.save_checkpoint(tmp_path / "last.ckpt")
    module = Timed(clock, lambda batch: BATCH / 2)
    fit = {"ckpt_path": tmp_path / "last.ckpt"}
    found = estimates(tmp_path, module, fit, **options | {"max_epochs": 4})
    assert len(found) == 31 + 1
    assert found[0] == pytest.approx(30 * BATCH / 2 + 2 * VALIDATION)
    assert found[-2:] == pytest.approx([VALIDATION, 0])


@pytest.mark.parametrize("seconds", [500.0, 50.0], ids=["all", "one"])
def test_a_resume_just_before_a_validation_does_not_multiply_it(seconds: float) -> None:
    """A validation after the first batch of this run does not mean one after every batch."""
    limits = Limits(max_epochs=20, batches_per_epoch=100)
    start = Timestamp(epoch=9, batch=998, batch_in_epoch=98)
    now = Timestamp(epoch=10, batch=1001, batch_in_epoch=1)
    left = limits.seconds_left(start, now, 1.0, (1000, seconds))
    assert left == pytest.approx(999 + seconds)


def test_a_slowdown_is_followed(tmp_path: Path, clock: Clock) -> None:
    """When batches become twice as long, the estimate follows within the window."""
    module = Timed(clock, lambda batch: BATCH * (1 if batch < 20 else 2))
    found = estimates(tmp_path, module, window=8, max_epochs=3)
    assert found[:19] == pytest.approx([BATCH * left for left in range(46, 27, -1)])
    assert found[26:] == pytest.approx([2 * BATCH * left for left in range(20, -1, -1)])


def test_a_stall_counts_while_it_is_in_the_window(tmp_path: Path, clock: Clock) -> None:
    """After a checkpoint of 30 s the estimate is as before once the window has passed it."""
    module = Timed(clock, lambda batch: 30.0 if batch == 10 else BATCH)
    found = dict(enumerate(estimates(tmp_path, module, window=8, max_epochs=3), start=2))
    for batch, seconds in found.items():
        pace = (7 * BATCH + 30.0) / 8 if 10 < batch < 19 else BATCH
        assert seconds == pytest.approx((48 - batch) * pace), batch


def test_an_epoch_of_unknown_length_is_as_long_as_those_before(
    tmp_path: Path, clock: Clock
) -> None:
    """A stream has no estimate in the first epoch and a correct one from the second on."""

    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(torch.ones(8), torch.ones(1))] * 20)

    class Streamed(Timed):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(), batch_size=4)

    found = estimates(tmp_path, Streamed(clock), max_epochs=3)
    assert found == pytest.approx([BATCH * left for left in range(9, -1, -1)])


def test_gradient_accumulation_is_included(tmp_path: Path, clock: Clock) -> None:
    """The steps left until max_steps are converted to batches, four per step."""
    options = {"max_epochs": -1, "max_steps": 10, "accumulate_grad_batches": 4}
    found = estimates(tmp_path, Timed(clock), **options)
    assert found == pytest.approx([BATCH * left for left in range(36, -1, -4)])


def test_an_accumulation_that_changes_is_followed(tmp_path: Path, clock: Clock) -> None:
    """With other numbers of batches per step the estimate uses their mean, and ends at 0."""
    records, scheduler = Records(), GradientAccumulationScheduler({0: 4, 1: 2})
    options = {"max_epochs": -1, "max_steps": 12, "logger": records}
    monitor = SpeedMonitor(time_unit="seconds")
    trainer(tmp_path, monitor, scheduler, **options).fit(Timed(clock))
    found = [seconds for _, seconds in records.of(KEY)]
    assert found[:3] == pytest.approx([BATCH * left for left in (44, 40, 36)])
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0


def test_the_estimate_knows_how_many_batches_make_a_step_now(tmp_path: Path, clock: Clock) -> None:
    """After a change from 1 to 4 batches per step, those before it do not count."""
    records, scheduler = Records(), GradientAccumulationScheduler({0: 1, 1: 4})
    options = {"max_epochs": -1, "max_steps": 24, "logger": records}
    monitor = SpeedMonitor(4, time_unit="seconds")
    trainer(tmp_path, monitor, scheduler, **options).fit(Timed(clock))
    assert dict(records.of(KEY))[19] == pytest.approx(4 * 4 * BATCH)


@pytest.mark.parametrize("every", [5, 16])
def test_nothing_remains_after_the_last_validation(
    tmp_path: Path, clock: Clock, every: int
) -> None:
    """The last estimate, before the last validation, includes its time; at the end it is 0."""
    options = {"max_epochs": 3, "limit_val_batches": 4, "log_every_n_steps": every}
    *found, last = estimates(tmp_path, Timed(clock), **options)
    assert last == 0 < min(found)


def test_two_optimizers_are_included(tmp_path: Path, clock: Clock) -> None:
    """Lightning counts two steps per batch: 30 steps are 15 batches, of which 12 are counted."""

    class Both(TwoOptimizers):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            clock.now += BATCH
            super().training_step(batch, batch_idx)

    found = estimates(tmp_path, Both(), max_epochs=-1, max_steps=30)
    assert found == pytest.approx([BATCH * left for left in range(2, -1, -1)])


def test_the_estimate_uses_the_callback_s_unit(tmp_path: Path, clock: Clock) -> None:
    """time_unit applies to the remaining time as to the elapsed time."""
    records = Records()
    trainer(tmp_path, SpeedMonitor(time_unit="minutes"), logger=records).fit(Timed(clock))
    assert records.of(KEY)[0] == (1, pytest.approx(14 * BATCH / 60))
