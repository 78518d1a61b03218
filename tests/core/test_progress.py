"""Counting batches, samples, tokens and steps with all kinds of data loaders."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.clocks import FakeClock
from helpers.lifecycle_log import LifecycleLog
from helpers.small import Records, Small, TwoOptimizers, ours, trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_perf import Cyclic, PerfWarning, SpeedMonitor, Timestamp, WindowCallback
from lightning_perf.run.batches import BatchCounter

# Lightning's advice on loaders; our warnings stay errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


def loader(samples: int, batch_size: int) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, samples * 8).reshape(samples, 8)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


class Stream(IterableDataset[Any]):
    """Data without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.ones(8) * i / 10, torch.ones(1)) for i in range(10))


def last(folder: Path, model: Small, data: Any = None, **options: Any) -> Timestamp:
    """The progress of training after its last batch."""
    log = LifecycleLog()
    trainer(folder, log, **options).fit(model, data)
    stages = [moment.stage for moment in log.moments]
    return [s for s, stage in zip(log.stamps, stages, strict=True) if stage == "train"][-1]


def counts(stamp: Timestamp) -> tuple[int, ...]:
    return stamp.epoch, stamp.batch, stamp.batch_in_epoch, stamp.sample, stamp.step


def test_an_uneven_last_batch_is_counted_as_it_is(tmp_path: Path) -> None:
    """Ten samples in batches of four are 4 + 4 + 2."""
    assert counts(last(tmp_path, Small(), loader(10, 4), max_epochs=2)) == (1, 6, 3, 20, 6)


def test_data_without_a_length_is_counted(tmp_path: Path) -> None:
    """An iterable dataset without a length is counted, epochs included."""
    stamp = last(tmp_path, Small(), DataLoader(Stream(), batch_size=4), max_epochs=2)
    assert counts(stamp) == (1, 6, 3, 20, 6)


def test_num_samples_replaces_a_missing_length(tmp_path: Path) -> None:
    """num_samples of the datamodule or of a callback gives the fraction of an epoch."""

    class Data(L.LightningDataModule):
        num_samples = 10

        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=4)

    for monitor, data in [
        (SpeedMonitor(), Data()),
        (SpeedMonitor(num_samples=10), DataLoader(Stream(), batch_size=4)),
    ]:
        log = LifecycleLog()
        trainer(tmp_path, log, monitor).fit(Small(), data)
        assert [m.fraction for m in log.moments] == [0.4, 0.8, 1.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("min_size", (0, 2, 2, 8, 2)), ("max_size_cycle", (0, 4, 4, 16, 4))],
)
def test_combined_loaders_are_counted_once(
    tmp_path: Path, mode: Any, expected: tuple[int, ...]
) -> None:
    """A batch of several loaders is one batch, with the samples of one loader."""

    class Both(Small):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            return super().training_step(batch["a"], batch_idx)

        def get_num_samples_in_batch(self, batch: dict[str, Any]) -> int:
            return len(batch["a"][0])

    both = CombinedLoader({"a": loader(16, 4), "b": loader(8, 4)}, mode)
    assert counts(last(tmp_path, Both(), both)) == expected


def test_several_validation_loaders_are_one_stage(tmp_path: Path) -> None:
    """Batches of all loaders are counted, and each validation is one epoch."""
    log = LifecycleLog()
    run = trainer(tmp_path, log, limit_val_batches=2, val_check_interval=8)
    run.fit(Several(), loader(64, 4), [loader(8, 4), loader(12, 4)])
    stamps = [s for m, s in zip(log.moments, log.stamps, strict=True) if m.stage == "validate"]
    assert counts(stamps[-1])[:4] == (1, 8, 4, 32)


