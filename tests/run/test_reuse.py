"""Trainers, modules and callbacks that are used again: each function counts its own batches."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import lightning as L
import pytest
from helpers.small import Records, Small, trainer
from lightning.pytorch.tuner import Tuner

from lightning_perf import SpeedMonitor, always_on
from lightning_perf.extend import Profiler
from lightning_perf.tracking.summary import summaries_in

pytestmark = pytest.mark.slow

Counts = dict[str, int]


class Counting(Small):
    """Counts the batches of each stage itself, without those of sanity checking."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size)
        self.lr, self.counts = 0.01, Counter[str]()

    def training_step(self, *arguments: Any) -> Any:
        self.counts["train"] += 1
        return super().training_step(*arguments)

    def validation_step(self, *arguments: Any) -> None:
        self.counts["validate"] += not self.trainer.sanity_checking
        super().validation_step(*arguments)

    def test_step(self, *arguments: Any) -> None:
        self.counts["test"] += 1
        super().test_step(*arguments)


class Named(Records):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.folder)


def new(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    ours = callbacks or (always_on(show_summary=False),)
    return trainer(
        folder, *ours, logger=Named(folder), **{"limit_val_batches": 3, "max_epochs": 1} | options
    )


def check(folder: Path, counted: Counts, samples: int = 4) -> None:
    """The latest summary has as many batches of each stage as the module counted."""
    stages = summaries_in(folder / "records-version_0")[-1][1]["stages"]
    whole = {stage: windows["whole_run"] for stage, windows in stages.items()}
    batches = {stage: window["batches"] for stage, window in whole.items()}
    assert {**batches, **counted} == batches
    assert batches.keys() - counted.keys() <= {"validate_alone"}  # before the fit
    for window in whole.values():
        rates = window["throughput"]
        assert rates["samples_per_sec"] == pytest.approx(samples * rates["batches_per_sec"])
        assert sum(window["timings"].values()) <= 1.5 * window["seconds"] + 1


def fits_again(folder: Path) -> None:
    run, model = new(folder), Counting()
    run.fit(model)
    check(folder, model.counts)
    run.validate(model, verbose=False)
    run.fit_loop.max_epochs = 3
    model.counts.clear()
    run.fit(model)
    run.test(model, verbose=False)
    check(folder, model.counts)


def fits_another_module(folder: Path) -> None:
    run, model = new(folder), Counting(8)
    run.fit(Counting())
    run.fit_loop.max_epochs = 2
    run.fit(model)
    check(folder, model.counts, samples=8)


def is_tuned(folder: Path) -> None:
    run, model = new(folder), Counting()
    tuner = Tuner(run)
    tuner.lr_find(model, num_training=8)
    tuner.scale_batch_size(model, max_trials=1, steps_per_trial=2, init_val=2)
    model.counts.clear()
    run.fit(model)
    check(folder, model.counts, samples=model.batch_size)


def resumes(folder: Path) -> None:
    run = new(folder / "first")
    run.fit(Counting())
    run.save_checkpoint(folder / "c.ckpt")
    model = Counting()
    new(folder, max_epochs=2).fit(model, ckpt_path=folder / "c.ckpt")
    check(folder, model.counts)


def alternates(folder: Path) -> None:
    runs = {name: (new(folder / name), Counting()) for name in "ab"}
    for epochs in (1, 2):
        for name, (run, model) in runs.items():
            model.counts.clear()
            run.fit_loop.max_epochs = epochs
            run.fit(model)
            check(folder / name, model.counts)


def trains_in_threads(folder: Path) -> None:
    runs = {name: (new(folder / name), Counting()) for name in "ab"}
    threads = [Thread(target=run.fit, args=(model,)) for run, model in runs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (_, model) in runs.items():
        check(folder / name, model.counts)


def is_copied(folder: Path) -> None:
    ours = always_on(show_summary=False)
    before = pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)
    run = new(folder / "original", ours)
    copied = copy.deepcopy(run)
    run.fit(Counting())
    after = pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)
    runs = [new(folder / str(at), each) for at, each in enumerate((*before, *after))]
    for each in (*runs, copied):
        model = Counting()
        each.fit(model)
        check(Path(each.default_root_dir), model.counts)


@pytest.mark.filterwarnings("ignore:.*(batch size|learning rate|weights_only).*")
@pytest.mark.parametrize(
    "use",
    [fits_again, fits_another_module, is_tuned, resumes, alternates, trains_in_threads, is_copied],
)
def test_a_trainer_that_is_used_again_counts_its_batches(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    """Batches and samples of the summary are those that the module counted in the last fit."""
    use(tmp_path)


class Files(Profiler):
    """Writes a file in each window."""

    def record(self, path: Path, context: Any, warmup: int) -> Any:
        yield None
        path.write_text("a batch")


class Fails(L.Callback):
    """Fails once, before a batch."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 5 and trainer.fit_loop.epoch_loop.total_batch_idx == 5:
            raise ValueError("once")


def test_a_fit_after_one_that_failed_begins_its_epoch_again(tmp_path: Path) -> None:
    """All windows are recorded, and time is left until the last batch."""
    profiler, monitor = Files("every 3ba for 1ba"), SpeedMonitor(window_size=1)
    logger, module = Named(tmp_path), Small()
    run = trainer(tmp_path, Fails(), profiler, monitor, logger=logger, limit_train_batches=10)
    with pytest.raises(ValueError, match="once"):
        run.fit(module)
    run.fit(module)
    assert [stamp.batch for stamp, _ in profiler.saved_traces] == [4, 7, 10, 13]
    *before, last = (left for _, left in logger.of("time/remaining_estimate"))
    assert last == 0.0 < min(before)
