"""Diagnosis of trainings with a planted cause."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.clocks import FakeClock
from helpers.small import RANKS, Records, Small, launch, ours, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lightning_perf import (
    ConfigError,
    Diagnosis,
    Flops,
    OnVerdict,
    PerfWarning,
    PyTorch,
    Suite,
    Verdict,
)
from lightning_perf.background import wait_until
from lightning_perf.callbacks import diagnosis as module
from lightning_perf.diagnosis.signals import Signals
from lightning_perf.run import collector, flop_meter, run
from lightning_perf.tracking import page
from lightning_perf.tracking.summary import read_summary

#: Seconds of the planted cause and of a batch without it, by a clock that only they advance.
NAP, STEP = 0.02, 0.01
CLOCK = FakeClock()


@pytest.fixture(autouse=True)
def _only_what_is_planted_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the rest of the machine: no thread waits for a CPU, and no other program uses one."""
    CLOCK.replace_clocks(monkeypatch)
    monkeypatch.setattr(collector, "run_queue", dict)
    monkeypatch.setattr(run, "node_sampler", lambda *_: None)


class Data(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, nap: float = 0.0) -> None:
        self.nap = nap

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        CLOCK.sleep(self.nap)
        return torch.ones(8), torch.zeros(1)


class Model(Small):
    """A batch takes some milliseconds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CLOCK.sleep(STEP)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Data())


class SlowInput(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Data(NAP))


class Order(Sampler[int]):
    """Takes its time at the beginning of an epoch, or for each index."""

    def __init__(self, first: float, each: float) -> None:
        self.first, self.each = first, each

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        CLOCK.sleep(self.first)
        for index in range(40):
            CLOCK.sleep(self.each)
            yield index


class SlowSampler(Model):
    workers = 0

    def train_dataloader(self) -> Any:
        keep = bool(self.workers)
        order = Order(0.0, NAP)
        return DataLoader(Data(), sampler=order, num_workers=self.workers, persistent_workers=keep)


class SamplerOfWorkers(SlowSampler):
    workers = 1


class SlowShuffle(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Data(), sampler=Order(40 * NAP, 0.0))


class SlowTransfer(Model):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        CLOCK.sleep(NAP)
        return batch


class SlowValidation(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CLOCK.sleep(2 * NAP)


class Garbage(Model):
    """Runs the garbage collector in each step, which takes some time."""

    collecting = False

    def on_train_start(self) -> None:
        gc.callbacks.append(self.collected)

    def on_train_end(self) -> None:
        gc.callbacks.remove(self.collected)

    def collected(self, phase: str, info: Any) -> None:
        if self.collecting and phase == "start":
            CLOCK.sleep(NAP)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.collecting = True
        gc.collect(0)
        self.collecting = False
        return super().training_step(batch, batch_idx)


class SlowScheduler(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: CLOCK.sleep(NAP) or 1.0)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


class Plots(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        CLOCK.sleep(NAP)


class SlowLogger(Records):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        CLOCK.sleep(NAP)


class SlowCheckpoint(Model):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        CLOCK.sleep(NAP)


class SlowDisk(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        CLOCK.sleep(NAP)
        super().save_checkpoint(*args, **options)


class Stalls(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 10 == 7:
            CLOCK.sleep(10 * NAP)
        return super().training_step(batch, batch_idx)


class StallsOfNewShapes(Stalls):
    """Batches that stall have fewer rows, so that the FLOPs of each are counted once."""

    def train_dataloader(self) -> Any:
        rows = [1 + n // 10 if n % 10 == 7 else 8 for n in range(40)]
        batches = [(torch.ones(n, 8), torch.zeros(n, 1)) for n in rows]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def diagnose(folder: Path, model: L.LightningModule, *callbacks: Any, **options: Any) -> Diagnosis:
    diagnosis = Diagnosis(terminal=False)
    given = {"max_epochs": 2, "log_every_n_steps": 10, "callbacks": [diagnosis, *callbacks]}
    trainer(folder, **(given | options)).fit(model)
    return diagnosis


def blamed(diagnosis: Diagnosis) -> dict[str, Verdict]:
    """Verdicts above ``info``."""
    return {each.code: each for each in diagnosis.verdicts if each.severity != "info"}


@pytest.mark.parametrize(
    ("model", "code", "culprit", "options"),
    [
        (SlowInput, "input-bound", "train_dataloader_next", {}),
        (SlowSampler, "input-bound", "sampler Order", {}),
        (SamplerOfWorkers, "input-bound", "sampler Order", {}),
        (SlowShuffle, "epoch-restart", "first fetch", {}),
        (SlowTransfer, "transfer-bound", None, {}),
        (SlowValidation, "validation-bound", "validate.forward", {"limit_val_batches": 40}),
        (SlowScheduler, "callback-bound", "lr_scheduler_step", {}),
        (Garbage, "gc-pauses", "training_step", {}),
        (Stalls, "periodic-stall", None, {}),
    ],
)
def test_a_cause_planted_in_the_module_is_found(
    tmp_path: Path, model: type[Model], code: str, culprit: str | None, options: Any
) -> None:
    """It is the only verdict."""
    (found,) = blamed(diagnose(tmp_path, model(), **options)).values()
    assert found.code == code
    assert culprit in (None, found.culprit)


class SlowAtTimes(Model):
    """Items of some epochs, or of some batches of each, take longer."""

    def __init__(self, slow: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.slow, self.slept = slow, 0

    def train_dataloader(self) -> Any:
        module = self

        class Items(Data):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                if module.slow(module.current_epoch, index):
                    module.slept += 1
                    CLOCK.sleep(4 * NAP)
                return super().__getitem__(index)

        return DataLoader(Items())


@pytest.mark.parametrize(
    ("slow", "epochs", "stretch"),
    [
        pytest.param(lambda epoch, _: epoch == 0, 3, "epoch 0", id="first of 3"),
        pytest.param(lambda epoch, _: epoch == 0, 8, "epoch 0", id="first of 8"),
        pytest.param(lambda epoch, _: epoch == 3, 6, "epoch 3", id="fourth"),
        pytest.param(
            lambda epoch, index: epoch == 0 and index < 20, 2, "batches 0 to 19", id="first 20"
        ),
        pytest.param(
            lambda epoch, index: epoch == 1 and 13 <= index < 27, 3, "batches 53 to 66", id="hiccup"
        ),
        pytest.param(lambda epoch, _: epoch == 4, 5, None, id="last"),
        pytest.param(lambda epoch, _: epoch % 2 == 0, 5, None, id="alternate"),
        pytest.param(lambda _, index: index < 8, 5, None, id="first of each"),
        pytest.param(lambda *_: True, 3, None, id="all"),
    ],
)
def test_slow_loading_has_its_share_whenever_it_was(
    tmp_path: Path, slow: Callable[[int, int], bool], epochs: int, stretch: str | None
) -> None:
    """One stretch that is over is named, with nothing to gain; otherwise advice is on workers."""
    model = SlowAtTimes(slow)
    options = {"max_epochs": epochs, "log_every_n_steps": 10}
    verdicts = diagnose(tmp_path, model, **options).verdicts
    share = 4 * NAP * model.slept / (epochs * 40 * STEP + 4 * NAP * model.slept)
    loading = [each for each in verdicts if each.code in ("input-bound", "epoch-restart")]
    assert sum(each.share for each in loading) == pytest.approx(share, rel=0.1)
    (found,) = (each for each in loading if each.code == "input-bound")
    assert (found.severity != "info", found.culprit) == (True, "train_dataloader_next")
    assert found.share > 0.8 * share
    assert (f"Only {stretch} waited" in found.advice) == (stretch is not None)
    assert (found.predicted_speedup == 1) == (stretch is not None)


class SlowForAWhile(Model):
    """Some batches take longer in one phase, or because each of their items takes longer."""

    def __init__(self, phase: str, slow: Callable[[int], bool], larger: bool = False) -> None:
        super().__init__()
        self.phase, self.slow, self.larger, self.slept = phase, slow, larger, 0

    def nap(self, phase: str) -> None:
        if phase == self.phase and self.slow(self.trainer.fit_loop.total_batch_idx):
            self.slept += 1
            CLOCK.sleep(STEP)

    def train_dataloader(self) -> Any:
        module = self

        class Items(Data):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                more = module.larger and module.slow(40 * module.current_epoch + index)
                return torch.ones(2 if more else 1, 8), torch.zeros(2 if more else 1, 1)

        return DataLoader(Items(), collate_fn=lambda items: items[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.nap("forward")
        return super().training_step(batch, batch_idx)

    def backward(self, *args: Any) -> None:
        self.nap("backward")
        super().backward(*args)

    def optimizer_step(self, *args: Any) -> None:
        self.nap("optimizer_step")
        super().optimizer_step(*args)

    def on_train_batch_end(self, *_: Any) -> None:
        self.nap("callbacks")


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer_step"])
@pytest.mark.parametrize(
    ("slow", "text"),
    [
        pytest.param(lambda at: at < 80, "In batches 1 to 79, ", id="first"),
        pytest.param(lambda at: 80 <= at < 120, "In epoch 2, a batch took ", id="epoch"),
        pytest.param(lambda at: 90 <= at < 170, "In batches 90 to 169, ", id="middle"),
        pytest.param(
            lambda at: 40 <= at < 80 or 160 <= at < 200, "In epoch 1 and epoch 4, ", id="two"
        ),
        pytest.param(lambda at: 50 <= at < 185, "In batches 50 to 184, ", id="most"),
        pytest.param(
            lambda at: at // 40 % 2 == 1,
            r"In 3 stretches of about \d\d batches, the first from batch 4\d on, ",
            id="recurring",
        ),
        pytest.param(lambda at: at >= 160, r"From batch 1(5[6-9]|6\d) on, ", id="last"),
    ],
)
def test_a_phase_that_is_slow_for_a_part_of_the_run_is_named(
    tmp_path: Path, phase: str, slow: Callable[[int], bool], text: str
) -> None:
    """What is over has its batches and its whole share, and nothing to gain."""
    model = SlowForAWhile(phase, slow)
    (found, *others) = diagnose(tmp_path, model, max_epochs=6, log_every_n_steps=10).verdicts
    assert (found.code, found.phase, others) == ("slowdown", phase, [])
    assert found.share == pytest.approx(model.slept / (240 + model.slept), rel=0.1)
    assert re.search(text, found.advice)
    over = "This is over" in found.advice
    is_over = text.startswith("In ") and "3 stretches" not in text
    assert (over, found.predicted_speedup == 1) == (is_over, is_over)
    assert not over or found.severity == "warning"


@pytest.mark.parametrize(
    ("slow", "larger"),
    [
        pytest.param(lambda at: 80 <= at < 160, True, id="more work"),
        pytest.param(lambda at: at % 80 < 40, True, id="more work in every other epoch"),
        pytest.param(lambda at: at % 12 < 6, False, id="in turns"),
        pytest.param(lambda at: 100 <= at < 110, False, id="short"),
    ],
)
def test_what_is_no_slow_part_of_the_run_is_healthy(
    tmp_path: Path, slow: Callable[[int], bool], larger: bool
) -> None:
    """Larger batches do more work; turns of a few batches and short stretches are not named."""
    model = SlowForAWhile("forward", slow, larger)
    found = diagnose(tmp_path, model, max_epochs=6, log_every_n_steps=10).verdicts
    assert [each.code for each in found] == ["healthy"]
    assert model.slept


def test_stalls_of_counted_batches_are_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting their FLOPs slows them down, but takes less time than they lose."""
    monkeypatch.setattr(flop_meter, "waited_for_cpu", lambda: 0.0)
    (found,) = blamed(diagnose(tmp_path, StallsOfNewShapes(), Flops(peak_flops=1e9))).values()
    assert found.code == "periodic-stall"
    assert found.evidence["stalls"] == 8


