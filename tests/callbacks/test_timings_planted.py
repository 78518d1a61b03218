"""Time planted in one place is found under the name of that place, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.clocks import FakeClock
from helpers.small import Records, Small, trainer
from helpers.windows import rows_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_perf import Timings
from lightning_perf.timing.totals import CATEGORIES

BATCHES = 9
#: Training moves nothing to the host in which to plant a sleep: see the tests of the stages.
PLACES = [name for name in CATEGORIES if name != "from_device"]
Sleep = Callable[[str], None]


class Data(Dataset):
    def __init__(self, sleep: Sleep) -> None:
        self.sleep = sleep

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.sleep("dataloader_next")
        return torch.ones(8), torch.zeros(1)


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Sleep) -> Tensor:
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.sleep("backward")
        return gradient, None


class SleepyMetric(MeanMetric):
    sleep: Sleep

    def compute(self) -> Tensor:
        self.sleep("reduce_metrics")
        return super().compute()


class SleepySGD(torch.optim.SGD):
    sleep: Sleep

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.sleep("optimizer_step")
        return loss


class Model(Small):
    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self.sleep = sleep
        self.mean = SleepyMetric(sync_on_compute=False)
        self.mean.sleep = sleep

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sleep("forward")
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("loss", loss)
        return Sleepy.apply(loss, self.sleep)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.validating:
            self.sleep("to_device")
        return batch

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.sleep("validation")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        self.sleep("step_lr_schedulers")

    def on_train_batch_end(self, *_: Any) -> None:
        self.sleep("other")

    def configure_optimizers(self) -> Any:
        optimizer = SleepySGD(self.parameters(), lr=0.01)
        optimizer.sleep = self.sleep
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(Data(self.sleep), batch_size=1)

    def val_dataloader(self) -> Any:
        return DataLoader(Data(lambda place: None), batch_size=1)


class Slow(L.Callback):
    def __init__(self, sleep: Sleep) -> None:
        self.sleep = sleep

    def on_train_batch_start(self, *_: Any) -> None:
        self.sleep("callbacks")


class SlowRecords(Records):
    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self.sleep = sleep

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.sleep("logging")
        super().log_metrics(metrics, step)


class SlowDisk(TorchCheckpointIO):
    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self.sleep = sleep

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.sleep("checkpoint")
        super().save_checkpoint(*args, **kwargs)


def train(folder: Path, sleep: Sleep) -> Timings:
    """A training in which every place runs in every batch."""
    timings = Timings()
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_top_k=-1)
    trainer(
        folder,
        timings,
        Slow(sleep),
        saving,
        logger=SlowRecords(sleep),
        plugins=[SlowDisk(sleep)],
        enable_checkpointing=True,
        val_check_interval=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    ).fit(Model(sleep))
    return timings


@pytest.mark.parametrize("place", PLACES)
def test_time_planted_in_one_place_is_counted_there_only(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the planted sleeps advance, their place has all of the time, exactly."""
    clock = FakeClock()
    clock.replace_clocks(monkeypatch)

    def sleep(where: str) -> None:
        clock.sleep(0.25 * (where == place))

    timings = train(tmp_path, sleep)
    rows = [row for _, row in rows_of(timings)]
    assert len(rows) == BATCHES
    # Time after the callback is counted with the next batch, but none is lost.
    for row in rows[1:-1]:
        assert row == {name: 0.25 * (name == place) for name in CATEGORIES}
    for name in CATEGORIES:
        assert sum(row[name] for row in rows) == 0.25 * BATCHES * (name == place)
    within = place in {"forward", "backward", "optimizer_step", "reduce_metrics"}
    assert timings.metrics["timings/train_batch"] == 0.25 * within


def test_real_sleeps_are_found_in_their_places(tmp_path: Path) -> None:
    """By the real clock, each place has at least the time that it slept."""
    slept: dict[str, float] = dict.fromkeys(PLACES, 0.0)

    def sleep(where: str) -> None:
        start = time.perf_counter()
        time.sleep(0.002)
        slept[where] += time.perf_counter() - start

    timings = train(tmp_path, sleep)
    for place in PLACES:
        assert sum(row[place] for _, row in rows_of(timings)) >= slept[place] > 0, place


def test_rows_are_named_by_class_and_method(tmp_path: Path) -> None:
    """The table names the callback, logger and checkpoint with their times."""

    def sleep(where: str) -> None:
        time.sleep({"callbacks": 0.008, "logging": 0.004, "other": 0.002}.get(where, 0.0))

    table = {row.name: row for row in train(tmp_path, sleep).table}
    names = ["Slow.on_train_batch_start", "SlowRecords.log_metrics", "Model.on_train_batch_end"]
    for name, seconds in zip(names, (8e-3, 4e-3, 2e-3), strict=True):
        assert table[name].seconds >= BATCHES * seconds
    assert table["Slow.on_train_batch_start"].calls == BATCHES
    assert 0 < table["Slow.on_train_batch_start"].share < 1
    assert table["ModelCheckpoint.on_train_batch_end"].calls == BATCHES
    assert table["lightning_perf.on_train_batch_end"].calls == BATCHES
    assert [row.seconds for row in table.values()] == sorted(
        (row.seconds for row in table.values()), reverse=True
    )


def test_hooks_of_the_module_within_the_optimizer_s_step_have_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping and zeroing that the module overrides have names of their own."""
    clock = FakeClock()
    clock.replace_clocks(monkeypatch)

    class Clipping(Model):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            clock.sleep(0.25)

        def optimizer_zero_grad(self, *args: Any) -> None:
            super().optimizer_zero_grad(*args)
            clock.sleep(0.5)

    timings = Timings()
    trainer(tmp_path, timings).fit(Clipping(lambda _: None))
    table = {row.name: row.seconds for row in timings.table if row.seconds}
    assert table == {
        "Clipping.configure_gradient_clipping": 0.25 * BATCHES,
        "Clipping.optimizer_zero_grad": 0.5 * BATCHES,
    }
    assert sum(row["other"] for _, row in rows_of(timings)) == 0.75 * BATCHES
