"""What a trial replaces in a Trainer, where Lightning and torch have no public way."""

from __future__ import annotations

import copy
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_perf.flops.shadow import Sink
from lightning_perf.run.compat import Callback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

#: Loggers that write below one folder, which a trial can move.
_FOLDER_LOGGERS = {"CSVLogger", "TensorBoardLogger"}
#: Sections of LightningCLI's configuration with arguments of the script's own classes.
_SECTIONS = ("data", "model")
#: The package that this one uses: ``lightning.pytorch``, or ``pytorch_lightning`` alone.
_OWN: Any = sys.modules[Callback.__module__.partition(".callbacks")[0]]


def packages() -> list[Any]:
    """The packages of Lightning that this process has imported."""
    names = ("lightning.pytorch", "pytorch_lightning")
    return [sys.modules[name] for name in names if hasattr(sys.modules.get(name), "Trainer")]


def package_of(trainer: Any) -> Any:
    """The package of a Trainer."""
    return next((each for each in packages() if isinstance(trainer, each.Trainer)), _OWN)


def is_a(value: object, *names: str) -> bool:
    """Whether a class of the object has one of these names, whichever package it is from."""
    return any(kind.__name__ in names for kind in type(value).__mro__)


def is_tuning(trainer: Any) -> bool:
    """Whether a fit is one of Lightning's tuners, which come before the training itself."""
    return any(getattr(each, "_early_exit", False) for each in trainer.callbacks)


class Accepting(Sink):
    """Replaces a logger's experiment: also takes items, and is an iterable and a context."""

    @override
    def __getattr__(self, name: str) -> Sink:
        if name.startswith("__"):  # copies, pickles and arrays ask for these
            raise AttributeError(name)
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Accepting:
        return self

    def __exit__(self, *error: object) -> None: ...


class Discarded(_OWN.loggers.logger.DummyLogger):  # type: ignore[misc]
    """Stands for a logger that would write elsewhere; it accepts all calls."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._experiment = Accepting()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        """Where callbacks put their files."""
        return self._folder


def moved_logger(logger: Any, folder: Path) -> Any:
    """A logger that writes below this folder, or one that writes nothing."""
    if not (is_a(logger, *_FOLDER_LOGGERS) and "_root_dir" in vars(logger)):
        if is_a(logger, "WandbLogger"):
            with suppress(Exception):  # modules may call wandb.log themselves
                sys.modules["wandb"].init(mode="disabled")
        return Discarded(str(folder))
    moved = copy.copy(logger)
    own = vars(moved)
    own.update(_experiment=None, _version="trial")
    own.update({name: str(folder) for name in ("_root_dir", "_save_dir") if name in own})
    return moved


def move_root(trainer: Any, folder: Path) -> None:
    """Let what has no folder of its own write below this one."""
    trainer._default_root_dir = str(folder)


def isolated_random_numbers() -> AbstractContextManager[None]:
    """A context after which random numbers continue as if it had drawn none."""
    cuda: Any = torch.cuda  # whose state is not read where that would start it
    found: AbstractContextManager[None] = _OWN.utilities.seed.isolate_rng(cuda.is_initialized())
    return found


class Batches:
    """Stands for a batch sampler whose class cannot be changed."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


def end_workers(loader: Any) -> None:
    """End workers of a DataLoader that the script has used before: they keep its arguments."""
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def change_loader(loader: Any, arguments: Mapping[str, Any]) -> None:
    """Change arguments of a DataLoader in place, so that it keeps its class and its other ones."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"the training data come from a {type(loader).__name__}, no DataLoader")
    own = vars(loader)
    for name, value in arguments.items():
        # DataLoader refuses some of them, for the sake of those that its constructor derives.
        object.__setattr__(loader, name, value)
    if "batch_size" in arguments:
        loader.batch_sampler.batch_size = arguments["batch_size"]  # type: ignore[union-attr]
    if own["num_workers"] and own.get("prefetch_factor") is None:
        own["prefetch_factor"] = 2
    if not own["num_workers"]:
        own["prefetch_factor"] = None


def use_mixed_precision(trainer: Any, precision: str) -> None:
    """Train in a mixed precision, as ``Trainer(precision=...)`` does."""
    plugin = package_of(trainer).plugins.MixedPrecision
    trainer.strategy.precision_plugin = plugin(precision, trainer.strategy.root_device.type)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    with suppress(AttributeError, RuntimeError):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return False


def set_checkpoint_interval(checkpoint: Any, steps: int) -> None:
    """Let a ModelCheckpoint write every so many steps."""
    checkpoint._every_n_train_steps, checkpoint._every_n_epochs = steps, 0
    checkpoint._train_time_interval = None


def command_line_config(trainer: Any) -> dict[str, Any]:
    """The configuration that LightningCLI has read; empty without it."""
    saved = next((each for each in trainer.callbacks if is_a(each, "SaveConfigCallback")), None)
    config: Any = getattr(saved, "config", None)
    return dict(config.as_dict()) if hasattr(config, "as_dict") else {}


def path_of(config: Mapping[str, Any], name: str, value: Any) -> tuple[str, ...]:
    """Where a nested configuration of the data or the model has an argument of this value.

    Empty where it is in several places, of which one may be another DataLoader's, or in none.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((key,), config.get(key)) for key in _SECTIONS]
    found = []
    while waiting:
        path, here = waiting.pop()
        if isinstance(here, dict):
            waiting += [((*path, key), inner) for key, inner in here.items()]
        elif path[-1] == name and here == value:
            found.append(path)
    return found[0] if len(found) == 1 else ()