class Heap(Garbage):
    """Collections of other lengths, by the batches in which they occur."""

    naps: Mapping[int, float] = MappingProxyType({})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.nap = self.naps.get(self.global_step)
        if self.nap is not None:
            return super().training_step(batch, batch_idx)
        return Model.training_step(self, batch, batch_idx)

    def collected(self, phase: str, info: Any) -> None:
        if self.collecting and phase == "start":
            CLOCK.sleep(self.nap)


@pytest.mark.parametrize("short", [{}, {3: 0.005}, dict.fromkeys(range(40, 60), 0.001)])
def test_one_long_collection_is_no_verdict(tmp_path: Path, short: dict[int, float]) -> None:
    """It may not come again, however many short ones there are."""
    model = Heap()
    model.naps = {**short, 30: 0.4}
    assert not blamed(diagnose(tmp_path, model))


def test_long_collections_are_not_averaged_with_short_ones(tmp_path: Path) -> None:
    """The advice has the length of those that take the time."""
    model = Heap()
    model.naps = dict.fromkeys(range(80), 0.001) | dict.fromkeys(range(5, 80, 20), 0.2)
    (found,) = blamed(diagnose(tmp_path, model)).values()
    assert found.code == "gc-pauses"
    assert found.evidence["collections"] == pytest.approx(4, abs=1)
    assert found.evidence["seconds_per_collection"] == pytest.approx(0.2, rel=0.2)


