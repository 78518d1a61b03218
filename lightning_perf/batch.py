"""How many samples and tokens a batch holds, found by its shape and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

_ADVICE = "define get_num_samples_in_batch on the LightningModule or the DataModule."


def get_num_samples(batch: Any) -> int:
    """Count the samples of a batch by the first dimension of the tensors in it.

    Args:
        batch: A tensor, a packed sequence, or a list, tuple, mapping, named tuple or dataclass of
            them; a list also holds any of these. Where there are ``input_ids``, they decide.

    Raises:
        NotImplementedError: If the batch is empty or of another kind.
        ValueError: If a part of it cannot be counted, or the parts disagree.

    Example:
        >>> import numpy as np
        >>> get_num_samples([np.zeros((128, 8)), np.zeros(128)])
        128
    """
    # A plain list or tuple, the usual batch, cannot tell by itself: do not ask it.
    size = None if type(batch) in (list, tuple) else _size(batch)
    if size is not None:
        return size
    sizes = _part_sizes(batch)
    if not sizes:
        raise NotImplementedError(
            f"Unable to determine the samples in {type(batch).__name__} without tensors: {_ADVICE}"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"Unable to determine the number of samples: first dimensions {sorted(sizes)} "
            f"disagree; {_ADVICE}"
        )
    return sizes.pop()


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
    if shape and isinstance(shape, tuple):
        return int(shape[0])
    if hasattr(value, "batch_sizes"):
        return int(value.batch_sizes[0])
    input_ids = _input_ids(value)
    return None if input_ids is None else int(input_ids.shape[0])


def _input_ids(batch: Any) -> Any:
    """Find the token ids of a Hugging Face batch, or None."""
    if isinstance(batch, Mapping):
        input_ids = batch.get("input_ids")
    else:
        input_ids = getattr(batch, "input_ids", None)
    return input_ids if getattr(input_ids, "shape", None) else None


def _part_sizes(batch: Any) -> set[int]:
    if isinstance(batch, list | tuple):
        return {_part_size(part) for part in batch}
    if isinstance(batch, Mapping):
        return {_entry_size(name, value) for name, value in batch.items()}
    if is_dataclass(batch):
        return {_entry_size(field.name, getattr(batch, field.name)) for field in fields(batch)}
    return set()


def _entry_size(name: Any, value: Any) -> int:
    size = None if isinstance(value, Mapping) else _size(value)
    if size is None:
        raise ValueError(
            f"Unable to determine the samples in {name!r}, a {type(value).__name__}: {_ADVICE}"
        )
    return size


def _part_size(part: Any) -> int:
    size = _size(part)
    if size is not None:
        return size
    try:
        return get_num_samples(part)
    except NotImplementedError as error:
        raise ValueError(str(error)) from None
