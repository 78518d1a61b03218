"""Numbers of one run agree with each other and with independent counts, whatever the training."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.clocks import FakeClock
from helpers.small import Records, Small, trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_perf import Diagnosis, Flops, SpeedMonitor, Timings
from lightning_perf.run.context import RunContext
from lightning_perf.timing.totals import CATEGORIES

#: The number of random trainings, and the largest relative difference of two equal numbers.
EXAMPLES, CLOSE = int(os.environ.get("LIGHTNING_PERF_TRAININGS", "40")), 0.02
PEAK = 1e9
#: The largest difference per identity, for the report of a long run.
LARGEST: dict[str, float] = {}


class Source(IterableDataset):
    """Data whose iterator takes long to start, as worker processes do."""

    def __init__(self, clock: FakeClock, batches: int, start: float, fetch: float) -> None:
        self.clock, self.batches, self.start, self.fetch = clock, batches, start, fetch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.clock.sleep(self.start)
        for _ in range(self.batches):
            self.clock.sleep(self.fetch)
            yield torch.ones(4, 8), torch.zeros(4, 1)


class Sized(Source):
    def __len__(self) -> int:
        return self.batches


class Planned(Small):
    """Takes planned times by a clock that only it advances, and counts them itself."""

    def __init__(self, clock: FakeClock, plan: dict[str, Any]) -> None:
        super().__init__()
        self.clock, self.plan = clock, plan
        self.automatic_optimization = not plan["manual"]
        self.steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.steps += 1
        if self.steps == self.plan["fails_at"]:
            raise KeyError("planned")
        self.clock.sleep(0.25)
        if self.automatic_optimization:
            skip = self.plan["skips"] and batch_idx % 3 == 1
            return None if skip else super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            self.clock.sleep(0.125)
            optimizer.zero_grad()
            loss = super(Planned, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.sleep(0.5)
        super().validation_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.clock.sleep(self.plan["after"])

    def train_dataloader(self) -> Any:
        kind = Sized if self.plan["sized"] else Source
        data = kind(self.clock, self.plan["batches"], self.plan["start"], 0.0625)
        return DataLoader(data, batch_size=None)

    def val_dataloader(self) -> Any:
        kind = Sized if self.plan["val_sized"] else Source
        data = kind(self.clock, self.plan["val_batches"], self.plan["val_start"], 0.125)
        return DataLoader(data, batch_size=None)


class Slow(L.Callback):
    """Takes time in hooks, and measures training and the calls of validation from outside."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.validation = 0.0
        #: The ends of batches of training, without validation.
        self.ends: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        run = loop.run

        def measured() -> Any:
            began = self.clock()
            try:
                return run()
            finally:
                if not trainer.sanity_checking:
                    self.validation += self.clock() - began

        loop.run = measured

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.clock.sleep(self.seconds)

    on_train_epoch_start = on_train_epoch_end = on_validation_start = on_train_start
    on_validation_end = on_train_start

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(self.clock() - self.validation)
        self.clock.sleep(self.seconds / 8)


def agree(name: str, left: float, right: float) -> None:
    """Two numbers are equal."""
    off = abs(left - right) / max(abs(left), abs(right), 1e-9)
    LARGEST[name] = max(LARGEST.get(name, 0.0), off)
    assert off <= CLOSE, f"{name}: {left} is not {right}"


PLANS = st.fixed_dictionaries({
    "batches": st.integers(1, 14),
    "val_batches": st.integers(0, 3),
    "start": st.sampled_from([0.0, 0.5, 4.0]),
    "val_start": st.sampled_from([0.0, 1.0, 8.0]),
    "after": st.sampled_from([0.0, 1.0]),
    "hooks": st.sampled_from([0.0, 0.5]),
    "sized": st.booleans(),
    "val_sized": st.booleans(),
    "manual": st.booleans(),
    "skips": st.booleans(),
    "fails_at": st.sampled_from([0, 0, 0, 7]),
    "epochs": st.integers(1, 3),
    "accumulate": st.sampled_from([1, 1, 2, 3]),
    "interval": st.sampled_from([None, None, 2, 3]),
    "log_every": st.sampled_from([1, 3, 5]),
    "sanity": st.sampled_from([0, 2]),
    "reload": st.sampled_from([0, 1]),
})  # fmt: skip


