"""Reads batches without running the user's code, and infers their samples and tokens.

A batch may be of any class, and whatever an attribute or an item of it does when it is read (draw a
random number, load a file, count accesses) would change training. Only what torch, numpy and
builtin types store is read: items of containers, instance dictionaries and slots.
"""

from __future__ import annotations

from collections import UserDict, deque
from contextlib import suppress
from functools import lru_cache
from math import prod
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ADVICE = "define get_num_samples_in_batch on the LightningModule or the DataModule."
#: Skipped at once, because a batch may contain a list of a thousand strings.
PLAIN = frozenset({type(None), bool, int, float, str, bytes})

#: Attributes with the number of samples: of torch_geometric's batches (graphs, or the nodes around
#: which a graph was sampled) and of chemprop's, whose tensors have a row per node or atom.
_SIZE_NAMES = ("num_graphs", "_num_graphs", "batch_size", "_BatchMolGraph__size")
#: Attributes in which torch_geometric's batches keep the others.
_STORES = ("_store", "_global_store", "_mapping")

_CONTAINERS: tuple[type, ...] = (dict, list, tuple, deque, UserDict)
#: Methods that give the items of a container.
_READERS = frozenset({"__iter__", "__getitem__", "__len__", "get", "items", "keys", "values"})
#: The flag of classes that are created at run time.
_HEAP_TYPE = 1 << 9
#: Maximum number of objects to inspect per batch.
MOST_OBJECTS = 256


@lru_cache(maxsize=256)
def container(kind: Any) -> type | None:
    """Return the builtin container of a class, unless the class reads its items in its own way."""
    mro = kind.__mro__
    base = next((each for each in mro if each in _CONTAINERS), None)
    if base is None or base is UserDict:
        return base
    own = (vars(each) for each in mro[: mro.index(base)] if each.__flags__ & _HEAP_TYPE)
    return base if all(_READERS.isdisjoint(names) for names in own) else None


@lru_cache(maxsize=256)
def _descriptors(kind: Any) -> dict[str, Any]:
    """Return what reads the instance dictionary and the slots of a class."""
    kinds = MemberDescriptorType, GetSetDescriptorType
    own = [vars(base) for base in reversed(kind.__mro__) if base.__flags__ & _HEAP_TYPE]
    found = {name: each for names in own for name, each in names.items() if type(each) in kinds}
    found.pop("__weakref__", None)
    return found


@lru_cache(maxsize=256)
def has_hidden_state(kind: Any) -> bool:
    """Whether objects of a class may have more than attributes, because a base is written in C."""
    bases = kind.__mro__[:-1]
    slotted = "__dict__" in _descriptors(kind) or all("__slots__" in vars(each) for each in bases)
    return not (slotted and all(each.__flags__ & _HEAP_TYPE for each in bases))


def attributes(value: Any) -> dict[str, Any]:
    """Return what is in the instance dictionary and the slots of an object."""
    kind: Any = type(value)
    found: dict[str, Any] = {}
    for name, descriptor in _descriptors(kind).items():
        with suppress(AttributeError):  # a slot that is not set
            part = descriptor.__get__(value)
            found |= part if name == "__dict__" else {name: part}
    return found


def entries(value: Any) -> dict[Any, Any]:
    """Return the items of a container or the fields of a dataclass; nothing of other values."""
    kind: Any = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    base: Any = container(kind)
    if base is dict:
        return dict.copy(value)
    if base is UserDict:
        return entries(attributes(value).get("data"))
    if base is not None:
        items, names = base.__iter__(value), getattr(kind, "_fields", None)
        return dict(zip(names, items, strict=False) if names else enumerate(items))
    if fields := getattr(kind, "__dataclass_fields__", None):
        return {name: part for name, part in attributes(value).items() if name in fields}
    return {}


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor or an array, of a nested one the first dimension; else None."""
    kind: Any = type(value)
    if issubclass(kind, Tensor):
        tensor: Any = Tensor
        with DisableTorchFunctionSubclass():
            nested = tensor.is_nested.__get__(value)
            return (tensor.size(value, 0),) if nested else tensor.shape.__get__(value)
    array: Any = np.ndarray
    return array.shape.__get__(value) if issubclass(kind, array) else None


def tensors(
    value: Any, key: object = None, seen: set[int] | None = None
) -> Iterator[tuple[object, Any]]:
    """Yield the tensors and arrays in a value with their keys, at any depth.

    Those in attributes of objects too if ``seen`` is a set, of the objects that were inspected.
    """
    if shape_of(value) is not None:
        yield key, value
        return
    parts = entries(value)
    if not parts and seen is not None and id(value) not in seen and len(seen) < MOST_OBJECTS:
        seen.add(id(value))
        parts = attributes(value)
    for name, part in parts.items():
        if type(part) not in PLAIN:
            yield from tensors(part, name, seen)


def get_num_samples(batch: Any) -> int:
    """Return the number of samples: the first dimension of the tensors in a batch.

    Tensors without dimensions and other values (None, numbers, strings) are ignored, and so are the
    attributes of objects, unless nothing else has a size.

    Args:
        batch: A tensor, an array, a packed sequence, an object with a number ``num_graphs`` or
            ``batch_size``, or a list, tuple, dict, named tuple or dataclass that contains any of
            these at any depth. ``input_ids`` take precedence.

    Raises:
        NotImplementedError: If the batch is empty or has another type.
        ValueError: If it contains no tensors or their first dimensions differ.
    """
    shapes = (shape_of(each) for _, each in tensors(batch, seen=set()))
    sizes = {*_sizes(batch)} or {shape[0] for shape in shapes if shape}
    if len(sizes) == 1:
        return int(sizes.pop())
    reason = f"no tensors were found in {type(batch).__name__}"
    if sizes:
        reason = f"the first dimensions {sorted(sizes)} differ"
    problem = f"Unable to determine the number of samples: {reason}; {_ADVICE}"
    raise ValueError(problem) if entries(batch) or sizes else NotImplementedError(problem)


def get_num_tokens(batch: Any) -> int:
    """Return the tokens, padding included, of all ``input_ids`` or a packed sequence; else 0."""
    return int(batch.data.shape[0]) if type(batch) is PackedSequence else _num_ids(batch)


def counter_for(
    batch: Any, size: int, full: bool, several: bool = False
) -> Callable[[Any], int] | None:
    """Return what counts batches like this one, to which the data loader gave ``size`` samples.

    With ``several`` loaders, the first one's samples count: their last batches may differ.

    If their tensors have another first dimension, the batch may be a list of samples
    (``collate_fn=list``) or contain lists of them. Only a batch that is certainly ``full`` shows
    more: time may be the first dimension, or sequences are packed into one. None if nothing has
    this size.
    """
    with suppress(NotImplementedError, ValueError):
        if get_num_samples(batch) == size:
            return _of_first if several else get_num_samples
    for key, part in [(None, batch), *entries(batch).items()]:
        if type(part) in (list, tuple) and len(part) == size:
            return len if key is None else _length(key)
    return _counter_of_tensors(batch, size) if full and size > 1 else None


def _of_first(batch: Any) -> int:
    """Return the samples of a batch, or of the first loader's part of it."""
    with suppress(ValueError):
        return get_num_samples(batch)
    return get_num_samples(next(part for part in entries(batch).values() if part is not None))


