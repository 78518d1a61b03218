"""Each change: when it is proposed, and that it changes what it says."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.small import Small, trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_perf import Verdict
from lightning_perf.extend import CHANGES, Change
from lightning_perf.trials import changes, compat
from lightning_perf.trials.changes import Seen, change_of, proposals
from lightning_perf.trials.trial import digest, kind_of_items


def verdict(code: str, **evidence: float) -> Verdict:
    return Verdict(code, "warning", 0.5, evidence=evidence)


#: Proposed as well where torch has several threads.
THREADS = [f"torch.set_num_threads({n // 2})" for n in [torch.get_num_threads()] if n > 1]


def seen(tmp_path: Path, *verdicts: Verdict, loader: Any = None, **options: Any) -> Seen:
    module, restarts = options.pop("module", None) or Small(), options.pop("restarts", False)
    made = trainer(tmp_path, **options)
    made.strategy.connect(module)
    loader = loader or DataLoader(list(range(64)), batch_size=4)
    return Seen(made, module, loader, {each.code: each for each in verdicts}, 4, restarts)


def names(found: Seen, *only: str) -> list[str]:
    return [change.name for change in proposals(found, only)]


def test_waiting_for_data_proposes_workers(tmp_path: Path) -> None:
    """The advised number, which has a prediction, and twice as many."""
    waits = verdict("input-bound", advised_workers=2, advised_step_seconds=0.1)
    found = seen(tmp_path, waits)
    assert names(found) == ["num_workers=2", "num_workers=4", *THREADS]
    predicted = [change.predicted(found) for change in proposals(found, ("input",))]
    assert predicted == [pytest.approx(2.0), None]
    assert names(found, "precision") == []


def test_what_may_gain_most_is_tried_first(tmp_path: Path) -> None:
    """There may be no time for all; what is set besides the workers is in the name."""
    loads = Verdict("input-bound", "warning", 0.06)
    logs = verdict("logger-bound", advised_log_every_n_steps=12)
    found = names(seen(tmp_path, loads, logs, restarts=True), "input", "logging")
    assert found == [
        "log_every_n_steps=12", "num_workers=4, persistent_workers=True",
        "num_workers=8, persistent_workers=True",
    ]  # fmt: skip


def test_uncertain_advice_is_tried(tmp_path: Path) -> None:
    """Without a number in the verdict, such as beside other programs, a trial decides."""
    found = names(seen(tmp_path, verdict("input-bound")))
    assert found == ["num_workers=4", "num_workers=8", *THREADS]


def test_workers_that_start_in_each_epoch_are_kept(tmp_path: Path) -> None:
    loader = DataLoader(list(range(64)), num_workers=1)
    starts = verdict("epoch-restart")
    found = names(seen(tmp_path, starts, loader=loader, restarts=True))
    assert found == ["persistent_workers=True", "num_workers=0"]
    reloads = {"reload_dataloaders_every_n_epochs": 1, "restarts": True}
    found = names(seen(tmp_path, starts, loader=loader, **reloads))
    assert found == ["num_workers=0"]


@pytest.mark.parametrize(
    ("loader", "codes", "options", "stay"),
    [
        ({}, [], {"restarts": True}, True),
        ({}, [], {}, False),  # a trial has no end of an epoch: nothing is measured of it
        ({}, [], {"restarts": True, "reload_dataloaders_every_n_epochs": 1}, False),
        ({"num_workers": 1}, [], {"restarts": True}, False),  # the script's choice
        ({"num_workers": 1}, ["epoch-restart"], {"restarts": True}, True),
        ({"num_workers": 1, "persistent_workers": True}, [], {"restarts": True}, False),
    ],
)
def test_workers_stay_only_where_that_is_measured(
    tmp_path: Path, loader: Any, codes: list[str], options: Any, stay: bool
) -> None:
    """What is proposed has no more arguments than are needed."""
    waits = [verdict(code) for code in ("input-bound", *codes)]
    data = DataLoader(list(range(64)), **loader)
    first = next(iter(proposals(seen(tmp_path, *waits, loader=data, **options))))
    assert first.loader == {"num_workers": 4, **({"persistent_workers": True} if stay else {})}


@pytest.mark.parametrize(
    ("given", "unset"),
    [
        ({}, {}),
        ({"persistent_workers": True, "timeout": 9}, {"persistent_workers": False, "timeout": 0}),
        (
            {"prefetch_factor": 4, "multiprocessing_context": "spawn"},
            {"prefetch_factor": None, "multiprocessing_context": None},
        ),
    ],
)
def test_what_needs_workers_goes_with_them(tmp_path: Path, given: Any, unset: Any) -> None:
    """DataLoader refuses it without workers; the line to write is valid."""
    loader = DataLoader(list(range(64)), num_workers=1, **given)
    (change,) = proposals(seen(tmp_path, verdict("cpu-saturated"), loader=loader), ("input",))
    assert change.loader == {"num_workers": 0, **unset}
    DataLoader(list(range(64)), **(given | change.loader))
    compat.change_loader(loader, change.loader)
    assert len(list(loader)) == 64


def test_what_takes_the_time_is_tried(tmp_path: Path) -> None:
    """Faster computing is of no use where most of the time is something else."""
    assert "torch.compile of layers" in names(seen(tmp_path))
    assert "torch.compile of layers" in names(seen(tmp_path, verdict("cpu-saturated")))
    assert "torch.compile of layers" not in names(seen(tmp_path, verdict("gc-pauses")))


def test_own_computing_proposes_faster_computing(tmp_path: Path) -> None:
    """Accumulated batches are computed at once; nothing of CUDA is proposed on a CPU."""
    module = Small()
    module.image = nn.Conv2d(1, 1, 1)
    found = seen(tmp_path, verdict("healthy"), module=module, accumulate_grad_batches=4)
    given = names(found)
    assert {"batch_size=16", "torch.compile of layers", "channels_last"} <= set(given)
    assert ("precision=bf16-mixed" in given) == compat.computes_bfloat16(torch.device("cpu"))
    assert not {"pin_memory=True", 'torch.set_float32_matmul_precision("high")'} & set(given)


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 2}, {"limit_train_batches": 8}, {"overfit_batches": 8},
        {"callbacks": [GradientAccumulationScheduler({0: 4})]},
    ],
)  # fmt: skip
def test_batches_that_are_counted_stay(tmp_path: Path, options: Any) -> None:
    """Fewer of them in an epoch would be another training, or none."""
    if "callbacks" not in options:
        options = {"accumulate_grad_batches": 4, **options}
    found = seen(tmp_path, verdict("healthy"), **options)
    found.trainer.accumulate_grad_batches = 4
    assert names(found, "batch") == []


def test_intervals_are_those_of_the_advice(tmp_path: Path) -> None:
    found = seen(
        tmp_path,
        verdict("logger-bound", advised_log_every_n_steps=400, advised_step_seconds=0.1),
        verdict("validation-bound"),
        verdict("checkpoint-bound", advised_every_n_train_steps=40),
        accumulate_grad_batches=2,
    )
    assert names(found) == [
        "log_every_n_steps=400", "check_val_every_n_epoch=2",
        "ModelCheckpoint(every_n_train_steps=40)",
    ]  # fmt: skip
    found.trainer.check_val_every_n_epoch, found.trainer.val_check_interval = None, 100
    assert names(found, "validation") == ["val_check_interval=200"]
    (change,) = proposals(found, ("validation",))
    assert change.period(found) == 200
    found.trainer.val_check_interval = 0.25
    found.trainer.check_val_every_n_epoch = 1
    assert names(found, "validation") == ["val_check_interval=0.5"]
    found.trainer.fit_loop.max_batches = 60
    (change,) = proposals(found, ("validation",))
    assert change.period(found) == 30


@pytest.mark.parametrize(
    ("every", "epochs", "expected", "period"),
    [
        (1.0, 1, {"check_val_every_n_epoch": 2}, 200),
        (0.75, 1, {"check_val_every_n_epoch": 2}, 200),
        (60, 1, {"check_val_every_n_epoch": 2}, 200),
        (1, 1, {"val_check_interval": 2}, 2),
        (0.5, 3, {"val_check_interval": 1.0}, 300),
        (10, 1, {"val_check_interval": 20}, 20),
        (30, 1, {"val_check_interval": 60}, 100),  # 3 in an epoch, and 1
        (9, 1, {"val_check_interval": 18}, 18),  # 11, and 5
        (30, None, {"val_check_interval": 60}, 60),
        ("00:10:00", 1, None, None),
    ],
)
def test_half_as_many_validations(
    tmp_path: Path, every: Any, epochs: int | None, expected: Any, period: int | None
) -> None:
    """Not more batches than an epoch has, where they are counted in each epoch."""
    found = seen(tmp_path, verdict("validation-bound"))
    found.trainer.fit_loop.max_batches = 100
    found.trainer.val_check_interval, found.trainer.check_val_every_n_epoch = every, epochs
    proposed = list(proposals(found, ("validation",)))
    assert [each.value for each in proposed] == ([expected] if expected else [])
    assert [each.period(found) for each in proposed] == ([period] if period else [])


def test_a_scheduler_that_reads_validation_keeps_it(tmp_path: Path) -> None:
    """It fails in an epoch without its metric."""

    class Plateau(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "monitor": "loss"}]

    found = seen(tmp_path, verdict("validation-bound"), module=Plateau(), max_epochs=1)
    assert names(found, "validation") == ["check_val_every_n_epoch=2"]
    found.trainer.fit(found.module)
    assert names(found, "validation") == []


def test_values_travel_as_json(tmp_path: Path) -> None:
    """The process of a trial makes the same change again."""
    every = [verdict(code) for kind in CHANGES for code in kind.codes]
    for change in proposals(seen(tmp_path, *every, accumulate_grad_batches=2)):
        again = change_of(type(change).__name__, change.value)
        assert (again.name, again.loader, again.trainer) == (
            change.name, change.loader, change.trainer,
        )  # fmt: skip


class Looks(L.Callback):
    """Calls a function in the last batch of a training."""

    def __init__(self, change: Change, look: Any) -> None:
        self.change, self.look, self.found = change, look, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.change.begin(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found = self.look(trainer, pl_module)


def trained(tmp_path: Path, change: Change, look: Any, module: Any = None, **options: Any) -> Any:
    """What a function finds in a training with a change."""
    looks = Looks(change, look)
    made = trainer(tmp_path, looks, max_epochs=1, **options)
    made.fit(change.apply(made, module or Small()))
    return looks.found


class Types(Small):
    """Keeps the type of its products."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.type_of_products = self.net(batch[0]).dtype
        return super().training_step(batch, batch_idx)