def train(folder: Path, plan: dict[str, Any]) -> None:  # noqa: C901
    """Run a planned training, and compare its numbers."""
    with pytest.MonkeyPatch.context() as patch:
        clock = FakeClock()
        clock.replace_clocks(patch)
        speed = SpeedMonitor(window_size=2, time_unit="seconds", gpu_flops_available=PEAK)
        timings, records, slow = Timings(), Records(), Slow(clock, plan["hooks"])
        diagnosis = Diagnosis(terminal=False, schedule=None)
        run = trainer(
            folder, speed, Flops(schedule="every 1ba", peak_flops=PEAK), timings, diagnosis, slow,
            logger=records, log_every_n_steps=plan["log_every"], max_epochs=plan["epochs"],
            limit_val_batches=1.0 if plan["val_batches"] else 0,
            accumulate_grad_batches=1 if plan["manual"] else plan["accumulate"],
            num_sanity_val_steps=plan["sanity"],
            reload_dataloaders_every_n_epochs=plan["reload"],
            check_val_every_n_epoch=None if plan["interval"] else 1,
            val_check_interval=plan["interval"] or 1.0,
        )  # fmt: skip
        seen: dict[str, Any] = {}

        def look(context: RunContext, reason: str) -> None:
            if context.stage == "train":
                context.stages.settle()
            context.batches.fold("train")
            seen["costs"] = context.spans.totals()
            seen["batch"] = context.batches.totals("train")
            seen["progress"] = context.progress
            seen["steps"] = diagnosis._collector.signals()
            close(context, reason)

        close = timings.close
        patch.setattr(timings, "close", look)
        failing = 0 < plan["fails_at"] <= plan["batches"] * plan["epochs"]
        model = Planned(clock, plan)
        if failing:
            with pytest.raises(KeyError):
                run.fit(model)
        else:
            run.fit(model)
    if "costs" not in seen:
        return
    costs, progress = seen["costs"], seen["progress"]
    view = costs.by_category("train")
    own = costs.by_category("validate", own=True)
    agree("time/val and val_loop.run", progress.validation_seconds, slow.validation)
    within = own["checkpoint"]
    agree("time/val and timings/validation", progress.validation_seconds,
          view["validation"] + within)  # fmt: skip
    agree("validate/timings and timings/validation", sum(own.values()), view["validation"] + within)
    staged = sum(c.seconds for a, c in costs.costs.items() if a.stage in ("train", "validate"))
    total = progress.stages["train"].total_wct + progress.validation_seconds
    agree("time/total and timings", total, staged)
    seconds, count, samples, *_ = seen["batch"]
    signals = seen["steps"]
    if not failing:
        agree("samples and batches", samples, count * 4)
        agree("batches", progress.stages["train"].batch, model.steps)
        assert len(signals.steps) == len(slow.ends) == len(signals.phases) == model.steps
        parts = np.delete(signals.phases, CATEGORIES.index("validation"), axis=1).sum(axis=1)
        for step, part in zip(signals.steps, parts, strict=True):
            if isnan(step):  # the first one, and those that counting slowed down
                continue
            agree("steps and their categories", float(part), float(step))
        if count:
            assert count == model.steps - 1
            agree("batches and their ends", slow.ends[-1] - slow.ends[0], seconds)
        agree("windows of Diagnosis", float(signals.wall.sum()), staged)
    for _, row in records.rows:
        if "throughput/device/mfu" in row:
            rate = row["throughput/device/flops_per_sec"] / PEAK
            agree("mfu and FLOP/s", row["throughput/device/mfu"], rate)
        if "time/total" in row:
            agree("time", row["time/train"] + row.get("time/val", 0.0), row["time/total"])
        if "throughput/samples_per_sec" in row and not row.get("validate"):
            agree("samples/s", row["throughput/samples_per_sec"],
                  4 * row["throughput/batches_per_sec"])  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's, about odd trainings
@given(plan=PLANS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[*HealthCheck])
def test_numbers_of_random_trainings_agree(plan: dict[str, Any]) -> None:
    """Each second, batch and FLOP is in one number, whichever callback reports it."""
    if plan["sized"] and plan["interval"] and plan["interval"] > plan["batches"]:
        plan["interval"] = None  # Lightning refuses it
    with TemporaryDirectory() as folder:
        train(Path(folder), plan)


class Starts(DataLoader):
    """A loader whose iterator takes 8 s by a clock, as one that starts worker processes."""

    clock: FakeClock

    def __iter__(self) -> Any:
        self.clock.sleep(8.0)
        return super().__iter__()


class Evaluated(Small):
    """Batches of 1 s, and loaders that take 8 s to start."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.sleep(1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.clock.sleep(1.0)
        return self.net(batch[0]).sum()

    test_step = predict_step = validation_step

    def val_dataloader(self) -> Any:
        loader = Starts(self._loader().dataset, batch_size=32)
        loader.clock = self.clock
        return loader

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    found.replace_clocks(monkeypatch)
    return found


def test_the_start_of_validation_is_not_training(tmp_path: Path, clock: FakeClock) -> None:
    """Throughput, elapsed times, Timings and Diagnosis' steps have the same boundary."""
    speed = SpeedMonitor(window_size=4, time_unit="seconds")
    timings, records, diagnosis = Timings(), Records(), Diagnosis(terminal=False)
    run = trainer(
        tmp_path, speed, timings, diagnosis, logger=records, val_check_interval=4,
        limit_val_batches=1.0, num_sanity_val_steps=2,
    )  # fmt: skip
    run.fit(Evaluated(clock))
    assert {value for _, value in records.of("throughput/batches_per_sec")} == {1.0}
    assert speed.metrics["time/val"] == 4 * (8 + 2)
    assert speed.metrics["time/train"] == 16
    assert {each for each in diagnosis._diagnosed.steps if not isnan(each)} == {1.0}
    split = [row for _, row in records.rows if "validate/timings/forward" in row]
    parts = {f"validate/timings/{name}" for name in CATEGORIES}
    assert [sum(row[key] for key in parts & row.keys()) for row in split] == [5.0] * 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_start_of_an_evaluation_is_part_of_it(
    tmp_path: Path, clock: FakeClock, stage: str
) -> None:
    """Outside of fit, too, a stage has the time in which its loaders start."""
    speed, timings = SpeedMonitor(window_size=1, time_unit="seconds"), Timings()
    run = trainer(tmp_path, speed, timings, limit_val_batches=1.0, log_every_n_steps=50)
    getattr(run, stage)(Evaluated(clock))
    assert speed.metrics[f"{stage}/time/total"] == 8 + 2
    assert timings.metrics[f"{stage}/timings/dataloader_next"] == 4.0


