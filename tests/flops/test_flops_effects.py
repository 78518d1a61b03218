"""Counting a compiled module runs its step once more, which changes nothing outside of it."""

import functools
import os
import random
from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from lightning_perf.flops.shadow import ShadowError, count_on_shadow

CACHE: dict[int, torch.Tensor] = {}
GROUPS: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
HISTORY: list[object] = []
RECENT: deque[torch.Tensor] = deque(maxlen=2)
TABLE = None
CALLS = 0
NUMPY, PYTHON = np.random.default_rng(0), random.Random(0)
TORCH = torch.Generator().manual_seed(0)
ENDLESS = iter(lambda: 1.0, None)


VOCABULARY = dict.fromkeys(range(20_000), 1.0)


class Static:
    weights: torch.Tensor | None = None


class Helper:
    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.latest: torch.Tensor | None = None


HELPER = Helper()


@functools.lru_cache(maxsize=8)
def ones(size):
    return torch.ones(size, size)


def in_cache(x):
    CACHE[len(x)] = x.detach()
    return CACHE[len(x)]


def in_group(x):
    GROUPS["all"].append(x.detach())
    return GROUPS["all"][-1]


def in_variable(x):
    global TABLE
    if TABLE is None:
        TABLE = torch.ones_like(x)
    return TABLE


def in_class(x):
    if Static.weights is None:
        Static.weights = torch.ones_like(x)
    return Static.weights


def in_object(x):
    HELPER.latest = HELPER.kept["x"] = x.detach()
    return HELPER.latest


def in_default(x, kept=[]):  # noqa: B006  what is tested
    kept.append(x.detach())
    return kept[-1]


def in_history(x):
    HISTORY.append(x.detach().mean())
    RECENT.append(x.detach())
    return RECENT[-1]


def counting(x):
    global CALLS
    CALLS += 1
    os.environ["CALLS"] = str(CALLS)
    HISTORY.append(CALLS)
    return x * CALLS


def drawing(x):
    noise = NUMPY.random() + PYTHON.random()
    return x * noise + torch.rand(len(x), 1, generator=TORCH)


def closing():
    kept = None

    def within(x):
        nonlocal kept
        if kept is None:
            kept = torch.ones_like(x)
        return kept

    return within


WITHIN = closing()


class Model(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outside = outside

    def forward(self, x):
        return self.linear(x) + self.outside(x)


def count(module):
    batch = torch.ones(3, 4)
    return count_on_shadow(module, batch, lambda own, x: own(x).sum())


def state():
    cell = WITHIN.__closure__[0].cell_contents
    return (
        dict(CACHE), dict(GROUPS), list(HISTORY), list(RECENT), TABLE, CALLS, Static.weights,
        dict(HELPER.kept), HELPER.latest, list(in_default.__defaults__[0]), cell,
        os.environ.get("CALLS"), ones.cache_info().currsize, NUMPY.bit_generator.state,
        PYTHON.getstate(), TORCH.get_state().tolist(),
    )  # fmt: skip


OUTSIDE = {
    "functools": lambda x: ones(4)[:3] + x, "global dict": in_cache, "defaultdict": in_group,
    "global variable": in_variable, "class attribute": in_class, "attribute": in_object,
    "default argument": in_default, "list and deque": in_history, "closure": WITHIN,
    "counters and environment": counting, "random generators": drawing,
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_objects_outside_of_the_module_are_unchanged(name):
    """What the step keeps, counts or draws outside of the module is as it was before."""
    before = state()
    counts = count(Model(OUTSIDE[name]))
    assert counts.model == {"float32": 3 * 2 * 3 * 4 * 4 - 2 * 3 * 4 * 4}
    assert state() == before


def test_an_iterator_outside_of_the_module_is_not_advanced():
    """A step that draws from a global iterator is not counted, because that cannot be undone."""
    with pytest.raises(ShadowError, match="uses a callable_iterator outside of the module"):
        count(Model(lambda x: x * next(ENDLESS)))


def test_a_large_container_outside_of_the_module_is_not_copied():
    """A step that names one is not counted: copying and restoring it would take long."""
    with pytest.raises(ShadowError, match="more objects outside of the module than can be"):
        count(Model(lambda x: x * VOCABULARY[0]))


def test_data_of_a_module_is_not_copied():
    """Datasets, large arrays and the items of long lists are shared with the copy."""
    module = Model(lambda x: x)
    module.dataset = torch.utils.data.TensorDataset(torch.zeros(1))
    module.array = np.zeros(1 << 18)
    module.samples = [{"path": f"{n}.png"} for n in range(2000)]
    seen = []

    def step(own, x):
        seen.append((own.dataset, own.array.base, own.samples, own.samples[7]))
        own.samples.clear()
        return own(x).sum()

    count_on_shadow(module, torch.ones(3, 4), step)
    dataset, array, samples, sample = seen[0]
    assert dataset is module.dataset
    assert array is module.array
    assert sample is module.samples[7]
    assert samples is not module.samples
    assert len(module.samples) == 2000


def test_a_large_array_of_the_module_is_not_changed():
    """A step that writes to a large array of the module is not counted."""
    module = Model(lambda x: x)
    module.array = np.zeros(1 << 18)

    def step(own, x):
        own.array[0] = 1.0
        return own(x).sum()

    with pytest.raises(ShadowError, match="read-only"):
        count_on_shadow(module, torch.ones(3, 4), step)
    assert module.array[0] == 0.0


def test_the_trainer_is_not_looked_at():
    """However much it holds, a module is counted: the copy has no trainer."""
    module = Model(lambda x: x)
    trainer = Helper()
    trainer.kept = {number: [[each] for each in range(900)] for number in range(100)}
    vars(module)["_trainer"] = trainer
    assert count(module).model == {"float32": 2 * 2 * 3 * 4 * 4}
