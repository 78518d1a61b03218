"""Infers the number of samples and tokens of a batch from its shapes, without torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

_ADVICE = "define get_num_samples_in_batch on the LightningModule or the DataModule."
# Skipped at once, because a batch may contain a list of a thousand strings.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

#: Attributes of torch_geometric's batches: graphs, or the nodes around which a graph was sampled.
_SIZE_NAMES = ("num_graphs", "batch_size")


def get_num_samples(batch: Any) -> int:
    """Return the number of samples: the first dimension of the tensors in a batch.

    Tensors without dimensions and other values (None, numbers, strings, objects) are ignored.

    Args:
        batch: A tensor, a packed sequence, an object with a number ``num_graphs`` or
            ``batch_size``, or a list, tuple, mapping, named tuple or dataclass that contains any of
            these at any depth. ``input_ids`` take precedence.

    Raises:
        NotImplementedError: If the batch is empty or has another type.
        ValueError: If it contains no tensors or their first dimensions differ.
    """
    # A plain list or tuple, the usual batch, has no size of its own.
    size = None if type(batch) in (list, tuple) else _size(batch)
    if size is not None:
        return size
    sizes = set(_sizes(batch))
    if len(sizes) == 1:
        return sizes.pop()
    reason = f"no tensors were found in {type(batch).__name__}"
    if sizes:
        reason = f"the first dimensions {sorted(sizes)} differ"
    problem = f"Unable to determine the number of samples: {reason}; {_ADVICE}"
    empty = next(iter(parts(batch)), None) is None
    raise NotImplementedError(problem) if empty else ValueError(problem)


def get_num_tokens(batch: Any) -> int:
    """Return the tokens, padding included, of all ``input_ids`` or a packed sequence; else 0."""
    return int(batch.data.shape[0]) if hasattr(batch, "batch_sizes") else _num_ids(batch)


def counter_for(batch: Any, size: int) -> Callable[[Any], int] | None:
    """Return what counts batches like this one, which should have ``size`` samples.

    If their tensors have another first dimension, the batch may be a list of samples
    (``collate_fn=list``) or contain lists of them. None if nothing has this size.
    """
    with suppress(NotImplementedError, ValueError):
        if get_num_samples(batch) == size:
            return get_num_samples
    lists = [(None, batch), *parts(batch)]
    found = [key for key, part in lists if type(part) in (list, tuple) and len(part) == size]
    if not found:
        return None
    key = found[0]
    return len if key is None else lambda batch: len(dict(parts(batch))[key])


def checked_count(value: Any, name: str) -> int:
    """Return the result of a user's counter as an int.

    Raises:
        ValueError: If it is neither a non-negative int nor a tensor that contains just one.
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} returned {value!r}; expected a non-negative int.")
    return number


def _size(value: Any) -> int | None:
    """Return the number of samples of a value with a size of its own, else None."""
    if getattr(value, "is_nested", False) is True:  # such a tensor may have no shape
        return int(value.size(0))
    shape = getattr(value, "shape", None)
    # A pandas index has a shape too; only tensors and arrays have strides.
    if (
        shape
        and isinstance(shape, tuple)
        and (hasattr(value, "stride") or hasattr(value, "strides"))
    ):
        return int(shape[0])
    if hasattr(value, "batch_sizes"):
        return int(value.batch_sizes[0])
    input_ids = _input_ids(value)
    if input_ids is not None:
        return int(input_ids.shape[0])
    for name in _SIZE_NAMES:
        size = getattr(value, name, None)
        if isinstance(size, int):
            return size
    # A dataclass with a length, such as chemprop's graphs: the rows of its tensors are atoms.
    if is_dataclass(value) and isinstance(value, Sized) and not isinstance(value, Mapping):
        return len(value)
    return None


def _input_ids(batch: Any) -> Any:
    """Return the token ids of a Hugging Face batch, or None."""
    if isinstance(batch, Mapping):
        input_ids = batch.get("input_ids")
    else:
        input_ids = getattr(batch, "input_ids", None)
    return input_ids if getattr(input_ids, "shape", None) else None


def _num_ids(value: Any) -> int:
    """Return the number of token ids at any depth."""
    if type(value) in _PLAIN:
        return 0
    input_ids = _input_ids(value)
    if input_ids is None:
        return sum(_num_ids(part) for _, part in parts(value))
    numel = getattr(input_ids, "numel", None)
    return int(numel()) if numel else prod(input_ids.shape)


def parts(value: Any) -> Iterable[tuple[object, Any]]:
    """Return the items of a container with their keys, names or indexes; none of other values."""
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if isinstance(value, Mapping):
        return zip(value.keys(), value.values(), strict=True)  # a subclass may iterate otherwise
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    return ()


def _sizes(batch: Any) -> Iterator[int]:
    """Yield the number of samples of each part that has one, at any depth."""
    for _, part in parts(batch):
        if type(part) in _PLAIN:
            continue
        size = _size(part)
        if size is None:
            yield from _sizes(part)
        else:
            yield size