class Optimizer(torch.optim.SGD):
    """Takes longer in each step, or in each fourth one."""

    every, count = 1, 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        if self.count % self.every == 0:
            CLOCK.sleep(2 * NAP)
        return super().step(*args, **options)


class OwnOptimizer(Model):
    every = 4

    def configure_optimizers(self) -> Any:
        optimizer = Optimizer(self.parameters(), lr=0.01)
        optimizer.every = self.every
        return optimizer


class LongSteps(OwnOptimizer):
    every = 1


@pytest.mark.parametrize(
    ("model", "accumulated", "phase"),
    [
        (OwnOptimizer, 1, "optimizer_step"),
        (OwnOptimizer, 2, "optimizer_step"),
        (LongSteps, 4, None),
    ],
)
def test_an_optimizer_that_stalls_is_told_from_accumulation(
    tmp_path: Path, model: type[Model], accumulated: int, phase: str | None
) -> None:
    """Each fourth step takes longer, or only each fourth batch has one."""
    options = {"accumulate_grad_batches": accumulated, "max_epochs": 4}
    found = blamed(diagnose(tmp_path, model(), **options))
    assert {code: each.phase for code, each in found.items()} == (
        {"periodic-stall": phase} if phase else {}
    )


class SlowPlots(L.Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        CLOCK.sleep(NAP)


class SlowInValidation(Records):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "loss" in metrics:
            CLOCK.sleep(40 * NAP)


class Measures(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)


@pytest.mark.parametrize(
    ("callbacks", "logger", "culprit", "cost"),
    [
        ([SlowPlots()], False, "SlowPlots.on_validation_batch_end", "20.0 ms"),
        ([], SlowInValidation(), "SlowInValidation.log_metrics", "800 ms"),
    ],
)
def test_what_is_slow_within_validation_is_named(
    tmp_path: Path, callbacks: Any, logger: Any, culprit: str, cost: str
) -> None:
    """A callback or a logger that makes up the time of validation is its culprit."""
    options = {"limit_val_batches": 40, "logger": logger}
    (found,) = blamed(diagnose(tmp_path, Measures(), *callbacks, **options)).values()
    assert (found.code, found.culprit) == ("validation-bound", culprit)
    assert found.advice.startswith(f"{culprit} takes {cost} per call in validation")


class CompiledAgain(Model):
    """Its validation compiles again, as after `torch.compiler.reset`, which takes long."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend=self.slow)(batch[0])

    def slow(self, graph: Any, inputs: Any) -> Any:
        CLOCK.sleep(10 * NAP)
        return graph.forward


@pytest.mark.slow
def test_compilations_within_validation_are_not_training_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither training's forward nor the rest of validation has their time."""
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * CLOCK()))  # as torch times them
    options = {"limit_val_batches": 1, "max_epochs": 4}
    found = diagnose(tmp_path, CompiledAgain(), **options)
    codes = {each.code for each in found.verdicts}
    assert "validation-bound" not in codes
    recompile = next(each for each in found.verdicts if each.code == "recompile")
    assert recompile.evidence["compile_seconds"] == pytest.approx(4 * 10 * NAP, rel=0.1)
    assert recompile.share == pytest.approx(0.8 / 2.4, rel=0.1)