def test_mixed_precision(tmp_path: Path) -> None:
    change = changes.MixedPrecision("bf16-mixed")
    found = trained(tmp_path, change, lambda _, module: module.type_of_products, Types())
    assert found is torch.bfloat16


def test_fused_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "__init__", torch.optim.SGD.__init__)
    change = changes.FusedOptimizer(["SGD"])
    found = trained(tmp_path, change, lambda made, _: made.optimizers[0].param_groups[0]["fused"])
    assert found is True


class Images(Small):
    """Has a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 3, 2)


def test_channels_last(tmp_path: Path) -> None:
    weight = trained(tmp_path, changes.ChannelsLast(), lambda _, m: m.image.weight, Images())
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_frozen_objects(tmp_path: Path) -> None:
    before = gc.get_threshold()
    gc.unfreeze()  # what conftest.py has frozen
    try:
        assert trained(tmp_path, changes.FreezeGc(), lambda *_: gc.get_freeze_count()) > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert trained(tmp_path, changes.Threads(1), lambda *_: torch.get_num_threads()) == 1
    finally:
        torch.set_num_threads(before)


def test_matmul_precision(tmp_path: Path) -> None:
    try:
        change = changes.MatmulPrecision("high")
        found = trained(tmp_path, change, lambda *_: torch.get_float32_matmul_precision())
        assert found == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_arguments_of_the_trainer(tmp_path: Path) -> None:
    found = trained(tmp_path, changes.LogInterval(7), lambda made, _: made.log_every_n_steps)
    assert found == 7
    twice = changes.ValidationInterval({"check_val_every_n_epoch": 2})
    assert trained(tmp_path, twice, lambda made, _: made.check_val_every_n_epoch) == 2


def test_checkpoints_at_another_interval(tmp_path: Path) -> None:
    change = changes.CheckpointInterval(5)
    made = trainer(tmp_path, ModelCheckpoint(tmp_path, save_top_k=-1), Looks(change, print),
                   max_epochs=1, enable_checkpointing=True)  # fmt: skip
    made.fit(Small())
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == [
        "epoch=0-step=10", "epoch=0-step=15", "epoch=0-step=5",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_steps() -> None:
    """The whole module is wrapped; layers are compiled in place, also those in lists."""
    assert type(changes.Compile("steps").apply(None, Small())).__name__ == "OptimizedModule"
    module = Small()
    module.more = nn.ModuleList([nn.Linear(2, 2)])
    module.loss = nn.MSELoss()
    assert [*changes._layers(module)] == ["net", "more.0"]
    assert changes.Compile(["net", "more.0"]).apply(None, module) is module
    compiled = [name for name, each in module.named_modules() if "forward" in vars(each)]
    assert compiled == ["net", "more.0"]


class Where(Dataset[tuple[int, int]]):
    """Items are the worker that loads them, and the index."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return -1 if info is None else info.id, index


