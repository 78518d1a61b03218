"""The lines that `lightning-perf try` prints do what its trials did."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.small import Small, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf.extend import CHANGES, Change
from lightning_perf.trials import compat
from lightning_perf.trials.advice import lines
from lightning_perf.trials.changes import FusedOptimizer, change_of

#: Values of each kind of change.
VALUES: dict[str, list[Any]] = {
    "Workers": [{"num_workers": 1, "persistent_workers": True}],
    "PersistentWorkers": [True],
    "NoWorkers": [
        {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "timeout": 0,
         "multiprocessing_context": None}
    ],
    "Prefetch": [4],
    "PinMemory": [True],
    "LargerBatch": [{"batch_size": 8, "accumulate_grad_batches": 1}],
    "Compile": [["net", "blocks.0", "heads.a"], "steps"],
    "MixedPrecision": ["bf16-mixed"],
    "MatmulPrecision": ["high"],
    "FusedOptimizer": [["SGD"]],
    "ChannelsLast": [None],
    "FreezeGc": [None],
    "Threads": [1],
    "LogInterval": [7],
    "ValidationInterval": [{"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}],
    "CheckpointInterval": [5],
}  # fmt: skip
THRESHOLD = gc.get_threshold()
ARGUMENTS = signature(L.Trainer).parameters
INTERVALS = "_every", "_train_time"
#: Changes of a DataLoader that has workers already.
OF_WORKERS = ("PersistentWorkers", "NoWorkers", "Prefetch")


class Metric(nn.Module):
    """Has no weights, and cannot be compiled."""

    def forward(self, loss: Tensor) -> float:
        if torch.compiler.is_compiling():
            raise RuntimeError("a metric is compiled")
        return float(loss.detach())


class Parts(Small):
    """Modules of every kind, and an optimizer with the arguments of a line."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Identity()])
        self.heads = nn.ModuleDict({"a": nn.Linear(1, 1)})
        self.image, self.metric = nn.Conv2d(2, 3, 2), Metric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.heads["a"](self.blocks[0](self.net(batch[0]))), batch[1])
        self.metric(loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, **self.options)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def configure_callbacks(self) -> list[Any]:
        return [ModelCheckpoint(self.trainer.default_root_dir, **vars(self).get("interval", {}))]


