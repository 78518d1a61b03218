"""The shapes of a batch, by which batches that cost the same are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Size, Tensor

Signature = tuple[Any, ...]


def signature(*args: object) -> Signature:
    """A hashable description of the shapes and dtypes of all tensors in some arguments.

    Lists, tuples, named tuples, mappings and dataclasses are walked. Anything else stands for
    itself by its type alone: two batches that differ only by a number have one signature.

    Args:
        args: A batch, or what a step is called with.

    Example:
        >>> import torch
        >>> signature(torch.ones(2, 3), 7) == signature(torch.zeros(2, 3), 8)
        True
    """
    parts: list[Any] = []
    for arg in args:
        _describe(arg, parts)
    return tuple(parts)


def numel(signature: Signature) -> int:
    """The number of elements of all tensors that a signature describes.

    Example:
        >>> import torch
        >>> numel(signature({"x": torch.ones(2, 3), "y": torch.ones(2)}))
        8
    """
    return sum(part.numel() for part in signature if isinstance(part, Size))


def _describe(value: Any, parts: list[Any]) -> None:
    kind = type(value)
    if kind is Tensor:
        parts += (value.dtype, _size(value))
    elif kind is tuple or kind is list:
        parts += (kind, len(value))
        for item in value:
            if type(item) is Tensor and not item.is_nested:  # a call less
                parts += (item.dtype, item.shape)
            else:
                _describe(item, parts)
    else:
        _describe_rare(value, kind, parts)


def _describe_rare(value: Any, kind: type, parts: list[Any]) -> None:
    if isinstance(value, Tensor):
        parts += (kind, value.dtype, _size(value))
    elif isinstance(value, Mapping):
        parts += (kind, *value)
        for item in value.values():
            _describe(item, parts)
    elif isinstance(value, list | tuple):
        parts += (kind, len(value))
        for item in value:
            _describe(item, parts)
    elif is_dataclass(value) and not isinstance(value, type):
        parts.append(kind)
        for name in value.__dataclass_fields__:
            _describe(getattr(value, name, None), parts)
    else:
        parts.append(kind)


def _size(tensor: Tensor) -> Size:
    # A nested tensor has no shape; what it costs goes with its elements.
    return Size([tensor.numel()]) if tensor.is_nested else tensor.shape
