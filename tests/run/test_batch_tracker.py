"""Each batch is counted as it ends: with its own FLOPs, and before callbacks see its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Records, Small, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_perf import SpeedMonitor, WindowCallback
from lightning_perf.core.window import Window
from lightning_perf.run.batches import BatchRecord
from lightning_perf.run.context import RunContext


class RecordKeeper(SpeedMonitor):
    """Keeps the record of each batch."""

    def __init__(self) -> None:
        super().__init__(4)
        self.records: list[BatchRecord] = []

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        context.batches.listeners.append(lambda _, records: self.records.extend(records))


class ChangesBatch(Small):
    """Removes 4 or 8 rows from its batch and keeps 2."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch.pop("x")).square().mean()

    def train_dataloader(self) -> Any:
        rows = [{"x": torch.ones(4 + 4 * (i % 2), 8), "y": torch.ones(2)} for i in range(30)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def test_a_step_may_change_its_batch(tmp_path: Path) -> None:
    """The FLOPs are those of the batch that the step received, before it removed rows."""
    keeps = RecordKeeper()
    trainer(tmp_path, keeps, logger=Records(), log_every_n_steps=1000).fit(ChangesBatch())
    counted = [record.cost.total for record in keeps.records if record.cost is not None]
    assert counted == 15 * [4 * FLOPS_PER_SAMPLE, 8 * FLOPS_PER_SAMPLE]


class ChangesDeclaration(Small):
    """Declares twice as many FLOPs per batch after ten batches."""

    def __init__(self, number: Any = 1000) -> None:
        super().__init__()
        self.flops_per_batch = number

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 10:
            self.flops_per_batch *= 2


class Sums(WindowCallback):
    columns = ("flops/model", "batch/count")
    found: tuple[float, float] = (0.0, 0.0)

    def on_window(self, window: Window) -> None:
        if window.at_end and window.stage == "train":
            self.found = tuple(window.total(name) for name in self.columns)  # type: ignore[assignment]


def test_a_changed_declaration_applies_from_its_batch(tmp_path: Path) -> None:
    """If declared FLOPs change between reports, each batch counts with the number at its time."""
    sums = Sums()
    options: dict[str, Any] = {"max_epochs": 2, "log_every_n_steps": 1000}
    trainer(tmp_path, sums, logger=Records(), limit_val_batches=0, **options).fit(
        ChangesDeclaration()
    )
    # The first of 32 batches is not timed.
    assert sums.found == (9 * 1000 + 22 * 2000, 31)


def test_a_declaration_that_raises_gives_one_warning(tmp_path: Path) -> None:
    """Later batches are counted without FLOPs, and training continues."""

    class Breaks(Small):
        @property
        def flops_per_batch(self) -> int:
            if self.global_step > 10:
                raise OSError("gone")
            return 1000

    sums = Sums()
    run = trainer(tmp_path, sums, logger=Records(), limit_val_batches=0, log_every_n_steps=1000)
    with pytest.warns(UserWarning, match="flops_per_batch failed"):
        run.fit(Breaks())
    assert (run.global_step, sums.found[1]) == (16, 15)


class HasBatchHook(SpeedMonitor):
    """Implements `after_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def after_batch(self, context: RunContext, batch: Any) -> None:
        self.seen.append(context.counters.batch)


def test_a_callback_with_after_batch_sees_current_counts(tmp_path: Path) -> None:
    """`after_batch` sees counts that include its batch."""
    looks = HasBatchHook()
    trainer(tmp_path, looks, logger=Records(), log_every_n_steps=1000).fit(Small())
    assert looks.seen == list(range(1, 17))