class WebLoader(IterableDataset[Any]):
    """Like webdataset's: a pipeline of stages, the first of which is a DataLoader."""

    def __init__(self, dataset: Any) -> None:
        self.pipeline = [DataLoader(dataset, batch_size=None)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


class Shards(IterableDataset[Any]):
    """40 slow batches of one sample."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(40):
            x, y = Data(NAP)[index]
            yield x[None], y[None]


def test_the_workers_of_a_web_loader_are_advised(tmp_path: Path) -> None:
    """Its DataLoader is the first stage; an iterable dataset must have data for each worker."""

    class Streams(Model):
        def train_dataloader(self) -> Any:
            return WebLoader(Shards())

    (found,) = blamed(diagnose(tmp_path, Streams())).values()
    assert (found.code, found.evidence["num_workers"]) == ("input-bound", 0)
    assert "The dataset is iterable: it must divide its items among the workers" in found.advice


def test_a_sampler_that_starts_slowly_is_not_taken_for_new_workers(tmp_path: Path) -> None:
    """Persistent workers would not hide it: its first indices are drawn in the main process."""

    class Shuffled(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(Data(), sampler=Order(40 * NAP, 0.0), num_workers=1)

    found = blamed(diagnose(tmp_path, Shuffled()))["epoch-restart"]
    assert "1 new worker or the first indices of sampler Order" in found.advice


class OwnIterator(DataLoader[Any]):
    """Works on batches in the main process, beside its workers."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            CLOCK.sleep(NAP)
            yield batch


class Staged(WebLoader):
    """A second stage, in the main process."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.pipeline.append(OwnIterator(dataset, batch_size=None))


@pytest.mark.parametrize(
    "loaders",
    [
        lambda: OwnIterator(Data()),
        lambda: CombinedLoader([DataLoader(Data(), num_workers=1), DataLoader(Data(NAP))]),
        lambda: Staged(Shards()),
    ],
)
def test_no_workers_are_promised_for_what_they_may_not_load(tmp_path: Path, loaders: Any) -> None:
    """2.6x and 5x were promised for work in the main process, and for a second DataLoader."""

    class Fed(Model):
        def train_dataloader(self) -> Any:
            return loaders()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            several = isinstance(batch[0], list)
            return super().training_step(batch[0] if several else batch, batch_idx)

    verdict = blamed(diagnose(tmp_path, Fed()))["input-bound"]
    assert "How much of it more workers hide is not known" in verdict.advice
    assert "advised_step_seconds" not in verdict.evidence


class Rollouts(Shards):
    """Items of a generator."""

    def __init__(self, generate: Any) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return iter(self.generate())


class Agent(Model):
    """Plays with its own policy, as the dataset or the ``collate_fn`` of a DataLoader."""

    kind, workers = "method", 0

    def play(self) -> Iterator[Any]:
        yield from Shards()

    def collate(self, items: Any) -> Any:
        return items

    def train_dataloader(self) -> Any:
        def play() -> Iterator[Any]:
            return self.play()

        class Played(Shards):
            def __iter__(self) -> Iterator[Any]:
                return play()

        dataset = {
            "method": Rollouts(self.play),
            "closure": Rollouts(play),
            "class": Played(),
            "partial": Rollouts(partial(Agent.play, self)),
        }.get(self.kind, Shards())
        if self.kind == "part":
            dataset.policy = {"actor": self.net[0]}  # type: ignore[attr-defined]
        collate = {"collate": self.collate}.get(self.kind)
        return DataLoader(dataset, None, collate_fn=collate, num_workers=self.workers)


@pytest.mark.parametrize("kind", ["method", "closure", "class", "partial", "part", "collate"])
def test_no_workers_are_advised_for_a_dataset_that_uses_the_module(
    tmp_path: Path, kind: str
) -> None:
    """Their copy of it would play with the first weights in each step of training."""
    agent = Agent()
    agent.kind = kind
    verdict = blamed(diagnose(tmp_path, agent))["input-bound"]
    assert "refers to the LightningModule, of which a worker has a copy" in verdict.advice
    assert "num_workers=" not in verdict.advice
    assert "advised_step_seconds" not in verdict.evidence


class Feeds(L.LightningDataModule):
    """Reaches the module by its Trainer, and has what the module has, too."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.dataset = Data(NAP)
        self.dataset.transform = module.transform = torch.nn.ReLU()  # type: ignore[attr-defined]
        module.dataset = self.dataset

    def collate(self, items: Any) -> Any:
        return default_collate(items)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, collate_fn=self.collate)