class Begins(Callback):
    """Begins a change as a trial does, and records what the training is like."""

    def __init__(self, change: Change | None) -> None:
        self.change = change

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.change is not None:
            self.change.begin(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = state_of(trainer, pl_module)


def simple(values: dict[str, Any]) -> dict[str, Any]:
    """The values that can be compared, without those that Lightning may record of constructors."""
    kinds = str | int | float | tuple | None
    return {k: v for k, v in values.items() if isinstance(v, kinds) and not k.startswith("__pl_")}


def state_of(trainer: Any, module: Any) -> dict[str, Any]:
    """What changes can change in a training and its process."""
    (optimizer,), loader = trainer.optimizers, trainer.train_dataloader
    plugin = trainer.strategy.precision_plugin
    return {
        "compiled": [name for name, each in module.named_modules() if "forward" in vars(each)],
        "steps": module._compiler_ctx is not None,
        "optimizer": [simple(vars(optimizer)), optimizer.defaults],
        "groups": [simple(each) for each in optimizer.param_groups],
        "loader": simple(vars(loader)),
        "batches": [loader.batch_sampler.batch_size, loader.multiprocessing_context],
        "precision": [type(plugin), simple(vars(plugin)), trainer.precision],
        "trainer": simple({k: v for k, v in vars(trainer).items() if k in ARGUMENTS}),
        "checkpoints": [*vars(trainer.checkpoint_callback)["best_k_models"].values()],
        "intervals": [
            {name: value for name, value in vars(each).items() if name.startswith(INTERVALS)}
            for each in trainer.checkpoint_callbacks
        ],
        "layout": module.image.weight.is_contiguous(memory_format=torch.channels_last),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "gc": [gc.get_threshold(), gc.get_freeze_count() > 0],
    }


class Training:
    """A tiny training, with arguments as a script has them."""

    def __init__(self, folder: Path, workers: bool) -> None:
        self.folder = folder
        self.options: dict[str, dict[str, Any]] = {
            "Trainer": {"accumulate_grad_batches": 2, "limit_val_batches": 1, "max_epochs": 2},
            "DataLoader": {"batch_size": 4, "timeout": 60, "num_workers": 1,
                           "multiprocessing_context": "fork"} if workers else {"batch_size": 4},
            "SGD": {"momentum": 0.9},
            "ModelCheckpoint": {"save_top_k": -1, "train_time_interval": None},
        }  # fmt: skip
        self.model: Any = Parts()

    def write(self, text: list[str]) -> None:
        """Run lines, whose dots stand for the arguments of the script."""

        def call(name: str) -> Any:
            return lambda *_, **options: self.options[name].update(options)

        def fit(model: Any, *_: Any) -> None:
            self.model = model

        names = {name: call(name) for name in self.options} | {
            "torch": torch, "gc": gc, "model": self.model, "trainer": SimpleNamespace(fit=fit),
        }  # fmt: skip
        exec("\n".join(text), names)
        if self.model is getattr(names["model"], "_orig_mod", None):
            self.model = names["model"]

    def run(self, change: Change | None = None) -> dict[str, Any]:
        """Train, with a change as trials make it; returns what `state_of` finds."""
        own = getattr(self.model, "_orig_mod", self.model)
        own.options, own.interval = self.options["SGD"], self.options["ModelCheckpoint"]
        begins = Begins(change)
        made = trainer(self.folder, begins, enable_checkpointing=True, **self.options["Trainer"])
        x = torch.ones(8, 8)
        loader = DataLoader(TensorDataset(x, x[:, :1]), **self.options["DataLoader"])
        model = self.model
        if change is not None:
            compat.change_loader(loader, change.loader)
            model = change.apply(made, model)
        made.fit(model, loader)
        return begins.found


def reset() -> None:
    """Undo what changes set for the whole process."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("highest")
    gc.unfreeze()
    gc.set_threshold(*THRESHOLD)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test sets for the whole process ends with it; nothing is compiled to C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.optim.SGD, "__init__", torch.optim.SGD.__init__)
    threads = torch.get_num_threads()
    reset()
    yield
    reset()
    torch.set_num_threads(threads)


CASES = [(kind.__name__, value) for kind in CHANGES for value in VALUES[kind.__name__]]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The .grad:UserWarning")
@pytest.mark.parametrize(("kind", "value"), CASES)
@pytest.mark.usefixtures("restored")
def test_lines_do_what_the_trial_did(tmp_path: Path, kind: str, value: Any) -> None:
    """Two trainings are equal: with the printed lines, and with the change as trials make it."""
    change, has_workers = change_of(kind, value), kind in OF_WORKERS
    plain = Training(tmp_path / "plain", has_workers).run()
    written = Training(tmp_path / "written", has_workers)
    written.write(lines([change]))  # type: ignore[list-item]  # has the fields that are read
    found = written.run()
    reset()
    assert Training(tmp_path / "tried", has_workers).run(change) == found
    assert plain != found


def test_a_trial_fails_where_the_constructor_of_the_optimizer_does(
    tmp_path: Path, restored: None
) -> None:
    """Such as with ``foreach=True``, which the script has and a trial must not replace."""
    training = Training(tmp_path, False)
    training.options["SGD"]["foreach"] = True
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        training.run(FusedOptimizer(["SGD"]))


def test_an_optimizer_that_does_not_become_fused_is_not_measured(
    tmp_path: Path, restored: None
) -> None:
    """Such as one that the script constructs before the fit."""
    training = Training(tmp_path, False)
    before = training.model.configure_optimizers()
    training.model.configure_optimizers = lambda: before
    with pytest.raises(RuntimeError, match="not fused: constructed before"):
        training.run(FusedOptimizer(["SGD"]))
