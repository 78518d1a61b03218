"""How many samples and tokens a batch holds, found by its shape and without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

_ADVICE = "define get_num_samples_in_batch on the LightningModule or the DataModule."
# Passed over without a further look: a list of a thousand strings is looked through in every batch.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def get_num_samples(batch: Any) -> int:
    """Count the samples of a batch by the first dimension of the tensors in it.

    Parts that are not tensors (None, numbers, strings, other objects) are passed over, and so are
    tensors without dimensions.

    Args:
        batch: A tensor, a packed sequence, a batch of graphs (``num_graphs``), or a list, tuple,
            mapping, named tuple or dataclass with any of these in it, at any depth. Where there are
            ``input_ids``, they decide.

    Raises:
        NotImplementedError: If the batch is empty or of another kind.
        ValueError: If no part of it can be counted, or the parts disagree.

    Example:
        >>> import numpy as np
        >>> get_num_samples([np.zeros((128, 8)), np.zeros(128)])
        128
    """
    # A plain list or tuple, the usual batch, cannot tell by itself: do not ask it.
    size = None if type(batch) in (list, tuple) else _size(batch)
    if size is not None:
        return size
    sizes: set[int] = set()
    parts = _parts(batch)
    _collect(parts, sizes)
    if len(sizes) == 1:
        return sizes.pop()
    if sizes:
        raise ValueError(
            f"Unable to determine the number of samples: first dimensions {sorted(sizes)} "
            f"disagree; {_ADVICE}"
        )
    problem = (
        f"Unable to determine the samples in {type(batch).__name__} without tensors: {_ADVICE}"
    )
    raise ValueError(problem) if parts else NotImplementedError(problem)


def get_num_tokens(batch: Any) -> int:
    """Count the tokens of a batch.

    Args:
        batch: Anything; only ``input_ids`` and packed sequences tell their tokens.

    Returns:
        The tokens, padding included; 0 where they are not known.

    Example:
        >>> import numpy as np
        >>> get_num_tokens({"input_ids": np.zeros((4, 512), dtype=int)})
        2048
        >>> get_num_tokens(np.zeros((4, 512)))
        0
    """
    input_ids = _input_ids(batch)
    if input_ids is not None:
        numel = getattr(input_ids, "numel", None)
        return int(numel()) if numel else prod(input_ids.shape)
    if hasattr(batch, "batch_sizes"):
        return int(batch.data.shape[0])
    return 0


def checked_count(value: Any, name: str) -> int:
    """Check what a counter given by the user returned.

    Args:
        value: A whole number that is not negative, or a tensor without dimensions that holds one.
        name: The counter, for the message.

    Raises:
        ValueError: If it is anything else.

    Example:
        >>> checked_count(8, "get_num_tokens_in_batch")
        8
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} returned {value!r}; it must return an int that is not negative.")
    return number


def _size(value: Any) -> int | None:
    """Count what tells its samples by itself; None for what does not."""
    shape = getattr(value, "shape", None)
    # A pandas index (names of columns) has a shape too; only tensors and arrays have strides.
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
    graphs = getattr(value, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    # A dataclass with a length of its own, such as chemprop's graphs: its tensors count atoms.
    if is_dataclass(value) and isinstance(value, Sized) and not isinstance(value, Mapping):
        return len(value)
    return None


def _input_ids(batch: Any) -> Any:
    """Find the token ids of a Hugging Face batch, or None."""
    if isinstance(batch, Mapping):
        input_ids = batch.get("input_ids")
    else:
        input_ids = getattr(batch, "input_ids", None)
    return input_ids if getattr(input_ids, "shape", None) else None


def _parts(value: Any) -> Collection[Any]:
    """What a container holds; nothing in anything else."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def _collect(parts: Collection[Any], sizes: set[int]) -> None:
    """Add the sizes of all parts that have one."""
    for part in parts:
        if type(part) in _PLAIN:
            continue
        size = _size(part)
        if size is None:
            _collect(_parts(part), sizes)
        else:
            sizes.add(size)
