"""What Lightning's Trainer offers keeps its documented contract with our callbacks attached."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import Records, Small, trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from lightning_perf import always_on


class Logs(Small):
    """Logs a metric on the bar and one for callbacks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).sum())


class Looks(L.Callback):
    """Copies what a Trainer offers, in hooks of all kinds."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        bar = trainer.progress_bar_metrics
        assert all(isinstance(value, float) for value in bar.values())
        assert sum(bar.values()) == sum(float(value) for value in bar.values())
        assert all(isinstance(value, Tensor) for value in trainer.callback_metrics.values())
        self.seen.append(
            {
                "callback": sorted(trainer.callback_metrics),
                "logged": sorted(trainer.logged_metrics),
                "callbacks": [type(each).__name__ for each in trainer.callbacks],
                "loggers": [type(each).__name__ for each in trainer.loggers],
                "profiler": trainer.profiler.__class__,
                "is": isinstance(trainer.profiler, SimpleProfiler),
                "stage": (
                    trainer.state.fn,
                    trainer.state.stage,
                    trainer.training,
                    trainer.validating,
                ),
                "progress": (trainer.global_step, trainer.current_epoch, trainer.is_last_batch),
                "loop": trainer.fit_loop.state_dict(),
            }
        )

    on_validation_end = on_train_epoch_end = on_train_batch_end  # type: ignore[assignment]


def observed(folder: Path, *ours: L.Callback) -> Looks:
    looks = Looks()
    folder.mkdir()
    options: dict[str, Any] = {
        "max_epochs": 2, "limit_val_batches": 2, "log_every_n_steps": 4, "logger": Records(),
        "profiler": SimpleProfiler(), "enable_checkpointing": True,
    }  # fmt: skip
    run = trainer(folder, looks, *ours, **options)
    methods = {name: getattr(run.strategy, name) for name in ("training_step", "backward")}
    torch.manual_seed(0)
    run.fit(Logs())
    assert isinstance(run.profiler, SimpleProfiler)
    assert {name: getattr(run.strategy, name) for name in methods} == methods
    assert run.profiler.recorded_durations
    assert copy.deepcopy(run.callback_metrics).keys() == run.callback_metrics.keys()
    return looks


OURS = ["lightning_perf", "Suite", *(type(part).__name__ for part in always_on().parts)]


def test_a_trainer_offers_the_same_with_us(tmp_path: Path) -> None:
    """Metrics, callbacks, loggers, profiler, state and loops differ by our own callbacks alone."""
    with_us, without = (
        observed(tmp_path / str(len(ours)), *ours) for ours in ([always_on(show_summary=False)], [])
    )
    assert len(with_us.seen) == len(without.seen) > 30
    for ours, alone in zip(with_us.seen, without.seen, strict=True):
        assert [name for name in ours.pop("callbacks") if name not in OURS] == alone.pop(
            "callbacks"
        )
        assert ours == alone


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_return_the_same_with_us(tmp_path: Path, stage: str) -> None:
    """Results and logged metrics of other functions have no keys of ours."""
    model = Logs()

    def result(*ours: L.Callback) -> tuple[Any, list[str]]:
        run = trainer(tmp_path, *ours, limit_val_batches=2, logger=Records())
        found = getattr(run, stage)(model)
        return str(found), sorted(run.callback_metrics)

    assert result(always_on(show_summary=False)) == result()


def test_checkpoints_have_our_state_under_our_key_alone(tmp_path: Path) -> None:
    """The other entries of a checkpoint are those of Lightning, and load without us."""

    def saved(*ours: L.Callback) -> dict[str, Any]:
        run = trainer(tmp_path, *ours, limit_train_batches=2)
        run.fit(Logs())
        run.save_checkpoint(tmp_path / "one.ckpt")
        return torch.load(tmp_path / "one.ckpt", weights_only=True)

    ours, alone = saved(always_on(show_summary=False)), saved()
    assert ours.keys() == alone.keys()
    keys = {key for key in ours["callbacks"] if key not in alone["callbacks"]}
    assert keys
    assert all(key.startswith("lightning_perf.") for key in keys)
