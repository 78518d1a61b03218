"""Signatures of batches: batches with equal signatures cost the same FLOPs."""

from __future__ import annotations

import copyreg
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import isroutine
from numbers import Number
from pathlib import PurePath
from types import ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Size, Tensor

Signature = tuple[Any, ...]

#: Types without tensors, whose values do not affect the cost.
_LEAVES = (
    type(None), int, float, str, bytes, range, slice, type, ModuleType, Enum, date, time, timedelta,
    Decimal, PurePath, UUID, np.generic, torch.dtype, torch.device, torch.layout, weakref.ref,
    Number,
)  # fmt: skip
#: Maximum number of objects to inspect per batch.
_MOST_OBJECTS = 256
#: The flag of classes that are created at run time.
_HEAP_TYPE = 1 << 9


def signature(value: object) -> Signature:
    """Return a hashable description of the shapes and dtypes of all tensors in a value.

    Walks lists, tuples, mappings, arrays and attributes of objects. Numbers, strings and similar
    values count by type only: batches that differ in a number have the same signature. Objects that
    cannot be inspected (iterators, objects without attributes) make the signature unique.
    """
    kind = type(value)
    if kind is tuple or kind is list:  # of tensors: in place, since it is done at every batch
        found: list[Any] = [kind, len(value)]  # type: ignore[arg-type]
        for item in value:  # type: ignore[attr-defined]
            if type(item) is not Tensor or item.is_nested:
                break
            found += (item.dtype, item.shape)
        else:
            return tuple(found)
    parts: list[Any] = []
    _describe(value, parts, set())
    return tuple(parts)


def _describe(value: Any, parts: list[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind is Tensor:
        _describe_tensor(value, parts)
    elif kind is tuple or kind is list:
        parts += (kind, len(value))
        for item in value:
            _describe(item, parts, seen)
    else:
        _describe_rare(value, kind, parts, seen)


def _describe_tensor(tensor: Tensor, parts: list[Any]) -> None:
    # A nested tensor has no shape; its cost depends on the number of elements.
    parts += (tensor.dtype, Size([tensor.numel()]) if tensor.is_nested else tensor.shape)


def _describe_rare(value: Any, kind: type, parts: list[Any], seen: set[int]) -> None:
    parts.append(kind)
    if isinstance(value, Tensor):
        _describe_tensor(value, parts)
    elif isinstance(value, Mapping):
        parts.extend(value.keys())  # a mapping may define its own ``+`` and iteration
        for item in value.values():
            _describe(item, parts, seen)
        if kind is not dict:
            _describe_extras(value, parts)
    elif isinstance(value, list | tuple | deque):
        parts.append(len(value))
        for item in value:
            _describe(item, parts, seen)
        _describe_extras(value, parts)
    elif isinstance(value, np.ndarray) or _is_array(value, kind):
        _describe_array(value, parts, seen)
    elif not isinstance(value, _LEAVES) and not isroutine(value):
        _describe_object(value, parts, seen)


def _is_array(value: Any, kind: type) -> bool:
    """Whether an object converts to one NumPy array, as an index of pandas does."""
    return (
        hasattr(kind, "__array__")
        and not isinstance(value, np.generic)
        and isinstance(getattr(value, "shape", None), tuple)
        and not isinstance(getattr(value, "dtype", None), torch.dtype | None)
    )


def _describe_array(array: Any, parts: list[Any], seen: set[int]) -> None:
    parts += (array.dtype, Size(array.shape))
    if not getattr(array.dtype, "hasobject", False):
        return
    # Strings in most cases, but any of them may be a tensor.
    if array.dtype != object or array.size > _MOST_OBJECTS or id(array) in seen:
        parts.append(object())
        return
    seen.add(id(array))
    for item in np.asarray(array).flat:
        _describe(item, parts, seen)


def _describe_extras(container: Any, parts: list[Any]) -> None:
    """Describe the tensors in the attributes of a container."""
    for name, attribute in getattr(container, "__dict__", {}).items():
        if isinstance(attribute, Tensor):
            parts.append(name)
            _describe_tensor(attribute, parts)


def _describe_object(value: Any, parts: list[Any], seen: set[int]) -> None:
    """Describe an object by its attributes, in ``__dict__`` and slots."""
    if id(value) in seen:  # already described, or a cycle
        return
    seen.add(id(value))
    attributes = None if isinstance(value, Iterator) else _attributes(value)
    if attributes is None or len(seen) > _MOST_OBJECTS:
        parts.append(object())
        return
    parts += attributes
    for attribute in attributes.values():
        _describe(attribute, parts, seen)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return all attributes of an object, or None if it may have hidden state."""
    own = getattr(value, "__dict__", None)
    for base in type(value).__mro__[:-1]:
        # Classes written in C may have hidden state; Python classes have slots or a dictionary.
        if not base.__flags__ & _HEAP_TYPE or (own is None and "__slots__" not in vars(base)):
            return None
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {**(own or {}), **{name: getattr(value, name, None) for name in slots}}
