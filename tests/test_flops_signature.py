"""Signatures of batches: equal for equal shapes, and for nothing else."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_perf.flops import numel, signature

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
def test_shapes_and_dtypes_tell_batches_apart(kind):
    """In every container, a new shape or dtype makes a new signature and new values do not."""
    base = signature(batch(kind, 2, 3), 0)
    assert hash(base) == hash(signature(batch(kind, 2, 3), 0))
    assert base == signature(batch(kind, 2, 3), 0)
    assert base != signature(batch(kind, 3, 2), 0)
    assert base != signature(batch(kind, 2, 3, dtype=torch.float64), 0)


def test_containers_tell_batches_apart():
    """The same tensors in another arrangement are another batch."""
    assert len({signature(batch(kind, 2, 3)) for kind in KINDS}) == len(KINDS)
    x = torch.zeros(2)
    assert signature([[x], x]) != signature([x, [x]])
    assert signature({"x": x}) != signature({"y": x})


def test_other_values_count_by_their_type():
    """A batch index, a name or a flag makes no new signature; a missing value does."""
    x = torch.zeros(2)
    assert signature(x, 1, "a", True) == signature(x, 2, "b", False)
    assert signature(x, None) != signature(x, 1)


def test_numel_adds_up_all_tensors():
    """The size of a batch is that of all its tensors."""
    assert numel(signature([torch.zeros(2, 3), {"x": torch.zeros(4)}, "text"])) == 10


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    """Nested tensors, which have no shape, are told by their elements."""

    def nested(*lengths):
        rows = [torch.zeros(length, 2) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=layout)

    assert signature(nested(1, 2)) == signature(nested(2, 1))
    assert signature(nested(1, 2)) != signature(nested(2, 2))
    assert numel(signature(nested(1, 2))) == 6
