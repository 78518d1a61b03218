"""MFU and throughput on progress bars and in callback_metrics, from the last report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import RANKS, Small, trainer
from helpers.versions import before
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from torch import Tensor

from lightning_perf import Flops, SpeedMonitor

PEAK = 1e12


class Bar(TQDMProgressBar):
    """Keeps the metrics that it shows."""

    shown: dict[str, Any]

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        self.shown = super().get_metrics(*args)
        return self.shown


class RichBar(RichProgressBar):
    shown: dict[str, Any]

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        self.shown = super().get_metrics(*args)
        return self.shown


class Logs(Small):
    """Logs a metric of its own on the bar."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("mine", 3.0, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Bar, RichBar])
def test_progress_bars_show_the_last_report(tmp_path: Path, kind: Any) -> None:
    """The bar shows our metrics beside those of the module."""
    if kind is RichBar and before("2.5.3") and not before("14.1", "rich"):
        pytest.skip("Lightning before 2.5.3 ends the run: its RichProgressBar needs rich<14.1")
    bar, speed = kind(), SpeedMonitor(window_size=4)
    flops = Flops(peak_flops=PEAK, schedule="every 4ba")
    run = trainer(tmp_path, speed, flops, bar, enable_progress_bar=True, log_every_n_steps=4)
    run.fit(Logs())
    assert bar.shown["mine"] == 3.0
    assert bar.shown["samples/s"] > 0
    assert bar.shown["mfu %"] == pytest.approx(100 * flops.metrics["mfu"], rel=0.01)
    assert "tokens/s" not in bar.shown


def test_lightning_callbacks_can_monitor_throughput(tmp_path: Path) -> None:
    """EarlyStopping stops on it, and ModelCheckpoint names files by it."""
    key = "throughput/samples_per_sec"
    stop = EarlyStopping(key, mode="max", stopping_threshold=1.0, check_on_train_epoch_end=True)
    best = ModelCheckpoint(
        tmp_path, "{mfu:.9f}", monitor="mfu", mode="max", save_on_train_epoch_end=True
    )
    speed, flops = SpeedMonitor(window_size=4), Flops(peak_flops=PEAK)
    run = trainer(tmp_path, speed, flops, stop, best, enable_checkpointing=True, max_epochs=5)
    run.fit(Small())
    assert run.current_epoch == 1
    watched = run.callback_metrics
    assert watched[key].item() == pytest.approx(speed.metrics[key])
    assert watched["mfu"].device == torch.device("cpu")
    assert "mfu=" in best.best_model_path
    assert watched.keys() == {key, "mfu"}  # nothing that no callback asks for


class Reads(L.Callback):
    """Uses the bar's metrics as other packages do: as floats, which Lightning's are."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.histories: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        for key, value in trainer.progress_bar_metrics.items():
            assert isinstance(value, float)
            assert f"{float(value):.5g}"
            self.sums[key] = value + self.sums.get(key, 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for key, metric in trainer.callback_metrics.items():
            assert key.count("/") < 2
            self.histories.setdefault(key, []).append(float(metric))


def test_other_callbacks_can_calculate_with_the_metrics(tmp_path: Path) -> None:
    """Metrics on the bar are floats, and histories of callback_metrics have one value per epoch."""
    reads, speed = Reads(), SpeedMonitor(window_size=4)
    flops = Flops(peak_flops=PEAK, schedule="every 4ba")
    trainer(tmp_path, speed, flops, reads, max_epochs=3, log_every_n_steps=4).fit(Logs())
    assert reads.sums["mfu %"] > 0
    assert {len(values) for values in reads.histories.values()} == {3}
    assert reads.histories.keys() == {"mine"}


@pytest.mark.parametrize("key", ["mfu", "throughput/device/mfu", "throughput/samples_per_sec"])
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 1}, {"limit_train_batches": 1}])
@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_a_monitor_sees_a_value_before_the_first_report(
    tmp_path: Path, key: str, options: dict[str, Any], at_epoch_end: bool
) -> None:
    """Epochs shorter than a report or the window stop no training, whenever a monitor reads."""
    stop = EarlyStopping(key, mode="max", patience=99, check_on_train_epoch_end=at_epoch_end)
    best = ModelCheckpoint(tmp_path, monitor=key, mode="max")
    speed, flops = SpeedMonitor(), Flops(peak_flops=PEAK, schedule="every 1000ba")
    run = trainer(
        tmp_path, stop, best, speed, flops, enable_checkpointing=True,
        max_epochs=6, limit_val_batches=1, log_every_n_steps=50, **options,
    )  # fmt: skip
    run.fit(Small())
    assert run.current_epoch == 6
    assert run.callback_metrics[key].item() > 0
    assert run.callback_metrics.keys() == {key}
    assert best.best_model_path


class Ranked(L.Callback):
    """Writes the `callback_metrics` of each rank at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        watched = trainer.callback_metrics.get("throughput/samples_per_sec", torch.tensor(0.0))
        (self.folder / f"rank{trainer.global_rank}").write_text(str(watched.item()))


def test_all_ranks_can_monitor_throughput(tmp_path: Path) -> None:
    """All ranks have the metric; EarlyStopping on rank 0 alone would wait for the others."""
    speed = SpeedMonitor(window_size=2)
    stop = EarlyStopping("throughput/samples_per_sec", mode="max", patience=9)
    options = {"max_epochs": 3, "limit_val_batches": 1, **RANKS}
    trainer(tmp_path, speed, stop, Ranked(tmp_path), **options).fit(Small())
    values = [float((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert min(values) > 0


def test_a_key_of_the_module_is_not_replaced(tmp_path: Path) -> None:
    """A metric that the module logs as `mfu` keeps the module's value."""

    class Own(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("mfu", 42.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    stop = EarlyStopping("mfu", patience=9, check_on_train_epoch_end=True)
    run = trainer(tmp_path, Flops(peak_flops=PEAK), stop)
    run.fit(Own())
    assert run.callback_metrics["mfu"].item() == 42.0
