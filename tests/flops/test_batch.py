"""Counting samples and tokens in batches of all usual types."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_perf.flops.batch import checked_count, get_num_samples, get_num_tokens

IDS = torch.zeros(4, 512, dtype=torch.long)
IMAGE, LABEL = torch.zeros(4, 3, 8, 8), torch.zeros(4)
PACKED = pack_sequence([torch.zeros(n, 2) for n in (5, 3, 2, 1)])
Pair = namedtuple("Pair", "image label")


@dataclass
class Example:
    image: torch.Tensor
    label: torch.Tensor


@dataclass
class Text:
    input_ids: torch.Tensor
    words: list[str]


class Columns:
    """Like a pandas.Index of two columns: it has a shape, but is not a tensor."""

    shape = (2,)


class Store:
    """Like torch_geometric's storage."""

    def __init__(self, **mapping):
        self._mapping = mapping


class Graphs:
    """Like torch_geometric's Batch: its tensors count nodes and edges."""

    def __init__(self):
        self.__dict__["_store"] = Store(x=torch.zeros(11, 3))
        self._store._num_graphs = 4


class Neighbours:
    """Like what torch_geometric's NeighborLoader gives: four nodes and their neighbours."""

    def __init__(self):
        self.__dict__["_store"] = Store(x=torch.zeros(11, 3), batch_size=4)


class Rows:
    """An object of the user."""

    __slots__ = ("x", "y")

    def __init__(self):
        self.x, self.y = LABEL, {"image": IMAGE}


@dataclass(slots=True)
class BatchMolGraph:
    """Like chemprop's: its tensors count atoms and bonds, its length molecules."""

    atoms: torch.Tensor
    bonds: torch.Tensor
    __size: int = 4

    def __len__(self):
        return self.__size


class Encoding(UserDict):
    """Like transformers.BatchEncoding, which also gives its entries as attributes."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    "batch",
    [
        IMAGE,
        IMAGE.numpy(),
        [IMAGE, LABEL],
        Pair(IMAGE, LABEL),
        Example(IMAGE, LABEL),
        [(IMAGE, LABEL), [{"x": LABEL}]],
        [Pair(IMAGE, LABEL), Example(IMAGE, LABEL)],
        PACKED,
        (PACKED, LABEL),
        (IMAGE, None),
        (None, [IMAGE, "name"], 3),
        {"image": IMAGE, "mask": None, "name": ["a", "b"], "index": 7},
        ({"x": LABEL, "lengths": [IMAGE]}, (LABEL, None)),
        {"temporal": IMAGE, "temporal_cols": Columns(), "y_idx": 0},
        [IMAGE, torch.tensor(1.0)],
        {"x": IMAGE, "n": torch.tensor(1)},
        Graphs(),
        Neighbours(),
        Rows(),
        {"x": Rows()},
        (BatchMolGraph(torch.zeros(11, 3), torch.zeros(20, 2)), None, LABEL),
        {"x": PACKED, "y": LABEL},
        torch.nested.nested_tensor([torch.zeros(n) for n in (1, 2, 3, 4)], layout=torch.jagged),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_counts_samples(batch):
    """Four samples are counted in every container that a collate function may return."""
    assert get_num_samples(batch) == 4


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": IDS, "attention_mask": IDS, "text": ["a", "b"]},
        Encoding(input_ids=IDS, text=["a", "b"]),
        Text(IDS, ["a", "b"]),
        {"input_ids": IDS.numpy(), "n": 5},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_input_ids_decide(batch):
    """input_ids take precedence for samples and tokens, padding included."""
    assert get_num_samples(batch) == 4
    assert get_num_tokens(batch) == 4 * 512


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": {"input_ids": IDS, "attention_mask": IDS}, "labels": LABEL},
        [Encoding(input_ids=IDS), None, ["a", "b"]],
        (LABEL, {"texts": [Text(IDS[:, :500], []), Text(IDS[:, :12], [])]}),
    ],
)
def test_counts_the_tokens_of_nested_texts(batch):
    """input_ids count at any depth; a batch with several texts has the tokens of all."""
    assert get_num_samples(batch) == 4
    assert get_num_tokens(batch) == 4 * 512


def test_counts_the_tokens_of_a_packed_sequence():
    """A packed sequence has no padding, so its tokens are its rows."""
    assert get_num_tokens(PACKED) == 5 + 3 + 2 + 1


@pytest.mark.parametrize("batch", [IMAGE, [IDS, IDS], {"x": IDS}, None, "text"])
def test_tokens_of_other_batches_are_not_tracked(batch):
    """Other batches have a token count of 0."""
    assert get_num_tokens(batch) == 0


def test_different_sizes_are_reported():
    """Tensors with different first dimensions are an error that lists them."""
    with pytest.raises(ValueError, match=r"\[4, 128\]"):
        get_num_samples([IMAGE, torch.zeros(128)])


@pytest.mark.parametrize("batch", [[1, 2], {"x": None}, [torch.tensor(1.0)], (["a"], Columns())])
def test_a_batch_without_a_size_is_refused(batch):
    """Without a first dimension, the message says what to define."""
    with pytest.raises(ValueError, match="get_num_samples_in_batch"):
        get_num_samples(batch)


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", {1, 2}])
def test_other_types_are_refused(batch):
    """The message names the method to define."""
    with pytest.raises(NotImplementedError, match="get_num_samples_in_batch"):
        get_num_samples(batch)


@pytest.mark.parametrize("value", [8, torch.tensor(8), np.int64(8)])
def test_checked_count_gives_a_plain_int(value):
    """Whole numbers of any type are converted to int."""
    count = checked_count(value, "counter")
    assert (count, type(count)) == (8, int)


@pytest.mark.parametrize("value", [-1, True, 8.0, None, "8", torch.tensor(8.0), torch.ones(2)])
def test_checked_count_refuses(value):
    """An invalid count is an error that names the counter."""
    with pytest.raises(ValueError, match="my_counter returned"):
        checked_count(value, "my_counter")
