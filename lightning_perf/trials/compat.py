"""What a trial replaces in a Trainer, where Lightning and torch have no public way."""

from __future__ import annotations

import copy
import random
import sys
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_perf.flops.shadow import Sink
from lightning_perf.run.compat import Callback

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
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


def is_known(value: object) -> bool:
    """Whether a class is one of torch's or Lightning's, or of Python."""
    known = ("torch", "lightning", "pytorch_lightning", "builtins")
    return type(value).__module__.partition(".")[0] in known


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


def _generators() -> dict[str, tuple[Any, Any]]:
    """What samplers, datasets and modules share: functions that read and set each state."""
    cuda: Any = torch.cuda  # whose state is not read where that would start it
    found: dict[str, tuple[Any, Any]] = {
        "random": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if cuda.is_initialized():
        found["cuda"] = cuda.get_rng_state, cuda.set_rng_state
    return found


def _text(state: Any) -> str:
    """A short text that differs between states of random numbers."""
    parts = state if isinstance(state, tuple) else (state,)
    found = blake2b(digest_size=8)
    for each in parts:
        is_array = isinstance(each, torch.Tensor | np.ndarray)
        found.update(np.asarray(each).tobytes() if is_array else repr(each).encode())
    return found.hexdigest()


def random_states(generators: Mapping[str, torch.Generator] | None = None) -> dict[str, str]:
    """A short text per generator of random numbers, which differs once it has been drawn from.

    Args:
        generators: Those to read besides the global ones.
    """
    states = {name: read() for name, (read, _) in _generators().items()}
    states |= {name: each.get_state() for name, each in (generators or {}).items()}
    return {name: _text(state) for name, state in states.items()}


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators of its own that a DataLoader and its samplers draw from."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    owners = loader, sampler, batches, getattr(batches, "sampler", None)
    found = {id(x): x for x in (getattr(each, "generator", None) for each in owners)}
    generators = [each for each in found.values() if isinstance(each, torch.Generator)]
    return {f"generator {number}": each for number, each in enumerate(generators)}


def drawn(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The generators that were drawn from between two `random_states`."""
    return {name for name in before if before[name] != after.get(name)}


def seed_all(seed: int) -> None:
    """Seed what datasets and modules draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class OwnRandomNumbers:
    """A context, to be entered repeatedly, with random numbers apart from those outside of it.

    Args:
        seed: Of the first ones.
    """

    def __init__(self, seed: int) -> None:
        self._used = _generators()
        outer = self._read()
        seed_all(seed)
        self._own = self._read()
        self._set(outer)
        self._before, self._outer = self._own, outer

    def _read(self) -> dict[str, Any]:
        return {name: read() for name, (read, _) in self._used.items()}

    def _set(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._used[name][1](state)

    def __enter__(self) -> None:
        self._outer = self._read()
        self._set(self._own)

    def __exit__(self, *_: object) -> None:
        self._before, self._own = self._own, self._read()
        self._set(self._outer)

    @property
    def drawn(self) -> set[str]:
        """The generators that the last context has drawn from."""
        return {n for n, state in self._own.items() if _text(state) != _text(self._before[n])}

    def keep(self, names: Container[str]) -> None:
        """Use these generators alone from now on, which takes less time."""
        self._used = {name: each for name, each in self._used.items() if name in names}
        self._own = {name: self._own[name] for name in self._used}


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