def test_workers_are_advised_for_the_dataset_of_a_datamodule(tmp_path: Path) -> None:
    """It does not use the module, although its DataModule has a Trainer."""

    class Fed(Model):
        validation_step = L.LightningModule.validation_step

    diagnosis, module = Diagnosis(terminal=False), Fed()
    options = {"max_epochs": 2, "callbacks": [diagnosis]}
    trainer(tmp_path, **options).fit(module, datamodule=Feeds(module))
    assert "num_workers=" in blamed(diagnosis)["input-bound"].advice


def test_a_callback_is_named_with_its_hook_and_a_logger_with_its_method(tmp_path: Path) -> None:
    """The verdicts name both, the callback first, because it runs in each batch."""
    diagnosis = diagnose(
        tmp_path, Logging(), Plots(), logger=SlowLogger(), log_every_n_steps=2, max_epochs=2
    )
    found = blamed(diagnosis)
    assert [*found] == ["callback-bound", "logger-bound"]
    assert found["callback-bound"].culprit == "Plots.on_train_batch_end"
    assert found["logger-bound"].culprit == "SlowLogger.log_metrics"


class Logging(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.slow
def test_a_checkpoint_is_named_with_the_hook_that_writes_it(tmp_path: Path) -> None:
    """A slow disk is attributed to the hook of ``ModelCheckpoint``, a slow module to its own."""
    saves = ModelCheckpoint(tmp_path / "disk", every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "plugins": [SlowDisk()]}
    found = blamed(diagnose(tmp_path, Model(), saves, **options))["checkpoint-bound"]
    assert (found.culprit, found.phase) == ("ModelCheckpoint.on_train_batch_end", "checkpoint")
    saves = ModelCheckpoint(tmp_path / "module", every_n_train_steps=2, save_top_k=-1)
    found = blamed(diagnose(tmp_path, SlowCheckpoint(), saves, enable_checkpointing=True))
    assert found["checkpoint-bound"].culprit == "SlowCheckpoint.on_save_checkpoint"


class SlowStart(L.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        CLOCK.sleep(1.0)


@pytest.mark.slow
def test_a_hook_before_the_first_batch_is_warm_up_alone(tmp_path: Path) -> None:
    """Also in a run of two reports, of which the first one is not left out."""
    found = blamed(diagnose(tmp_path, Model(), SlowStart(), log_every_n_steps=50))
    assert [(code, each.culprit) for code, each in found.items()] == [
        ("warmup", "SlowStart.on_train_start")
    ]
    assert found["warmup"].share == pytest.approx(1.0 / (1.0 + 80 * STEP), abs=0.02)


class PlotsAt(L.Callback):
    """Works in some batches alone."""

    def __init__(self, seconds: float, *batches: int) -> None:
        self.seconds, self.batches = seconds, batches

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx in self.batches:
            CLOCK.sleep(self.seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "code"),
    [(range(2, 40, 4), "callback-bound"), (range(42, 80, 4), "callback-bound"), ([0], "warmup")],
    ids=["at first", "later", "in the first batch"],
)
@pytest.mark.parametrize("before", [False, True], ids=["after ours", "before ours"])
def test_a_callback_that_works_in_a_part_of_the_run_is_named(
    tmp_path: Path, batches: Sequence[int], code: str, before: bool
) -> None:
    """Reports are as rare as the parts; only the first batch is the warm-up."""
    plots = PlotsAt(2.0 / len(batches), *batches)
    options: dict[str, Any] = {"log_every_n_steps": 40, "max_epochs": 3}
    if before:
        options["callbacks"] = [plots, diagnosis := Diagnosis(terminal=False)]
        trainer(tmp_path, **options).fit(Model())
    else:
        diagnosis = diagnose(tmp_path, Model(), plots, **options)
    (found,) = diagnosis.verdicts
    assert (found.code, found.culprit) == (code, "PlotsAt.on_train_batch_end")
    assert found.severity == ("critical" if code == "callback-bound" else "warning")
    assert found.share == pytest.approx(2.0 / (2.0 + 120 * STEP), abs=0.02)


@pytest.mark.slow
def test_the_two_files_of_a_checkpoint_are_one_save(tmp_path: Path) -> None:
    """The interval is that of the saves, whatever follows the last one."""
    saves = ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=30, save_top_k=-1, save_last=True
    )
    options: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 50}
    verdicts = diagnose(tmp_path, SlowCheckpoint(), saves, **options).verdicts
    found = next(each for each in verdicts if each.code == "checkpoint-bound")
    assert (found.evidence["checkpoints"], found.evidence["batches_between"]) == (2, 30)


