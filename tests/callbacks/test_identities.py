"""Numbers of one run agree with each other and with independent counts, whatever the training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
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
        self.validation = self.entered = self.left = 0.0

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
    on_validation_end = on_train_batch_end = on_train_start  # type: ignore[assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.sleep(self.seconds / 8)


class Edges(Diagnosis):
    """Measures training by its own hooks, which are ours, so that both measure the same time."""


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
    "unlimited": st.just(False),
})  # fmt: skip


def train(folder: Path, plan: dict[str, Any]) -> None:
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

        class Ends(SpeedMonitor):
            """Looks at the totals when everything has ended."""

        def look(context: RunContext, reason: str) -> None:
            if context.stage == "train":
                context.stages.settle()
            context.batches.fold("train")
            seen["costs"] = context.spans.totals
            seen["batch"] = context.batches.totals("train")
            seen["progress"] = context.progress
            seen["steps"] = diagnosis._record.signals(diagnosis._setup)
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
        timed = signals.steps[~torch.tensor(signals.steps).isnan().numpy()]
        if len(timed):
            counted = len(timed) == count + 1
            first = signals.first_step if counted else 0.0
            agree("Diagnosis and Timings", timed.sum() - (first or 0.0), seconds)
        agree("windows of Diagnosis", float(signals.wall.sum()), staged)
        logged = sum(
            value * row_batches
            for value, row_batches in _per_report(records, "timings/validation", plan)
        )
        assert logged >= 0
    for _, row in records.rows:
        if "throughput/device/mfu" in row:
            rate = row["throughput/device/flops_per_sec"] / PEAK
            agree("mfu and FLOP/s", row["throughput/device/mfu"], rate)
        if "time/total" in row:
            agree("time", row["time/train"] + row.get("time/val", 0.0), row["time/total"])
        if "throughput/samples_per_sec" in row and not row.get("validate"):
            agree("samples/s", row["throughput/samples_per_sec"],
                  4 * row["throughput/batches_per_sec"])  # fmt: skip


def _per_report(records: Records, key: str, plan: dict[str, Any]) -> list[tuple[float, int]]:
    return [(value, plan["log_every"]) for _, value in records.of(key)]