@pytest.mark.slow
def test_a_loader_is_changed_in_place() -> None:
    """Its iterator uses the new arguments, and the order of samples stays."""
    loader = DataLoader(Where(), batch_size=2)
    compat.change_loader(loader, {"num_workers": 2, "persistent_workers": True})
    assert (loader.prefetch_factor, loader.persistent_workers) == (2, True)
    compat.change_loader(loader, {"num_workers": 1})
    next(iter(loader))  # such as a look at the data: this worker stays
    compat.change_loader(loader, {"num_workers": 2, "persistent_workers": True})
    compat.end_workers(loader)
    workers, items = zip(*loader, strict=True)
    assert {int(each) for batch in workers for each in batch} == {0, 1}
    assert torch.cat(items).tolist() == list(range(12))
    compat.change_loader(loader, changes.Prefetch(8).loader | {"persistent_workers": False})
    assert loader.prefetch_factor == 8
    compat.change_loader(loader, {"num_workers": 0, "persistent_workers": False})
    assert loader.prefetch_factor is None
    batches = [batch[0].tolist() for batch in loader]
    assert batches == 6 * [[-1, -1]]


def test_a_larger_batch() -> None:
    change = changes.LargerBatch({"batch_size": 6, "accumulate_grad_batches": 1})
    loader = DataLoader(Where(), batch_size=2)
    compat.change_loader(loader, change.loader)
    assert len(loader) == 2
    assert next(iter(loader))[1].tolist() == list(range(6))
    with pytest.raises(TypeError, match="no DataLoader"):
        compat.change_loader([1, 2], change.loader)


