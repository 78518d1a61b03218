"""What trials say of random numbers, compared with whole trainings of three epochs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from helpers.held import Held
from helpers.small import WIDTH, Small, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_perf.trials import compat
from lightning_perf.trials.proof import same_training

COUNT, SIZE = 96, 4
SECOND = "alike (another shuffle from the second epoch on)"
ANOTHER = "alike (another shuffle)"
OTHERS = "alike (other random numbers from the second epoch on)"
VALIDATED = "alike (validations draw random numbers)"


class Numbered(Dataset[list[Tensor]]):
    """Items that say which they are."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.full((WIDTH,), index / COUNT), torch.ones(1)]


class Recording(Small):
    """Records samples and losses of each epoch."""

    def __init__(self, dropout: bool = False, hook: bool = False) -> None:
        super().__init__()
        self.dropout, self.hook = nn.Dropout(0.5 * dropout), hook
        self.found: list[list[tuple[list[float], float]]] = []

    def on_train_epoch_start(self) -> None:
        self.found.append([])
        if self.hook:
            torch.rand(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.dropout(batch[0]) if self.dropout.p else batch[0]
        loss = super().training_step([x, batch[1]], batch_idx)
        self.found[-1].append((batch[0][:, 0].tolist(), float(loss.detach())))
        return loss


class Batches(Sampler[list[int]]):
    """Draws each batch when it is asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield torch.randint(COUNT, (SIZE,)).tolist()

    def __len__(self) -> int:
        return COUNT // SIZE


class Permuted(Sampler[int]):
    """Draws from NumPy, or from numbers of its own in each epoch, as DistributedSampler does."""

    def __init__(self, own: bool = False) -> None:
        self.own, self.epoch = own, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random: Any = np.random.default_rng(self.epoch) if self.own else np.random
        return iter(random.permutation(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class Private(Permuted):
    """Draws from a generator that only the sampler has, also after its last item."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        yield from self.random.permutation(COUNT).tolist()
        self.random.random()


class Eager(Batches):
    """Draws all batches when a DataLoader asks for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([*super().__iter__()])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


ORDERS: dict[str, Any] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": generator()},
    "sampler": lambda: {"sampler": RandomSampler(Numbered(), generator=generator())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * COUNT, COUNT)},
    "numpy": lambda: {"sampler": Permuted()},
    "epoch": lambda: {"sampler": Permuted(own=True)},
    "private": lambda: {"sampler": Private()},
    "batches": lambda: {"batch_sampler": Batches(), "batch_size": 1},
    "eager": lambda: {"batch_sampler": Eager(), "batch_size": 1},
}
TWO = {"num_workers": 2}
STAY = TWO | {"persistent_workers": True}
#: The loader and the Trainer, before and after a change.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "workers": [{}, {}, TWO, {}],
    "workers that stay": [{}, {}, STAY, {}],
    "stay": [TWO, {}, STAY, {}],
    "no workers": [STAY, {}, {}, {}],
    "prefetch": [TWO, {}, TWO | {"prefetch_factor": 8}, {}],
    "epochs": [{}, {}, {}, {"check_val_every_n_epoch": 2}],
    "half": [{}, {"val_check_interval": 0.25}, {}, {"val_check_interval": 0.5}],
}


def loader(order: str, options: dict[str, Any]) -> DataLoader[list[Tensor]]:
    return DataLoader(Numbered(), **{"batch_size": SIZE} | ORDERS[order]() | options)


def trained(folder: Path, order: str, loads: Any, trains: Any, **model: Any) -> Any:
    """The samples and losses of a training, by epoch."""
    options = {"max_epochs": 3, "limit_val_batches": 1} | trains
    L.seed_everything(0, verbose=False)
    module = Recording(**model)
    data = loader(order, loads), loader("in order", {})
    trainer(folder, **options).fit(module, *data)
    return module.found


def tried(folder: Path, order: str, loads: Any, trains: Any, **more: Any) -> dict[str, Any]:
    """The result of a trial, for which three short epochs may be too few."""
    options = {"max_epochs": 30, "limit_val_batches": 1} | trains
    model = {name: more.pop(name) for name in ("dropout", "hook") if name in more}
    L.seed_everything(0, verbose=False)
    module, data = Recording(**model), (loader(order, loads), loader("in order", {}))
    held = Held(folder, warm_up=10, **{"batches": 10, "least": 10, "seconds": 0.0} | more)
    return held.fit(folder, module, *data, **options)


def answer(folder: Path, order: str, change: str, more: Any = None, **model: Any) -> str:
    """What `try` says."""
    loads, trains, new_loads, new_trains = CHANGES[change]
    more = more or {}
    kept: Any = {"keeps": ["validation"], "batches": 50} if trains or new_trains else {}
    run: Any = partial(tried, folder, order, **model)
    first = run(loads, trains | more, batches=None)
    base = run(loads, trains | more, **kept)
    ours = run(new_loads, trains | more | new_trains, **kept)
    seeded = [run(loads, trains | more, seed=seed) for seed in (1, 2)]
    dataset = first["dataset"] if loads != new_loads else ""
    return same_training(ours, [base], seeded, True, dataset, first)


EQUAL = "equal"
ONE, CUT = {"max_epochs": 1}, {"limit_train_batches": 10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "change", "model", "more", "expected"),
    [
        ("in order", "workers that stay", {}, {}, EQUAL),
        ("in order", "workers that stay", {"dropout": True}, {}, OTHERS),
        ("in order", "epochs", {}, {}, EQUAL),
        ("in order", "epochs", {"dropout": True}, {}, OTHERS),
        ("in order", "half", {}, {}, EQUAL),
        ("in order", "half", {"dropout": True}, {}, VALIDATED),
        ("shuffle", "workers", {"dropout": True}, {}, EQUAL),
        ("shuffle", "workers", {"hook": True}, {}, ANOTHER),
        ("shuffle", "workers that stay", {}, {}, SECOND),
        ("shuffle", "workers that stay", {}, ONE, EQUAL),
        ("shuffle", "stay", {}, {}, SECOND),
        ("shuffle", "no workers", {}, {}, SECOND),
        ("shuffle", "prefetch", {}, CUT, EQUAL),
        ("shuffle", "epochs", {}, {}, SECOND),
        ("shuffle", "half", {}, {}, SECOND),
        ("generator", "workers", {}, {}, SECOND),
        ("generator", "stay", {}, {}, SECOND),
        ("generator", "prefetch", {}, {}, EQUAL),
        ("generator", "prefetch", {}, CUT, SECOND),
        ("generator", "epochs", {}, {}, EQUAL),
        ("sampler", "stay", {}, {}, EQUAL),
        ("weighted", "workers", {"dropout": True}, {}, EQUAL),
        ("weighted", "stay", {}, {}, SECOND),
        ("numpy", "workers that stay", {}, {}, EQUAL),
        ("epoch", "workers that stay", {}, {}, EQUAL),
        ("epoch", "epochs", {}, {}, EQUAL),
        ("private", "workers", {}, {}, SECOND),
        ("private", "prefetch", {}, {}, EQUAL),
        ("batches", "workers", {"dropout": True}, {}, ANOTHER),
        ("batches", "stay", {}, {}, SECOND),
        ("batches", "half", {}, {}, ANOTHER),
        ("eager", "workers", {}, {}, ANOTHER),
        ("eager", "stay", {}, {}, ANOTHER),
        ("eager", "prefetch", {}, {}, EQUAL),
    ],
)  # fmt: skip
def test_equal_is_said_of_trainings_that_are(
    tmp_path: Path, order: str, change: str, model: Any, more: Any, expected: str
) -> None:
    """In all epochs: two trainings, one with the change by hand, differ where it is not said."""
    loads, trains, new_loads, new_trains = CHANGES[change]
    before = trained(tmp_path, order, loads, trains | more, **model)
    after = trained(tmp_path, order, new_loads, trains | more | new_trains, **model)
    assert answer(tmp_path, order, change, more, **model) == expected
    assert (before == after) == (expected == EQUAL)
    if "second epoch" in expected:
        assert before[0] == after[0]


@pytest.mark.slow
def test_a_loss_before_validations_differ_is_not_explained_by_them(tmp_path: Path) -> None:
    """Nor one where batches draw no random numbers."""
    run: Any = partial(tried, tmp_path, "in order", keeps=["validation"])
    first = run({}, CHANGES["half"][1], batches=None, dropout=True)
    base, ours = (run({}, CHANGES["half"][at], dropout=True) for at in (1, 3))
    fixed = base | {"drawn": base["drawn"] | {"batch": []}}
    early = ours | {"losses": ["0.5", *ours["losses"][1:]]}
    for one, other in ((base, early), (fixed, ours)):
        assert same_training(other, [one], [one] * 2, True, "", first).startswith("not equal: the")


def test_other_random_numbers_are_kept_apart() -> None:
    """A context has numbers of its own, and those outside continue as if it had drawn none."""
    torch.manual_seed(0)
    expected = torch.rand(3).tolist(), torch.rand(3).tolist()
    own = compat.OwnRandomNumbers(0)
    torch.manual_seed(1)
    outside = torch.rand(2).tolist()
    torch.manual_seed(1)
    inside = []
    for number in range(2):
        with own:
            inside.append(torch.rand(3).tolist())
        assert own.drawn == {"torch"}
        own.keep(own.drawn)
        assert torch.rand(1).item() == outside[number]
    assert tuple(inside) == expected
