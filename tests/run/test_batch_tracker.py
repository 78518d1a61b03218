"""Batches whose counting is deferred give the same results as batches that are counted at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Records, Small, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_perf import Flops, SpeedMonitor, Suite, WindowCallback
from lightning_perf.core.window import Window
from lightning_perf.run import batch_tracker, flop_meter
from lightning_perf.run.context import RunContext
from lightning_perf.run.stages import Counters

PACKS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x, x],
    "tuple": lambda x: (x, x),
    "dict": lambda x: {"x": x, "y": x},
    "tensor": lambda x: x,
}


class Packed(Small):
    """Trains on batches of eight rows, with a few of four rows, in one of four containers."""

    def __init__(self, pack: str) -> None:
        super().__init__()
        self.pack = pack

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["x"]
        return self.net(batch if isinstance(batch, Tensor) else batch[0]).square().mean()

    def train_dataloader(self) -> Any:
        sizes = [4 if number % 11 == 5 else 8 for number in range(40)]
        return DataLoader([PACKS[self.pack](torch.ones(n, 8)) for n in sizes], batch_size=None)


class RecordKeeper(SpeedMonitor):
    """Keeps the record of each batch, without its time, and the counts in checkpoints."""

    def __init__(self) -> None:
        super().__init__(4)
        self.records: list[Any] = []
        self.deferred = 0

    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        context.batches.listeners.append(
            lambda stage, records: self.records.extend((stage, *each[1:]) for each in records)
        )
        self.tracker = context.tracker


class SavesState(L.Callback):
    """Calls `state_dict` of a callback at each batch of a list, as a checkpoint does."""

    def __init__(self, keeps: RecordKeeper, *batches: int) -> None:
        self.keeps, self.batches = keeps, batches
        self.counts: list[dict[str, Any]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.keeps.deferred += bool(self.keeps.tracker._deferred)
        if args[-1] in self.batches:
            state = self.keeps.state_dict()["progress"]["stages"]["train"]
            self.counts.append({key: n for key, n in state.items() if not key.endswith("wct")})


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 17}], ids=str
)
def test_deferred_batches_are_counted_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, options: dict[str, Any]
) -> None:
    """The records, the steps of all reports and the contents of checkpoints are the same."""
    monkeypatch.setattr(flop_meter, "_SETTLED", 4)
    found = []
    for most, folder in ((1000, "deferred"), (0, "at once")):
        monkeypatch.setattr(batch_tracker, "_MOST_DEFERRED", most)
        keeps, records = RecordKeeper(), Records()
        saves = SavesState(keeps, 7, 23, 39)
        ours = Suite([keeps, Flops("every 9ba", peak_flops=1e12)])
        run = trainer(
            tmp_path / folder, ours, saves, logger=records, max_epochs=2, log_every_n_steps=10,
            limit_val_batches=2 if "val_check_interval" in options else 0, **options,
        )  # fmt: skip
        run.fit(Packed(pack))
        steps = [(step, sorted(row)) for step, row in records.rows]
        found.append((keeps.records, saves.counts, steps, records.of("batch_flops")))
        assert bool(keeps.deferred) == bool(most)
    assert found[0] == found[1]
    assert len(found[0][1]) == 6
    assert sum(stage == "train" for stage, *_ in found[0][0]) == 80


class ChangesBatch(Small):
    """Removes 4 or 8 rows from its batch and keeps 2."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch.pop("x")).square().mean()

    def train_dataloader(self) -> Any:
        rows = [{"x": torch.ones(4 + 4 * (i % 2), 8), "y": torch.ones(2)} for i in range(30)]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def test_a_step_may_change_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FLOPs are those of the batch that the step received, before it removed rows."""
    monkeypatch.setattr(flop_meter, "_SETTLED", 4)
    keeps = RecordKeeper()
    trainer(tmp_path, keeps, logger=Records(), log_every_n_steps=1000).fit(ChangesBatch())
    counted = [cost.total for _, _, _, cost, *_ in keeps.records]
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


def test_an_interrupt_while_deferred_batches_are_counted_loses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt loses one batch; a checkpoint of the interrupted training holds all others."""
    monkeypatch.setattr(flop_meter, "_SETTLED", 4)
    add = Counters.add

    def interrupted(self: Counters, *args: Any) -> float:
        if self.batch == 31:
            monkeypatch.setattr(Counters, "add", add)
            raise KeyboardInterrupt
        return add(self, *args)

    monkeypatch.setattr(Counters, "add", interrupted)
    keeps = RecordKeeper()
    run = trainer(tmp_path, keeps, SavesState(keeps, 36), logger=Records(), log_every_n_steps=1000)
    with pytest.raises(SystemExit):
        run.fit(Packed("list"))
    assert keeps.deferred
    assert not keeps.tracker._deferred
    assert keeps.state_dict()["progress"]["stages"]["train"]["batch"] == 36
