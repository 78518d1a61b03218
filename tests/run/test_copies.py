"""Public objects are copied, pickled, written as YAML and compared, at any time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from helpers.servers import free_port
from helpers.small import Small, trainer
from helpers.windows import window_of
from lightning.pytorch.loggers import CSVLogger

import lightning_perf
from lightning_perf import (
    ConfigError,
    Every,
    Flops,
    Moment,
    PerfWarning,
    RecorderBusy,
    SpeedMonitor,
    Suite,
    SystemMetrics,
    Time,
    Timestamp,
    TimeUnit,
    Timings,
)

#: How each public name is constructed where it needs arguments; None for abstract ones.
ARGUMENTS: dict[str, Callable[[], Any] | None] = {
    "All": lambda: Every("2ba") & "first 5ba",
    "AnyOf": lambda: Every("2ba") | "first 5ba",
    "At": lambda: lightning_perf.At("3ba", lasting="2sec"),
    "ConfigError": lambda: ConfigError("field", 1, "is wrong", "2"),
    "Cyclic": lambda: lightning_perf.Cyclic(wait=1, warmup=1, active=2),
    "Elapsed": lambda: lightning_perf.Elapsed("1sec"),
    "Every": lambda: Every("2ba", lasting="5sec"),
    "Fixed": lambda: lightning_perf.Fixed(1, 2),
    "Flops": lambda: Flops(schedule=~Every("2ba"), peak_flops=1e9),
    "GlobalRank": lambda: lightning_perf.GlobalRank([0]),
    "HasTag": lambda: lightning_perf.HasTag("trace", "every 2ba"),
    "LocalRank": lambda: lightning_perf.LocalRank([0]),
    "Moment": lambda: Moment("train", Timestamp(batch=3), Timestamp(batch=2)),
    "Not": lambda: ~Every("2ba"),
    "PerfWarning": lambda: PerfWarning("text"),
    "Profiler": None,
    "RecorderBusy": lambda: RecorderBusy("Memray", "VizTracer"),
    "Schedule": None,
    "Stages": lambda: lightning_perf.Stages("train"),
    "Suite": lambda: Suite([SpeedMonitor(2), Flops("1ba", 1e9), Timings("2ba"), SystemMetrics()]),
    "Time": lambda: Time(10, TimeUnit.BATCH),
    "TimeUnit": lambda: TimeUnit.BATCH,
    "Timings": lambda: Timings(schedule="1ba"),
    "Tracker": None,
    "Prometheus": lambda: lightning_perf.Prometheus(free_port()),
    "OnVerdict": lambda: lightning_perf.OnVerdict(["input-bound"]),
    "Verdict": lambda: lightning_perf.Verdict("warmup", "info"),
    "Window": lambda: window_of({"batch/seconds": [1.0]}),
}
NAMES = [name for name in lightning_perf.__all__ if ARGUMENTS.get(name, name) is not None]
MEASURING = [
    "Diagnosis", "Flops", "OpenTelemetry", "Prometheus", "SpeedMonitor", "Suite", "SystemMetrics",
    "Timings",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry would wait for one at the end of each run."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")


def made(name: str) -> Any:
    return (ARGUMENTS.get(name) or getattr(lightning_perf, name))()


def copies(value: Any) -> list[Any]:
    """Copies by `copy`, `deepcopy` and pickle. The value is also written as YAML."""
    assert yaml.dump(value)
    return [copy.deepcopy(value), copy.copy(value), pickle.loads(pickle.dumps(value))]


@pytest.mark.parametrize("name", NAMES)
def test_public_objects_can_be_copied(name: str) -> None:
    """Constructed objects can be copied and pickled; values and schedules equal their copies."""
    value = made(name)
    for again in copies(value):
        assert type(again) is type(value)
        if not isinstance(value, Exception | L.Callback | lightning_perf.Window):
            assert again == value
            assert hash(again) == hash(value)
        elif isinstance(value, Exception):
            assert str(again) == str(value)
        else:
            assert again == again
            assert (again == value) in (True, False)


class CopiesCallbacks(L.Callback):
    """Copies our callbacks during training and in a checkpoint."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                self.copies += copies(callback) if callback is not self else []


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURING)
def test_callbacks_can_be_copied_during_and_after_a_run(tmp_path: Path, name: str) -> None:
    """A copy holds nothing of the run and works in another run."""
    callback, copying = made(name), CopiesCallbacks()
    run = trainer(tmp_path, callback, copying, limit_val_batches=1, val_check_interval=2)
    run.fit(Small())
    for again in [*copying.copies, *copies(callback)]:
        assert getattr(again, "_context", None) is None  # copies of the hooks of a run are plain
        assert "log" not in vars(again)
        trainer(tmp_path, again, limit_train_batches=2).fit(Small())


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("profiler", [None, "simple"])
def test_a_trainer_can_be_copied_and_saved_after_a_run(
    tmp_path: Path, name: str, profiler: str | None
) -> None:
    """A Trainer with our callbacks can be copied and pickled like one without them."""
    run = trainer(tmp_path, made(name), profiler=profiler)
    run.fit(Small())
    assert copy.deepcopy(run).global_step == 16
    torch.save(run, tmp_path / "trainer.pt")
    assert torch.load(tmp_path / "trainer.pt", weights_only=False).global_step == 16


class Saving(L.Callback):
    """Saves the Trainer in the middle of a training."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            torch.save(trainer, Path(trainer.default_root_dir, "trainer.pt"))


@pytest.mark.parametrize("name", MEASURING)
def test_a_trainer_can_be_saved_during_a_run(tmp_path: Path, name: str) -> None:
    """As it can without us; what is loaded trains."""
    run = trainer(tmp_path, made(name), Saving(), limit_val_batches=1, val_check_interval=2)
    run.fit(Small())
    again = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert again.global_step == 5
    again.fit_loop.max_epochs = 2
    again.fit(Small())
    assert again.global_step == 5 + 2 * 16


class KeepsHyperparameters(Small):
    """Saves the arguments of its Trainer as hyperparameters, as neuralforecast does."""

    def __init__(self, **trainer_kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("name", MEASURING)
def test_trainer_arguments_may_be_hyperparameters(tmp_path: Path, name: str) -> None:
    """Loggers write the callbacks as YAML when training starts, without an error."""
    callback = made(name)
    model = KeepsHyperparameters(callbacks=[callback], max_epochs=1)
    run = trainer(tmp_path, callback, logger=CSVLogger(tmp_path))
    run.fit(model)
    assert run.global_step == 16
    assert name in next(tmp_path.rglob("hparams.yaml")).read_text()
