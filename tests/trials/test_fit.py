"""A trial within this process: what it records of a fit."""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.held import Ended, Held
from helpers.small import WIDTH, Small, TwoOptimizers, trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_perf.trials import compat
from lightning_perf.trials.changes import CheckpointInterval, LargerBatch, Workers
from lightning_perf.trials.process import TRAINER


def test_losses_of_accumulated_batches_are_whole(tmp_path: Path) -> None:
    """Lightning divides them; before the first step their mean is the loss of the larger batch."""
    base = Held(tmp_path).fit(tmp_path, Small(), accumulate_grad_batches=4)
    larger = LargerBatch({"batch_size": 16, "accumulate_grad_batches": 1})
    ours = Held(tmp_path, larger).fit(tmp_path, Small(), accumulate_grad_batches=4)
    four = [float(each) for each in base["losses"][:4]]
    assert sum(four) / 4 == pytest.approx(float(ours["losses"][0]))


class Course(Dataset[list[Tensor]]):
    """Is told the epoch by the training, or counts what is read."""

    def __init__(self) -> None:
        self.level, self.other, self.read = 0, 1, {"items": 0}
        self.weights = torch.zeros(2)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Tensor]:
        self.read["items"] += 1
        return [torch.full((WIDTH,), 0.1 * index), torch.ones(1)]


class Learner(Small):
    """Changes its dataset before each epoch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def on_train_epoch_start(self) -> None:
        self.change(self.current_epoch)


def test_a_dataset_that_the_training_changes_is_seen(tmp_path: Path) -> None:
    """Also within another dataset, and in a tensor; not the items that it counts itself."""
    for change, expected in (
        (lambda data, epoch: None, False),
        (lambda data, epoch: setattr(data, "level", epoch), True),
        (lambda data, epoch: data.weights.fill_(epoch), True),
    ):
        data = Course()
        loader = DataLoader(Subset(data, range(8)), batch_size=2)
        result = Held(tmp_path, batches=20).fit(tmp_path, Learner(partial(change, data)), loader)
        assert result["dataset_changes"] == expected


class Clock(Dataset[list[Tensor]]):
    """Items say when they were loaded, which takes some seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> list[Tensor]:
        time.sleep(self.seconds)
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        return [torch.ones(WIDTH), torch.ones(1), now]


class SlowFirst(Small):
    """Its first step takes longer than a worker needs for all batches that it loads ahead."""

    def __init__(self, others: float = 0.0) -> None:
        super().__init__()
        self.others, self.loaded, self.ended = others, list[float](), list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.others if self.loaded else 1.0)
        self.loaded.append(float(batch[2][0]))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended.append(time.monotonic())


def ahead(**options: Any) -> DataLoader[Any]:
    """Two workers load 16 batches ahead."""
    return DataLoader(Clock(**options), 1, num_workers=2, prefetch_factor=8)


def test_batches_that_were_loaded_before_are_not_timed(tmp_path: Path) -> None:
    """Such as in a slow first step: they would come faster than workers load."""
    held, module = Held(tmp_path), SlowFirst()
    result = held.fit(tmp_path, module, ahead(seconds=0.1))
    assert result["timed"] == 8
    began = module.ended[result["done"] - 9]
    assert sum(each < began for each in module.loaded[-8:]) <= 1  # of the other worker


