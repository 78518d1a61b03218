"""Batches of every usual kind, counted."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_perf.core.batch import checked_count, get_num_samples, get_num_tokens

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
    """Like a pandas.Index of two columns: it has a shape, and is no tensor."""

    shape = (2,)


class Graphs:
    """Like torch_geometric's Batch: its tensors count nodes and edges."""

    num_graphs = 4
    x = torch.zeros(11, 3)


@dataclass
class Molecules:
    """Like chemprop's BatchMolGraph: its tensors count atoms and bonds, its length molecules."""

    atoms: torch.Tensor
    bonds: torch.Tensor

    def __len__(self):
        return 4


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
        (Molecules(torch.zeros(11, 3), torch.zeros(20, 2)), None, LABEL),
        {"x": PACKED, "y": LABEL},
        torch.nested.nested_tensor([torch.zeros(n) for n in (1, 2, 3, 4)], layout=torch.jagged),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_counts_samples(batch):
    """Four samples are four in whatever the collate function put them."""
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
    """Where there are input_ids, they alone tell samples and tokens, padding included."""
    assert get_num_samples(batch) == 4
    assert get_num_tokens(batch) == 4 * 512


def test_counts_the_tokens_of_a_packed_sequence():
    """A packed sequence holds no padding, so its tokens are its rows."""
    assert get_num_tokens(PACKED) == 5 + 3 + 2 + 1


@pytest.mark.parametrize("batch", [IMAGE, [IDS, IDS], {"x": IDS}, None, "text"])
def test_tokens_elsewhere_are_not_tracked(batch):
    """Nothing but input_ids and packed sequences tells tokens: the count is 0, never a guess."""
    assert get_num_tokens(batch) == 0


def test_disagreeing_sizes_are_named():
    """Parts that disagree cannot be counted, and the sizes are in the message."""
    with pytest.raises(ValueError, match=r"\[4, 128\]"):
        get_num_samples([IMAGE, torch.zeros(128)])


@pytest.mark.parametrize("batch", [[1, 2], {"x": None}, [torch.tensor(1.0)], (["a"], Columns())])
def test_a_batch_without_a_size_is_refused(batch):
    """Where no part has a first dimension, the message says what to define."""
    with pytest.raises(ValueError, match="get_num_samples_in_batch"):
        get_num_samples(batch)


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", {1, 2}])
def test_other_kinds_say_what_to_define(batch):
    """A batch of another kind is refused with the method that would count it."""
    with pytest.raises(NotImplementedError, match="get_num_samples_in_batch"):
        get_num_samples(batch)


@pytest.mark.parametrize("value", [8, torch.tensor(8), np.int64(8)])
def test_checked_count_gives_a_plain_int(value):
    """A whole number is taken in whatever form, and comes out as int."""
    count = checked_count(value, "counter")
    assert (count, type(count)) == (8, int)


@pytest.mark.parametrize("value", [-1, True, 8.0, None, "8", torch.tensor(8.0), torch.ones(2)])
def test_checked_count_refuses(value):
    """What is no count is refused in the name of the counter."""
    with pytest.raises(ValueError, match="my_counter returned"):
        checked_count(value, "my_counter")