@pytest.mark.slow
def test_checkpoint_advice_counts_optimizer_steps(tmp_path: Path) -> None:
    """With two batches per step, as many steps are advised as half of the batches."""
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    found = blamed(diagnose(tmp_path, SlowCheckpoint(), saves, **options))["checkpoint-bound"]
    steps = int(found.evidence["advised_every_n_train_steps"])
    assert f"Every {2 * steps} batches" in found.advice
    assert f"every_n_train_steps={steps})" in found.advice


@pytest.mark.slow
def test_a_healthy_run_has_no_verdict(tmp_path: Path) -> None:
    """Neither its warm-up nor gradient accumulation gives a verdict."""
    diagnosis = diagnose(tmp_path, Model(), accumulate_grad_batches=4, max_epochs=3)
    assert not blamed(diagnosis)


def test_the_summary_and_the_metrics_have_the_verdicts(tmp_path: Path) -> None:
    """The summary has the verdicts of the attribute, and their shares are metrics."""
    records = Records()
    diagnosis = diagnose(tmp_path, Model(), Plots(), logger=records)
    path = tmp_path / "records-version_0" / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["verdicts"] == [each.as_dict() for each in diagnosis.verdicts]
    assert sum(summary["stages"]["train"]["windows"]["batches"]) == 80
    assert set(summary["overhead"]) == {"seconds", "share", "recording"}
    shown = (path.parent / "report.html").read_text()
    assert "Plots.on_train_batch_end" in shown
    assert "<script src" not in shown
    share = blamed(diagnosis)["callback-bound"].share
    assert records.of("diagnosis/callback-bound")[-1] == (79, pytest.approx(share))


class CountingRule:
    """A rule of the user's own; records the number of batches at each analysis."""

    code = "mine"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.applied = threading.Event()

    def __call__(self, signals: Signals) -> list[Verdict]:
        self.seen.append(signals.batches)
        self.applied.set()
        return [Verdict("mine", "warning", 0.5, advice="Do it better.")]


class WaitsAtBatch50(Model):
    """Waits at batch 50 until a condition is true.

    The first analysis must be that of batch 40: if one of batch 20 still waited for a CPU, that of
    batch 40 would be left out.
    """

    def __init__(self, done: Callable[[], object]) -> None:
        super().__init__()
        self.done = done

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 49:
            wait_until(lambda: bool(self.done()), 60.0)
            assert self.done()
        return super().training_step(batch, batch_idx)


def test_verdicts_are_updated_during_training(tmp_path: Path) -> None:
    """A rule of the user's own is applied every 40 batches and at the end."""
    mine = CountingRule()
    diagnosis = Diagnosis(rules=[mine], schedule="every 40ba", terminal=False)
    run = trainer(tmp_path, Suite([diagnosis]), log_every_n_steps=10, max_epochs=2)
    run.fit(WaitsAtBatch50(lambda: diagnosis.verdicts))
    # On a busy machine the analysis of batch 80 may run after the final one.
    assert (mine.seen[0], max(mine.seen)) == (40, 80)
    assert [each.code for each in diagnosis.verdicts] == ["mine"]


def test_signals_have_the_work_of_batches_and_the_windows_of_recordings(tmp_path: Path) -> None:
    """The FLOPs are those of each batch, and a short recording between two reports is noticed."""

    class Keeps(CountingRule):
        def __call__(self, signals: Signals) -> list[Verdict]:
            self.signals = signals
            return []

    rule, flops = Keeps(), Flops()
    diagnosis = Diagnosis(rules=[rule], schedule=None, terminal=False)
    profiler = PyTorch(schedule="at 22ba for 2ba")
    options: dict[str, Any] = {"log_every_n_steps": 10, "limit_val_batches": 1}
    trainer(tmp_path, diagnosis, flops, profiler, **options).fit(Model())
    known = rule.signals.flops[np.isfinite(rule.signals.flops)]
    assert set(known) == {flops.metrics["batch_flops"]}
    assert list(np.diff(rule.signals.recordings, prepend=0)) == [0, 0, 0, 1, 0]
    assert rule.signals.setup.validation_loader is not None


def test_long_validations_do_not_delay_windows(tmp_path: Path) -> None:
    """Windows of training depend on training batches, not on those of nested validation."""

    class Ends(CountingRule):
        def __call__(self, signals: Signals) -> list[Verdict]:
            self.ends = [window.last.batch for window in signals.windows]
            return []

    rule = Ends()
    diagnosis = Diagnosis(rules=[rule], schedule=None, terminal=False)
    options: dict[str, Any] = {"val_check_interval": 4, "limit_val_batches": 16, "max_epochs": 2}
    trainer(tmp_path, diagnosis, log_every_n_steps=2, **options).fit(Model())
    assert rule.ends == [2, 10, 20, 30, 40, 50, 60, 70, 80]