def test_workers_that_keep_up_are_timed_with_a_full_queue(tmp_path: Path) -> None:
    result = Held(tmp_path).fit(tmp_path, SlowFirst(0.02), ahead())
    assert result["timed"] == 8
    assert result["done"] >= 16 + 8


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ({"most_seconds": 0.0}, {}, "1 batches: raise --minutes"),
        ({}, {"max_steps": 14}, "14 batches: the training ends"),
    ],
)
def test_a_trial_of_batches_loaded_before_has_no_result(
    tmp_path: Path, spec: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    """It would make a larger prefetch_factor seem faster."""
    result = Held(tmp_path, **spec).fit(tmp_path, SlowFirst(), ahead(), **options)
    assert result["error"] == f"workers load too far ahead to be timed in {why}"


def test_the_first_run_times_what_trials_leave_out(tmp_path: Path) -> None:
    """Its share of the time is known; that some of it was not seen is said."""
    options: Any = {"enable_checkpointing": True, "limit_val_batches": 2}

    def found(least: int) -> dict[str, Any]:
        folder = tmp_path / str(least)
        folder.mkdir()
        held = Held(folder, batches=None, least=least, seconds=0.0)
        return held.fit(folder, Small(), **options)

    long, short = found(20), found(5)
    assert set(long["besides"]) == {"validation", "checkpoint"}
    assert all(long["besides"].values())
    assert sum(long["besides"].values()) < long["seconds"]
    assert not long["notes"]
    assert not any(short["besides"].values())
    assert short["notes"][0].startswith("the first run had no validation and no checkpoint, and ")


def test_trials_of_checkpoints_have_the_metric_that_these_monitor(tmp_path: Path) -> None:
    """It is one of validation; without it none would be written, with the change or without."""

    class Monitored(Small):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("val_loss", super().training_step(batch, batch_idx))

        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(monitor="val_loss")]

    options: Any = {"enable_checkpointing": True, "limit_val_batches": 1}
    held = Held(tmp_path, batches=20, keeps=[*CheckpointInterval.keeps])
    assert held.fit(tmp_path, Monitored(), **options)["besides"]["checkpoint"]


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_workers_have_the_same_batches_after_a_search_of_the_learning_rate(tmp_path: Path) -> None:
    """It loads the first batches, of which workers draw the order before random numbers return."""

    class Searched(Small):
        lr = 0.01

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.lr)

        def configure_callbacks(self) -> Any:
            return [LearningRateFinder(num_training_steps=6)]

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Course(), 2, shuffle=True)

    torch.manual_seed(0)
    (tmp_path / "0").mkdir()
    first, *others = (
        Held(tmp_path / "0", *changes, warm_up=10).fit(tmp_path, Searched())["batches"]
        for changes in ([], [Workers({"num_workers": 2})])
    )
    assert len(first) == 6 + 10
    assert others == [first]
    assert len({*first}) > 8  # each epoch has an order of its own


def test_several_loaders_are_left_as_they_are(tmp_path: Path) -> None:
    """One of them cannot stand for all."""
    loaders = {size: DataLoader(Course(), batch_size=size) for size in (1, 2)}

    class First(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[1], batch_idx)

    result = Held(tmp_path, batches=None, least=2, seconds=0.0).fit(tmp_path, First(), loaders)
    assert result["batch_size"] is None
    assert not [each["loader"] for each in result["candidates"] if each["loader"]]
    assert result["notes"] == ["arguments of several training DataLoaders are not tried"]
    assert {"torch", "numpy", "random"} <= {*result["order"]["first"]}  # is not known


def test_other_loaders_are_named(tmp_path: Path) -> None:
    """Why no arguments of them are tried."""

    class Batches:
        def __iter__(self) -> Iterator[list[Tensor]]:
            yield from [[torch.ones(2, WIDTH), torch.ones(2, 1)]] * 8

    held = Held(tmp_path, batches=None, least=2, seconds=0.0)
    result = held.fit(tmp_path, Small(), Batches())
    assert result["notes"] == ["a Batches is no DataLoader whose arguments are tried"]


@pytest.mark.parametrize("kind", [list, deque])
def test_a_list_of_batches_is_tried(tmp_path: Path, kind: Any) -> None:
    """Their classes cannot be changed."""
    loader = DataLoader(Course(), batch_sampler=kind([[3, 1], [0, 2, 5]]))
    result = Held(tmp_path).fit(tmp_path, Small(), loader)
    assert result["samples"] == ["[3, 1]", "[0, 2, 5]"] * 2