class Several(Small):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def test_two_optimizers_make_two_steps_per_batch(tmp_path: Path) -> None:
    """Steps are optimizer steps; batches and reports are not doubled."""

    records, log = Records(), LifecycleLog()
    monitor = SpeedMonitor(window_size=4)
    trainer(tmp_path, log, monitor, logger=records, log_every_n_steps=4).fit(TwoOptimizers())
    assert counts(log.stamps[-1]) == (0, 16, 16, 64, 32)
    assert [step for step, _ in records.of("time/train")] == [3, 7, 11, 15]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"limit_train_batches": 3, "max_epochs": 2}, (1, 6, 3, 24, 6)),
        ({"limit_train_batches": 0.5}, (0, 8, 8, 32, 8)),
        ({"fast_dev_run": 2}, (0, 2, 2, 8, 2)),
        ({"overfit_batches": 2, "max_epochs": 3}, (2, 6, 2, 24, 6)),
        ({"max_steps": 5, "max_epochs": -1}, (0, 5, 5, 20, 5)),
        ({"accumulate_grad_batches": 5}, (0, 16, 16, 64, 4)),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, (1, 32, 16, 128, 32)),
    ],
    ids=str,
)
def test_counts_are_right_under_every_limit(
    tmp_path: Path, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Ending an epoch or the training early keeps the counts correct."""
    assert counts(last(tmp_path, Small(), **options)) == expected


def test_epochs_may_have_different_lengths(tmp_path: Path) -> None:
    """The completed fraction and the windows of an epoch follow from its own length."""

    class Growing(L.LightningDataModule):
        batches = 2

        def train_dataloader(self) -> Any:
            self.batches += 2
            return loader(4 * self.batches, 4)

    class Seen(WindowCallback):
        columns = ("batch/count",)

        def on_window(self, window: Any) -> None:
            seen.append(window.last.batch)

    seen: list[int] = []
    schedule, log = Cyclic(skip_first=5, warmup=0, active=1, per_epoch=True), LifecycleLog()
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    trainer(tmp_path, log, Seen(schedule), **options).fit(Small(), datamodule=Growing())
    fractions = [
        epoch + batch / length for epoch, length in enumerate((4, 6, 8)) for batch in range(length)
    ]
    found = [3 * moment.fraction for moment in log.moments]
    assert found == pytest.approx([*fractions[1:], 3])
    assert seen == [4 + 5, 4 + 6 + 5, 4 + 6 + 8]


@pytest.mark.slow
def test_max_time_defines_the_fraction(tmp_path: Path) -> None:
    """With max_time alone, the fraction is that of the elapsed seconds."""
    log = LifecycleLog()
    options: dict[str, Any] = {"max_epochs": -1, "max_time": {"seconds": 1}}
    trainer(tmp_path, log, **options).fit(Small())
    first, end = log.moments[0], log.moments[-1]
    assert first.fraction == pytest.approx(first.timestamp.total_wct)
    assert 0.8 < (end.fraction or 0) <= 1.0


def test_validation_counts_for_max_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning ends a training after max_time of batches and validation together."""
    clock = FakeClock()
    clock.replace_clocks(monkeypatch)

    class Timed(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.sleep(1.0)
            self.trainer.should_stop = self.trainer.current_epoch + batch_idx == 2
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            clock.sleep(4.0)

    log = LifecycleLog()
    options: dict[str, Any] = {"max_epochs": -1, "max_time": {"seconds": 10}}
    batches = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer(tmp_path, log, **options, **batches).fit(Timed())
    moments = [moment for moment in log.moments if moment.stage == "train"]
    found = [(moment.previous_fraction, moment.fraction) for moment in moments]
    assert found == [(0.0, 0.1), (0.1, 0.2), (0.2, 0.7), (0.7, 0.8)]
    assert [moments[2].ahead(n).previous_fraction for n in (0, 1)] == [0.2, 0.7]


def test_early_stopping_keeps_counts_correct(tmp_path: Path) -> None:
    """A stopped training has correct counts and its last report."""

    class Worse(Small):
        def on_train_epoch_end(self) -> None:
            self.log("score", 1.0)

    log, monitor = LifecycleLog(), SpeedMonitor(window_size=1000)
    stop = EarlyStopping("score", patience=1, check_on_train_epoch_end=True)
    trainer(tmp_path, log, monitor, stop, max_epochs=50).fit(Worse())
    assert counts(log.stamps[-1]) == (1, 32, 16, 128, 32)
    assert "throughput/samples_per_sec" in monitor.metrics


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_tuner_s_trials_are_not_counted(tmp_path: Path) -> None:
    """Learning-rate and batch-size searches do not affect the counts of training."""

    class Tunable(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.01

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    log, monitor, model = LifecycleLog(), SpeedMonitor(window_size=2), Tunable()
    run = trainer(tmp_path, log, monitor)
    Tuner(run).lr_find(model, num_training=5)
    Tuner(run).scale_batch_size(model, max_trials=2, steps_per_trial=2)
    run.fit(model)
    stamp = log.stamps[-1]
    assert stamp.batch == stamp.step == run.global_step
    assert stamp.sample == 64


def test_skipped_batches_keep_counts_consistent(tmp_path: Path) -> None:
    """A training_step that returns None, and a module that ends the epoch early."""

    class Skipping(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 6 else None

    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    assert counts(last(tmp_path, Skipping(), max_epochs=2))[:4] == (1, 12, 6, 48)


def test_counters_of_the_user_have_an_order(tmp_path: Path) -> None:
    """The module's counter takes precedence over the datamodule's, then the callback's."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(8, 4)

        def get_num_samples_in_batch(self, batch: Any) -> int:
            return 3

        def get_num_tokens_in_batch(self, batch: Any) -> int:
            return 5

    class Model(Small):
        def get_num_samples_in_batch(self, batch: Any) -> int:
            return 2

    given = SpeedMonitor(
        get_num_samples_in_batch=lambda batch: 7, get_num_tokens_in_batch=lambda batch: 11
    )
    for model, data, expected in [
        (Model(), Data(), (4, 10)),
        (Small(), Data(), (6, 10)),
        (Small(), loader(8, 4), (14, 22)),
    ]:
        log = LifecycleLog()
        trainer(tmp_path, log, given).fit(model, data)
        stamp = log.stamps[-1]
        assert (stamp.sample, stamp.token) == expected


@pytest.mark.parametrize("bad", [8.0, None, -1, "8"])
def test_a_counter_with_an_invalid_result_warns_once(tmp_path: Path, bad: Any) -> None:
    """Training continues without the figure, and the warning names the function."""

    class Model(Small):
        def get_num_tokens_in_batch(self, batch: Any) -> Any:
            return bad

    monitor = SpeedMonitor(window_size=2)
    with pytest.warns(PerfWarning, match="get_num_tokens_in_batch") as caught:
        trainer(tmp_path, monitor).fit(Model())
    assert len(ours(caught)) == 1
    assert "throughput/tokens_per_sec" not in monitor.metrics


def test_one_batch_that_cannot_be_counted_affects_only_its_window(tmp_path: Path) -> None:
    """The rate is not logged while the batch is in the window."""

    class Odd(Small):
        def get_num_samples_in_batch(self, batch: Any) -> int:
            if self.trainer.global_step == 6:
                raise KeyError("this batch is strange")
            return len(batch[0])

    records = Records()
    with pytest.warns(PerfWarning, match="this batch is strange") as caught:
        trainer(tmp_path, SpeedMonitor(window_size=3), logger=records).fit(Odd())
    assert len(ours(caught)) == 1
    steps = [step for step, _ in records.of("throughput/samples_per_sec")]
    assert steps == [3, 4, 8, 9, 10, 11, 12, 13, 14, 15]
    for _, row in records.rows:
        if "throughput/samples_per_sec" in row:
            ratio = row["throughput/samples_per_sec"] / row["throughput/batches_per_sec"]
            assert ratio == pytest.approx(4)


def test_tokens_of_hugging_face_batches_are_counted(tmp_path: Path) -> None:
    """A mapping with input_ids gives samples and tokens, with or without text entries."""

    class Encoded(Small):
        def train_dataloader(self) -> Any:
            rows = [{"input_ids": torch.ones(8), "text": "words"} for _ in range(12)]
            return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch["input_ids"]).sum()

    log = LifecycleLog()
    trainer(tmp_path, log).fit(Encoded())
    stamp = log.stamps[-1]
    assert (stamp.sample, stamp.token) == (12, 96)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_structure_of_batches_may_change() -> None:
    """The first element may be a tensor, None, a number or a nested tensor, which has no shape."""
    counter = BatchCounter([])
    tensor = torch.zeros(4, 2)
    nested = torch.nested.nested_tensor([torch.zeros(n) for n in (1, 2, 3, 4)])
    firsts = (tensor, None, torch.tensor(1.0), nested)
    batches = [(tensor, None), *((first, tensor) for first in firsts), nested]
    assert [counter.count(batch) for batch in batches] == [(4, 0)] * 6
    scalar_first = BatchCounter([])
    assert [scalar_first.count(batch) for batch in batches[::-1]] == [(4, 0)] * 6
