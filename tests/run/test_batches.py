"""Each batch is counted as it ends: with its own FLOPs, and before callbacks see its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Records, Small, ours, trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

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


class Lists(Small):
    """Trains on the mean of whatever tensors are in a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return self.net(torch.stack([leaf.float().mean().expand(8) for leaf in tensors])).mean()

    validation_step = predict_step = training_step  # type: ignore[assignment]


def image(number: int) -> Tensor:
    return torch.ones(3, 8 + number % 3, 8)


def labelled(number: int) -> tuple[Tensor, dict[str, Tensor]]:
    return image(number), {"boxes": torch.ones(number % 3, 4), "labels": torch.ones(number % 3)}


def columns(samples: list[Any]) -> Any:
    """As torchvision collates samples for detection."""
    return tuple(zip(*samples, strict=True))


class Rows:
    """An iterable that is no loader."""

    def __iter__(self) -> Any:
        return iter([torch.ones(3, 8)] * 2)


IMAGES, LABELLED = [image(n) for n in range(10)], [labelled(n) for n in range(10)]
SOUNDS = [{"audio": torch.ones(1, 99), "name": "x"} for _ in range(10)]
PAIRS = [(torch.ones(8), torch.ones(1))] * 10
PACKED = [(torch.ones(6, 8), torch.ones(6))] * 2
LISTS: dict[str, Any] = {"batch_size": 4, "collate_fn": list}
#: A data loader, and the samples of its batches.
LOADERS: dict[str, tuple[Any, list[int]]] = {
    "a list": (DataLoader(IMAGES, **LISTS), [4, 4, 2]),  # type: ignore[arg-type]
    "of dicts": (DataLoader(SOUNDS, **LISTS), [4, 4, 2]),  # type: ignore[arg-type]
    "lists": (DataLoader(LABELLED, 4, collate_fn=columns), [4, 4, 2]),  # type: ignore[arg-type]
    "a dict of lists": (
        DataLoader(LABELLED, 4, collate_fn=lambda rows: dict(enumerate(columns(rows)))),  # type: ignore[arg-type]
        [4, 4, 2],
    ),
    "a short list": (DataLoader(IMAGES[:5], 8, collate_fn=list), [5]),  # type: ignore[arg-type]
    "a batch sampler": (
        DataLoader(IMAGES, batch_sampler=BatchSampler(range(10), 4, False), collate_fn=list),  # type: ignore[arg-type]
        [4, 4, 2],
    ),
    "tensors": (DataLoader(PAIRS, 4), [4, 4, 2]),  # type: ignore[arg-type]
    "as many tensors as samples": (DataLoader(PAIRS[:5], 2), [2, 2, 1]),  # type: ignore[arg-type]
    "batches in one item": (
        DataLoader(PACKED, 1, collate_fn=lambda one: one[0]),  # type: ignore[arg-type]
        [6, 6],
    ),
    "no loader": (Rows(), [3, 3]),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_samples_are_inferred_from_the_batch_size_of_the_loader(
    tmp_path: Path, name: str, stage: str
) -> None:
    """Lists of samples count with their length, also the shorter one at the end of an epoch."""
    loader, expected = LOADERS[name]
    keeps = RecordKeeper()
    run = trainer(tmp_path, keeps, logger=Records(), limit_val_batches=1.0, max_epochs=1)
    if stage == "fit":
        run.fit(Lists(), loader, loader)
        expected = 2 * expected  # of training, and of validation inside of it
    else:
        run.predict(Lists(), loader)
    assert [record.samples for record in keeps.records] == expected


def first_time(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Time is the first dimension, samples the second one."""
    x = torch.stack(rows, 1)
    return x, x[:, :, 0]


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.cat([row[: 3 + n] for n, row in enumerate(rows)])[:, 0].long()
    lengths = torch.arange(3, 3 + len(rows))
    return {"input_ids": ids, "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()}


def flattened(rows: list[Tensor]) -> dict[str, Tensor]:
    """As transformers.DataCollatorWithFlattening."""
    positions = torch.cat([torch.arange(3 + n) for n, _ in enumerate(rows)])[None]
    return {"input_ids": torch.ones_like(positions), "position_ids": positions}


class Unsized(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(11, 5)] * 10)


@pytest.mark.parametrize("collate", [first_time, packed, flattened])
@pytest.mark.parametrize("data", [[torch.ones(11, 5)] * 10, Unsized()], ids=["list", "unsized"])
def test_samples_elsewhere_than_in_the_first_dimension(
    tmp_path: Path, collate: Any, data: Any
) -> None:
    """Where a full batch contradicts the batch size of its loader, something else is counted."""
    keeps = RecordKeeper()
    loader = DataLoader(data, 4, collate_fn=collate)
    trainer(tmp_path, keeps, logger=Records(), limit_val_batches=0).fit(Lists(), loader)
    assert [record.samples for record in keeps.records] == [4, 4, 2]


def test_a_batch_size_that_the_batches_contradict_gives_one_warning(tmp_path: Path) -> None:
    """The first dimension is counted, and the warning says what to define."""
    keeps = RecordKeeper()
    loader = DataLoader([torch.ones(11, 5)] * 10, 4, collate_fn=torch.cat)  # type: ignore[arg-type]
    run = trainer(tmp_path, keeps, logger=Records(), limit_val_batches=0, max_epochs=2)
    with pytest.warns(UserWarning, match=r"44 samples.*batch_size=4.*get_num_samples") as caught:
        run.fit(Lists(), loader)
    assert len(ours(caught)) == 1
    assert [record.samples for record in keeps.records] == 2 * [44, 44, 22]