def test_the_time_share_of_analyses_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow rule is applied less often than the schedule says."""
    spent: list[float] = []

    class Long(CountingRule):
        def __call__(self, signals: Signals) -> list[Verdict]:
            began = time.thread_time()
            while time.thread_time() < began + 0.03:
                pass
            spent.append(time.thread_time() - began)
            return super().__call__(signals)

    class Waits(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            wait_until(lambda: not diagnosis._collector.analysing, 60.0)

    monkeypatch.setattr(collector, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(collector, "MOST_TIME", 0.01)
    diagnosis, began = Diagnosis(rules=[Long()], schedule="every 20ba", terminal=False), time.time()
    trainer(tmp_path, diagnosis, Waits(), log_every_n_steps=10, max_epochs=12).fit(Model())
    *allowed, _last, _at_the_end = spent
    assert sum(allowed) <= 0.05 + 0.01 * (time.time() - began)


@pytest.mark.parametrize("batches", [40, 80])
def test_the_final_verdicts_are_not_replaced(tmp_path: Path, batches: int) -> None:
    """An analysis that is still running when training ends does not replace them.

    That of the last batch lacks what follows it.
    """
    ended, late = threading.Event(), threading.Event()

    class Late(CountingRule):
        def __call__(self, signals: Signals) -> list[Verdict]:
            self.applied.set()
            at_end = signals.windows[-1].at_end
            if signals.batches == batches and not at_end:
                ended.wait(60.0)
                late.set()
            found = {"batches": signals.batches, "at_end": at_end}
            return [Verdict("mine", "warning", 0.5, evidence=found)]

    class Held(Diagnosis):
        def close(self, context: Any, reason: str) -> None:
            collector = self._collector
            super().close(context, reason)
            if collector is not None:
                ended.set()
                assert late.wait(60.0)
                wait_until(lambda: not collector.analysing, 60.0)

    rule, records = Late(), Records()
    diagnosis = Held(rules=[rule], schedule="every 40ba", terminal=False)
    options = {"log_every_n_steps": 10, "max_epochs": 2, "logger": records}
    trainer(tmp_path, diagnosis, **options).fit(WaitsAtBatch50(rule.applied.is_set))
    (verdict,) = diagnosis.verdicts
    assert verdict.evidence == {"batches": 80, "at_end": True}
    assert records.of("diagnosis/mine")[-1] == (79, 0.5)


def test_a_verdict_starts_a_recording(tmp_path: Path) -> None:
    """A profiler records once after the verdict, and not again when the verdict is repeated."""
    diagnosis = Diagnosis(rules=[CountingRule()], schedule="every 40ba", terminal=False)
    profiler = PyTorch(schedule=OnVerdict("mine", lasting="3ba"))
    options = {"log_every_n_steps": 10, "max_epochs": 2}
    # Metrics are set after schedules have received the verdict.
    model = WaitsAtBatch50(lambda: "diagnosis/mine" in diagnosis.metrics)
    trainer(tmp_path, diagnosis, profiler, **options).fit(model)
    assert len(profiler.saved_traces) == 1
    unrelated = PyTorch(schedule=OnVerdict(["critical"]), folder="none")
    trainer(tmp_path, diagnosis, unrelated, **options).fit(model)
    assert not unrelated.saved_traces


@pytest.mark.parametrize(
    ("rules", "codes", "problem", "suggestion"),
    [
        (
            None,
            ["slowdown", "periodic-stal"],
            "has 'periodic-stal'",
            '["slowdown", "periodic-stall"]',
        ),
        ([CountingRule()], "slowdown", "are critical, healthy, info, mine", '["'),
    ],
)
def test_a_verdict_that_cannot_be_reached_is_refused(
    tmp_path: Path, rules: Any, codes: Any, problem: str, suggestion: str
) -> None:
    """Set-up names the code that no rule has, what there is, and the closest."""
    callbacks = [Flops(schedule=OnVerdict(codes)), Suite([Diagnosis(rules=rules)])]
    with pytest.raises(ConfigError, match=problem) as refused:
        trainer(tmp_path, *callbacks).fit(Small())
    assert f"Try codes={suggestion}" in str(refused.value)


def test_a_verdict_without_a_diagnosis_warns(tmp_path: Path) -> None:
    """Set-up says what to add, once."""
    with pytest.warns(PerfWarning, match=r"is never true: add Diagnosis\(\)") as caught:
        trainer(tmp_path, PyTorch(schedule=OnVerdict("slowdown")), logger=False).fit(Small())
    assert len(ours(caught)) == 1


@pytest.mark.parametrize("every", [10, 1000])
def test_an_interrupted_run_is_diagnosed_up_to_its_end(tmp_path: Path, every: int) -> None:
    """The user's exception propagates, and the document is written, also before a report."""

    class Breaks(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 75:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    diagnosis = Diagnosis(terminal=False)
    run = trainer(tmp_path, diagnosis, Plots(), log_every_n_steps=every, max_epochs=2)
    with pytest.raises(ValueError, match="mine"):
        run.fit(Breaks())
    assert "callback-bound" in blamed(diagnosis)
    assert len(list(tmp_path.rglob("report.html"))) == 1
    train = read_summary(next(tmp_path.rglob("summary.json")))["stages"]["train"]
    assert sum(train["windows"]["batches"]) == train["whole_run"]["batches"] == 75


INTERRUPTED = """
import sys, time
from pathlib import Path
import lightning as L
from helpers.small import Small, trainer
from lightning_perf import Diagnosis

class Breaks(Small):
    def training_step(self, batch, batch_idx):
        if self.global_step == 59:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

class Plots(L.Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.02)

data = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
steps = {"log_every_n_steps": 1000, "max_epochs": 20}
try:
    trainer(Path(sys.argv[0]).parent, Diagnosis(), Plots(), **data, **steps).fit(Breaks())
except SystemExit:  # by Lightning, after the interruption of all ranks
    pass
"""


@pytest.mark.slow
def test_an_interrupted_run_of_two_ranks_is_diagnosed_by_one(tmp_path: Path) -> None:
    """What the other rank took since the last report is not known; rank 0 knows its own part."""
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    launch(script)
    summary = read_summary(next(tmp_path.rglob("summary.json")))
    found = {each["code"]: each for each in summary["verdicts"]}
    assert found["callback-bound"]["culprit"] == "Plots.on_train_batch_end"
    assert found["callback-bound"]["share"] > 0.4


def test_what_follows_the_last_batch_is_in_the_windows(tmp_path: Path) -> None:
    """Also if a report has just been made: they add up to the whole run."""
    options: dict[str, Any] = {"log_every_n_steps": 10, "max_epochs": 1, "limit_val_batches": 4}
    diagnose(tmp_path, SlowValidation(), **options)
    train = read_summary(next(tmp_path.rglob("summary.json")))["stages"]["train"]
    assert sum(train["windows"]["batches"]) == 40
    in_windows = sum(train["windows"]["timings"]["validation"])
    assert in_windows == pytest.approx(train["whole_run"]["timings"]["validation"], rel=0.01)


def test_the_end_shows_a_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the code, the cause and the advice; a short run says that it is too short."""
    run = trainer(tmp_path, Diagnosis(), Plots(), log_every_n_steps=10, max_epochs=1)
    run.fit(Model())
    shown = capsys.readouterr().out
    assert "callback-bound (critical): Plots.on_train_batch_end" in shown
    assert "per call" in shown
    trainer(tmp_path, Diagnosis(), limit_train_batches=5).fit(Model())
    assert "5 measured batches, and a diagnosis needs 30" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ("rank 1", ("straggler", 1, "forward")),
        ("by turns", ("straggler", None, "backward")),
        ("none", ("communication-bound", None, "backward")),
    ],
)
def test_a_late_rank_is_distinguished_from_communication(
    tmp_path: Path, late: str, expected: tuple[object, ...]
) -> None:
    """One rank is slow in forward and the other waits, always or by turns; or both exchange
    gradients slowly.
    """

    class Uneven(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            latest = {"rank 1": 1, "by turns": self.global_step % 2, "none": None}[late]
            hidden = self.net[1](self.net[0](batch[0]))
            if self.global_rank == latest:
                CLOCK.sleep(2 * NAP)
            else:
                # This runs where DDP waits for gradients, after this rank has computed its own.
                waits = partial(CLOCK.sleep, 2 * NAP)
                hidden.register_hook(
                    lambda gradient: Variable._execution_engine.queue_callback(waits)
                )
            return torch.nn.functional.mse_loss(self.net[2](hidden), batch[1])

    diagnose(tmp_path, Uneven(), max_epochs=3, **RANKS)
    (path,) = tmp_path.rglob("summary.json")  # rank 0 is another process
    found = json.loads(path.read_text())["verdicts"][0]
    assert (found["code"], found["rank"], found["phase"]) == expected


@pytest.mark.slow
def test_what_a_module_gathers_is_not_forward(tmp_path: Path) -> None:
    """The strategy's collective has its own name in the table of costs, also without seconds."""

    class Gathers(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.all_gather(batch[0])
            return super().training_step(batch, batch_idx)

    diagnose(tmp_path, Gathers(), **RANKS)
    (path,) = tmp_path.rglob("summary.json")
    costs = {row["name"]: row["calls"] for row in json.loads(path.read_text())["culprits"]}
    assert costs["DDPStrategy.all_gather"] == 2 * 20


def test_other_stages_have_no_diagnosis(tmp_path: Path) -> None:
    """A test run has no verdicts and no page."""
    diagnosis = Diagnosis(terminal=False)
    trainer(tmp_path, diagnosis).test(Small())
    assert diagnosis.verdicts == []
    assert not list(tmp_path.rglob("report.html"))


def test_collections_are_no_longer_timed_after_the_run(tmp_path: Path) -> None:
    """Python's list of garbage-collection callbacks is the same as before the run."""
    before = list(gc.callbacks)
    diagnose(tmp_path, Small(), limit_train_batches=2)
    assert gc.callbacks == before


@pytest.mark.parametrize("options", [{"rules": [1]}, {"rules": 1}, {"terminal": 1}])
def test_bad_arguments_are_refused(options: Any) -> None:
    """Each error names the argument."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Diagnosis(**options)


def test_the_page_is_prepared_before_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is compiled at set-up, so that the end does not import jinja2."""
    prepared: list[int] = []
    diagnosis = Diagnosis(terminal=False)
    fitted = trainer(tmp_path, diagnosis, max_steps=2)
    monkeypatch.setattr(module.charts, "template", lambda: prepared.append(fitted.global_step))
    monkeypatch.setattr(page, "report_page", lambda _: "a page")
    fitted.fit(Small())
    assert prepared == [0]