def _counter_of_tensors(batch: Any, size: int) -> Callable[[Any], int] | None:
    """Return what counts a full batch by a dimension that all tensors have, or by its sequences."""
    found = _with_dimensions(batch)
    shared = all(size in shape for _, _, shape in found)
    for index, (name, each, shape) in enumerate(found):
        if shared and shape.count(size) == 1:
            return _dimension(index, shape.index(size))
        if type(each) is not Tensor or type(name) is not str or each.is_floating_point():
            continue
        if "cu_seq" in name and len(shape) == 1:
            return _dimension(index, 0, less=1)
        if name == "position_ids":
            # Reading values from a device would wait for it.
            return _zeros(index) if each.is_cpu else lambda _: size
    return None


def _with_dimensions(batch: Any) -> list[tuple[object, Any, tuple[int, ...]]]:
    return [(name, each, shape) for name, each in tensors(batch) if (shape := shape_of(each))]


def _dimension(index: int, dimension: int, less: int = 0) -> Callable[[Any], int]:
    return lambda batch: int(_with_dimensions(batch)[index][2][dimension]) - less


def _length(key: object) -> Callable[[Any], int]:
    return lambda batch: len(entries(batch)[key])


def _zeros(index: int) -> Callable[[Any], int]:
    return lambda batch: int(np.sum(_with_dimensions(batch)[index][1].numpy() == 0))


def checked_count(value: Any, name: str) -> int:
    """Return the result of a user's counter as an int.

    Raises:
        ValueError: If it is neither a non-negative int nor a tensor that contains just one.
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} returned {value!r}; expected a non-negative int.")
    return number


def _named(value: Any) -> dict[Any, Any]:
    """Return the entries of a value, or the attributes of an object and of the stores in it."""
    if type(value) in (list, tuple):
        return {}
    if found := entries(value):
        return found
    found = attributes(value)
    for name in found.keys() & set(_STORES):
        found = found | _named(found[name])
    return found


def _size(value: Any) -> int | None:
    """Return the number of samples of a value with a size of its own, else None."""
    kind = type(value)
    if shape := shape_of(value):
        return int(shape[0])
    if kind is PackedSequence:
        return int(value.batch_sizes[0])
    named = _named(value)
    if shape := shape_of(named.get("input_ids")):
        return int(shape[0])
    sizes = (named.get(name) for name in _SIZE_NAMES if kind is not dict)
    return next((size for size in sizes if type(size) is int), None)


def _sizes(value: Any) -> Iterator[int]:
    """Yield the number of samples of each part that has one, at any depth."""
    if type(value) in PLAIN:
        return
    size = _size(value)
    if size is not None:
        yield size
    # The length of such a dataclass is code of the user, and its tensors may count something else.
    elif not (hasattr(type(value), "__dataclass_fields__") and hasattr(type(value), "__len__")):
        for part in entries(value).values():
            yield from _sizes(part)


def _num_ids(value: Any) -> int:
    """Return the number of token ids at any depth."""
    if type(value) in PLAIN or type(value) is Tensor:
        return 0
    ids: Any = _named(value).get("input_ids")
    if not (shape := shape_of(ids)):
        return sum(map(_num_ids, entries(value).values()))
    with DisableTorchFunctionSubclass():  # the shape of a nested tensor is not known
        return Tensor.numel(ids) if issubclass(type(ids), Tensor) else prod(shape)
