"""Inspecting batches, datasets, samplers and loaders runs no code of the user."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import Small, trainer
from lightning import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_perf import always_on

LOG: list[str] = []


def access(name: str) -> None:
    """Log an access and draw from all generators, as lazy augmentation does."""
    LOG.append(name)
    random.random()
    np.random.rand()
    torch.rand(1)


class Lazy:
    """Is not moved to a device, and is used by the step without an access that is logged."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *_: Any, **__: Any) -> Any:
        return self


class LazyMapping(Lazy, Mapping[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        access("getitem")
        return self.x + torch.rand(())

    def __iter__(self) -> Iterator[str]:
        access("iter")
        return iter(["x", "input_ids"])

    def __len__(self) -> int:
        access("len")
        return 2


class Dynamic(Lazy):
    def __getattr__(self, name: str) -> Any:
        access(f"getattr {name}")
        raise AttributeError(name)


class Watched(Lazy):
    def __getattribute__(self, name: str) -> Any:
        if name not in ("to", "x"):
            access(f"getattribute {name}")
        return super().__getattribute__(name)


@dataclass
class WithProperties(Lazy):
    x: Tensor

    @property
    def shape(self) -> Any:
        access("shape")
        return self.x.shape

    input_ids = batch_sizes = is_nested = num_graphs = batch_size = shape

    def __len__(self) -> int:
        access("len")
        return 4


class LazyList(list[Tensor]):
    def __init__(self, x: Tensor) -> None:
        super().__init__([x])
        self.x = x

    def to(self, *_: Any, **__: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Tensor]:
        access("iter")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        access("getitem")
        return super().__getitem__(index)

    def __len__(self) -> int:
        access("len")
        return super().__len__()


class LazyTensor(Tensor):
    x: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        access(f"torch function {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})


def lazy_tensor(x: Tensor) -> LazyTensor:
    with torch._C.DisableTorchFunctionSubclass():
        lazy = x.as_subclass(LazyTensor)
        lazy.x = x
        return lazy


class Numbers(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index / 20)

    def __len__(self) -> int:
        access("length of the dataset")
        return 20


class Sampler(RandomSampler):
    def __len__(self) -> int:
        access("length of the sampler")
        return super().__len__()


class Loader(DataLoader[Tensor]):
    def __getattribute__(self, name: str) -> Any:
        if name in ("batch_size", "num_workers", "pin_memory", "persistent_workers"):
            access(f"loader {name}")
        return super().__getattribute__(name)


class OnLazy(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.net(batch.x).square().mean()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


BATCHES: list[Callable[[Tensor], Any]] = [
    LazyMapping, Dynamic, Watched, WithProperties, LazyList, lazy_tensor, Lazy,
]  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.filterwarnings("ignore:lightning_perf. cannot count the samples")
@pytest.mark.filterwarnings("ignore:lightning_perf. .*could not be predicted")
def test_inspecting_user_data_runs_no_user_code(
    tmp_path: Path, kind: Callable[[Tensor], Any]
) -> None:
    """Accesses, weights and random states are those of the run without us."""

    def fit(*callbacks: Any) -> Any:
        seed_everything(3)
        LOG.clear()
        data = Numbers()
        loader = Loader(
            data, batch_size=4, sampler=Sampler(data), collate_fn=lambda x: kind(torch.stack(x))
        )
        model = OnLazy()
        trainer(tmp_path, *callbacks, max_epochs=2, limit_val_batches=0).fit(model, loader)
        weights = [each.detach() for each in model.parameters()]
        state = random.random(), np.random.rand(), torch.rand(1).item()
        return [*LOG], state, weights

    log, state, weights = fit()
    ours = fit(always_on(show_summary=False))
    assert ours[:2] == (log, state)
    assert all(map(torch.equal, ours[2], weights))