def test_starts_of_epochs_are_in_the_throughput(tmp_path: Path, clock: FakeClock) -> None:
    """Counting the first batch of an epoch leaves out none of the waiting before it."""

    class Begins(Evaluated):
        def on_train_epoch_start(self) -> None:
            clock.sleep(8.0)

        def train_dataloader(self) -> Any:
            loader = Starts(self._loader().dataset, batch_size=16)
            loader.clock = clock
            return loader

    rates = []
    for flops_per_batch in (None, 1e6):
        model, records = Begins(clock), Records()
        model.flops_per_batch = flops_per_batch
        speed = SpeedMonitor(window_size=12, gpu_flops_available=PEAK)
        flops = Flops(schedule="every 4ba", peak_flops=PEAK)
        run = trainer(tmp_path, speed, flops, logger=records, max_epochs=6, log_every_n_steps=4)
        run.fit(model)
        rates.append([value for _, value in records.of("actual_batches_per_sec")])
        assert speed.metrics["throughput/batches_per_sec"] == pytest.approx(4 / (4 + 8 + 8))
        summary = json.loads(next(tmp_path.glob("*/summary.json")).read_text())
        whole = summary["stages"]["train"]["whole_run"]["throughput"]
        # The first batch is excluded, with the start of its epoch.
        assert whole["batches_per_sec"] == pytest.approx(23 / (23 + 5 * 16), rel=0.01)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    assert rates[0][-5:] == rates[1][-5:] == pytest.approx([0.2] * 5)


def test_hooks_before_the_first_batch_are_not_its_time(tmp_path: Path, clock: FakeClock) -> None:
    """A callback that takes long in on_train_start does not make the first step slow."""
    diagnosis = Diagnosis(terminal=False)
    speed = SpeedMonitor(window_size=4, time_unit="seconds")

    class Begins(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            clock.sleep(100.0)

        on_train_epoch_start = on_train_start

    trainer(tmp_path, diagnosis, speed, Begins()).fit(Evaluated(clock))
    assert diagnosis._diagnosed.first_step == 1.0
    assert speed.metrics["time/train"] == 200 + 16


def test_an_interrupted_validation_ends_the_run(tmp_path: Path, clock: FakeClock) -> None:
    """After an exception in validation, the next fit measures it anew."""

    class Once(Evaluated):
        fails = True

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.fails:
                raise KeyError("planted")

    model, speed = Once(clock), SpeedMonitor(window_size=1, time_unit="seconds")
    run = trainer(tmp_path, speed, limit_val_batches=1.0, num_sanity_val_steps=0)
    with pytest.raises(KeyError):
        run.fit(model)
    model.fails = False
    model.train()
    again = trainer(tmp_path, speed, limit_val_batches=1.0, num_sanity_val_steps=0)
    again.fit(model)
    assert speed.metrics["time/val"] == 10
    assert speed.metrics["throughput/batches_per_sec"] == 1.0


def test_collections_in_validation_are_not_training_s(tmp_path: Path, clock: FakeClock) -> None:
    """They are subtracted from validation, and training's phases keep their time."""

    class Collects(Evaluated):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            gc.collect()

    def slow(phase: str, _: Any) -> None:
        if phase == "stop" and diagnosis._collector is not None:
            clock.sleep(3.0)

    diagnosis = Diagnosis(terminal=False, schedule=None)
    run = trainer(tmp_path, diagnosis, limit_val_batches=1.0, log_every_n_steps=4)
    gc.callbacks.append(slow)  # before ours, which then measures its time
    gc.disable()
    try:
        run.fit(Collects(clock))
    finally:
        gc.enable()
        gc.callbacks.remove(slow)
    signals = diagnosis._diagnosed
    assert signals.category("forward").sum() == 16.0
    assert signals.category("validation").sum() == 8.0  # two collections less


def test_each_epoch_begins_where_it_really_does(tmp_path: Path, clock: FakeClock) -> None:
    """Epochs that end early have their own first batches, which steps within epochs exclude."""

    class Early(Evaluated):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 + self.current_epoch else None

    diagnosis = Diagnosis(terminal=False)
    trainer(tmp_path, diagnosis, max_epochs=3).fit(Early(clock))
    assert diagnosis._diagnosed.firsts.tolist() == [0, 3, 7]