class Drawn(Dataset[Any]):
    """Items that are drawn, counted, or fixed."""

    def __init__(self, make: Any) -> None:
        self.make, self.read = make, 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.make(index, self.read)


class Stream(IterableDataset[int]):
    """Has no items by number."""

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda index, _: torch.ones(3) * index, "fixed"),
        (lambda index, _: (torch.ones(3), index), "fixed"),
        (lambda *_: torch.rand(3), "random"),
        (lambda *_: (torch.zeros(2), random.random()), "random"),
        (lambda *_: torch.ones(3) * (1 if torch.rand(()) < 0.01 else 2), "random"),
        (lambda index, _: torch.ones(3) * (index and np.random.rand()), "random"),
        (lambda _, read: torch.ones(3) * read, "stateful"),
        (lambda *_: 1 / 0, "unknown"),
    ],
)
def test_how_items_are_made(make: Any, kind: str) -> None:
    """Random numbers are not state: with the same ones, an item is the same."""
    assert kind_of_items(DataLoader(Drawn(make))) == kind


def test_random_collation_is_random() -> None:
    def collated(items: list[Any]) -> Tensor:
        return torch.stack(items) + torch.rand(())

    items = Drawn(lambda index, _: torch.ones(3) * index)
    assert kind_of_items(DataLoader(items, collate_fn=collated)) == "random"


def test_places_in_the_configuration_of_a_command_line() -> None:
    """With and without subclasses of the data module; none for what is no argument."""
    plain = {"data": {"num_workers": 0}, "trainer": {"num_workers": 0}}
    assert compat.path_of(plain, "num_workers", 0) == ("data", "num_workers")
    nested = {"data": {"class_path": "Data", "init_args": {"num_workers": 0}}, "model": None}
    assert compat.path_of(nested, "num_workers", 0) == ("data", "init_args", "num_workers")
    assert compat.path_of(nested, "pin_memory", False) == ()


def test_a_doubtful_place_in_a_configuration_is_none() -> None:
    """Arguments of two loaders, of which one is measured; and a value that is not the loader's."""
    two = {"data": {"train": {"batch_size": 4}, "val": {"batch_size": 4}}}
    assert compat.path_of(two, "batch_size", 4) == ()
    two["data"]["val"]["batch_size"] = 8
    assert compat.path_of(two, "batch_size", 4) == ("data", "train", "batch_size")
    assert compat.path_of({"data": {"batch_size": 64}}, "batch_size", 32) == ()


def test_items_of_a_stream_are_unknown() -> None:
    assert kind_of_items(DataLoader(Stream())) == "unknown"


def test_digests_tell_batches_apart() -> None:
    """At any depth, in any type, and with large tensors."""
    large = torch.zeros(1_000_000)
    batches = [
        torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bfloat16), [torch.ones(2)] * 3,
        {"x": torch.ones(7), "y": "text"}, large, large + 1, torch.tensor(3), "text",
    ]  # fmt: skip
    found = [digest(batch) for batch in batches]
    assert len(set(found)) == len(batches)
    assert found == [digest(batch) for batch in batches]


def test_authors_add_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in the list is proposed, and found again by its name."""

    class Mine(Change):
        """Does nothing."""

        codes, code = ("healthy",), "# nothing"

        @classmethod
        def proposed(cls, seen: Seen) -> Any:
            yield cls(3)

    monkeypatch.setattr(changes, "CHANGES", [*CHANGES, Mine])
    assert "# nothing" in names(seen(tmp_path, verdict("healthy")))
    assert change_of("Mine", 3).value == 3