def test_a_fit_without_a_module_fails_as_it_does_by_itself(tmp_path: Path) -> None:
    held = Held(tmp_path)
    made = trainer(tmp_path, held)
    with pytest.raises(Ended):
        held._fit(made.fit, made)
    assert held.result["error"].startswith("TypeError: `model` must be a `Lightning")


def test_an_error_in_a_worker_is_named(tmp_path: Path) -> None:
    """Not the line of torch around it."""

    class Broken(Course):
        def __getitem__(self, index: int) -> list[Tensor]:
            raise OSError(f"no file {index}")

    loader = DataLoader(Broken(), batch_size=2, num_workers=1)
    assert Held(tmp_path).fit(tmp_path, Small(), loader) == {"error": "OSError: no file 0"}


def test_an_error_of_the_first_run_names_the_line_of_the_script(tmp_path: Path) -> None:
    """The innermost one of it, also within a worker, and not that of Lightning."""

    class Broken(Course):
        def __getitem__(self, index: int) -> list[Tensor]:
            return [torch.ones(index) @ torch.ones(3)]

    loader = DataLoader(Broken(), batch_size=2, num_workers=1)
    error = Held(tmp_path, batches=None).fit(tmp_path, Small(), loader)["error"]
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    assert error.endswith(f"({__file__}, line {line})")


def test_weights_tell_what_manual_optimization_has_done(tmp_path: Path) -> None:
    """There is no loss; weights are those after the warm-up or the first epoch."""
    found = [
        Held(tmp_path, batches=20, **fields).fit(tmp_path, TwoOptimizers(), **options)
        for fields in ({}, {"seed": 1})
        for options in ({}, {"limit_train_batches": 3})
    ]
    assert [each["losses"] for each in found] == [[]] * 4
    long, short, *again = (each["weights"] for each in found)
    assert [long, short] == again
    assert long != short


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_steps": 3}])
def test_a_short_training_says_how_long_it_was(tmp_path: Path, options: Any) -> None:
    """It has no time per batch; the process that compares says what to raise."""
    result = Held(tmp_path, batches=None).fit(tmp_path, Small(), **options)
    assert (result["timed"], result["done"]) == (0, options.get("max_steps", 1))


def test_a_script_that_exits_is_named(tmp_path: Path) -> None:
    class Exits(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sys.exit(0)

    error = Held(tmp_path).fit(tmp_path, Exits())["error"]
    assert error == "sys.exit(0) is called in Trainer.fit"
    assert Path(tmp_path, TRAINER).read_text() == "in Trainer.fit"


def test_an_unknown_group_is_refused_where_own_groups_are_known(tmp_path: Path) -> None:
    """The training's packages may have added theirs."""
    error = Held(tmp_path, batches=None, only=("inputs",)).fit(tmp_path, Small())["error"]
    assert error.startswith("ValueError: --only inputs is not a group of changes: batch, ")


def test_what_stands_for_an_experiment_accepts_all(tmp_path: Path) -> None:
    """As scripts use those of W&B, Neptune and Comet."""
    experiment = compat.Discarded(str(tmp_path)).experiment
    experiment.config.update({"a": 1}, allow_val_change=True)
    experiment.summary["best"] = experiment.config["lr"]
    experiment["metrics/loss"].append(0.5)
    experiment.name = "new"
    with experiment.train():
        assert [*experiment.runs] == []
    assert copy.deepcopy(experiment).name == "new"


def test_modules_may_use_wandb_themselves(tmp_path: Path) -> None:
    """As they do beside Lightning's logger, which a trial replaces, and which starts it."""
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            wandb.log({"own": 1})
            return super().training_step(batch, batch_idx)

    try:
        result = Held(tmp_path).fit(tmp_path, Logs(), logger=WandbLogger(save_dir=tmp_path))
    finally:
        wandb.finish()
    assert "error" not in result
    assert not list(tmp_path.glob("*wandb*"))
