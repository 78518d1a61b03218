"""Signatures of batches: equal exactly for equal shapes."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch

from lightning_perf.flops.signature import signature

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: object
    label: str = ""


def batch(kind, *shape, dtype=torch.float32):
    tensor = torch.zeros(shape, dtype=dtype)
    return {
        "tensor": tensor,
        "list": [tensor, [tensor]],
        "tuple": (tensor, (tensor,)),
        "dict": {"x": tensor, "y": {"z": tensor}},
        "mapping": UserDict(x=tensor),
        "named tuple": Pair(tensor, 3),
        "dataclass": Sample(tensor),
        "parameter": torch.nn.Parameter(tensor, requires_grad=False),
    }[kind]


KINDS = ["tensor", "list", "tuple", "dict", "mapping", "named tuple", "dataclass", "parameter"]


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_dtypes_make_new_signatures(kind):
    """In every container, a new shape or dtype changes the signature; new values do not."""
    base = signature(batch(kind, 2, 3))
    assert hash(base) == hash(signature(batch(kind, 2, 3)))
    assert base == signature(batch(kind, 2, 3))
    assert base != signature(batch(kind, 3, 2))
    assert base != signature(batch(kind, 2, 3, dtype=torch.float64))


class Rows(UserDict):
    """A mapping like a tensordict: addition is defined, and iteration yields rows, not keys."""

    def __radd__(self, other):
        raise TypeError("no sum of a list and rows")

    def __iter__(self):
        return iter(self.data["x"]) if "x" in self.data else iter(self.data)

    def keys(self):
        return self.data.keys()

    def values(self):
        return self.data.values()


def test_a_mapping_with_its_own_addition_and_iteration():
    """Its keys and values count, whatever its operators mean."""
    rows, more = torch.zeros(2, 3), torch.zeros(3, 3)
    assert signature(Rows(x=rows)) == signature(Rows(x=torch.ones(2, 3)))
    assert signature(Rows(x=rows)) != signature(Rows(x=more))
    assert signature(Rows(x=rows)) != signature(Rows(y=rows))


class Plain:
    """Attributes in a dictionary, with a cycle."""

    def __init__(self, x):
        self.x, self.name, self.parts = x, "a", {"y": [x]}
        self.me = self


class Slotted:
    __slots__ = ("__hidden", "unset")

    def __init__(self, x):
        self.__hidden = x


class Child(Slotted):
    __slots__ = "more"

    def __init__(self, x):
        super().__init__(torch.zeros(2))
        self.more = x


class Both(Slotted):
    """Slots of its base class, and a dictionary."""


class Extended(dict):
    def __init__(self, x):
        super().__init__(number=1)
        self.x = x


OBJECTS = [Plain, Slotted, Child, Both, Extended, lambda x: x.numpy(), lambda x: {"a": Plain(x)}]


@pytest.mark.parametrize("make", OBJECTS)
def test_objects_are_inspected(make):
    """Tensors are found in attributes and slots."""
    assert signature(make(torch.zeros(2, 3))) == signature(make(torch.ones(2, 3)))
    assert signature(make(torch.zeros(2, 3))) != signature(make(torch.zeros(3, 2)))


class Loads:
    """Its tensors are not in its attributes."""

    path = "x.pt"

    def __getitem__(self, key):
        return torch.load(self.path)


class OwnList(list):
    def __iter__(self):
        return iter([torch.zeros(2)])


@pytest.mark.parametrize(
    "hidden",
    [
        iter([1]),
        (x for x in "ab"),
        memoryview(b"a"),
        {1},
        np.array([None] * 300),
        [Plain(1) for _ in "a" * 300],
        Loads(),
        OwnList(),
    ],
    ids=["iterator", "generator", "memory", "set", "objects", "too many", "loads", "own list"],
)
def test_objects_that_cannot_be_inspected_are_always_new(hidden):
    """Two batches never count as equal if one may contain something that the other does not."""
    one = signature([torch.zeros(2), hidden])
    assert one == one
    assert one != signature([torch.zeros(2), hidden])


@pytest.mark.parametrize("dtype", ["str", "object", "int64", "category"])
def test_column_names_make_no_new_signature(dtype):
    """neuralforecast puts a pandas.Index into each batch, which holds C objects."""
    columns = [pd.Index([1, 2]).astype(dtype) for _ in range(2)]
    columns[1].get_loc(columns[1][0])  # fills the cache of an index
    assert signature(columns[0]) == signature(columns[1])
    assert signature(columns[0]) != signature(columns[0].append(columns[0]))


def test_arrays_of_objects_are_inspected():
    """Tensors within an array distinguish batches, at any position."""
    one, other = np.empty(2, dtype=object), np.empty(2, dtype=object)
    one[0], other[0] = torch.zeros(2), torch.zeros(3)
    assert signature(one) == signature(one.copy())
    assert signature(one) != signature(other)
    one[1] = one
    assert signature(one) != signature(one)


def test_containers_distinguish_batches():
    """The same tensors in another container have another signature."""
    assert len({signature(batch(kind, 2, 3)) for kind in KINDS}) == len(KINDS)
    x = torch.zeros(2)
    assert signature([[x], x]) != signature([x, [x]])
    assert signature({"x": x}) != signature({"y": x})


def test_nesting_distinguishes_batches():
    """Where an inner container ends is part of the signature."""
    x = torch.zeros(2, 3)
    assert len({signature(batch) for batch in ([[x], x, x], [[x, x], x], [[x, x, x]])}) == 3
    assert len({signature(batch) for batch in ([{"a": x}, x], [{"a": x, 1: x}])}) == 2


def test_other_values_count_by_their_type():
    """Numbers, strings and flags count by type; None differs from a value."""
    x = torch.zeros(2)
    assert signature((x, 1, "a", True)) == signature((x, 2, "b", False))
    assert signature((x, None)) != signature((x, 1))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    """Nested tensors, which have no shape, count by their number of elements."""

    def nested(*lengths):
        rows = [torch.zeros(length, 2) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=layout)

    assert signature(nested(1, 2)) == signature(nested(2, 1))
    assert signature(nested(1, 2)) != signature(nested(2, 2))
