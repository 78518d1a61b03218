"""Signatures: the shapes and dtypes of all tensors of a batch, by which FLOPs are known."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Size, Tensor
from torch._C import DisableTorchFunctionSubclass

from lightning_perf.flops.batch import (
    MOST_OBJECTS,
    attributes,
    container,
    entries,
    has_hidden_state,
    shape_of,
)

Signature = tuple[Any, ...]

#: Types without tensors, whose values do not affect the cost.
_LEAVES = (
    type(None), int, float, str, bytes, range, slice, type, ModuleType, Enum, date, time, timedelta,
    Decimal, PurePath, UUID, np.generic, torch.dtype, torch.device, torch.layout, weakref.ref,
    Number, FunctionType, BuiltinFunctionType, MethodType,
)  # fmt: skip
#: Keys that count by their values, because their types do not define equality in Python.
_KEYS = (type(None), bool, int, float, str, bytes)
#: Packages whose arrays, such as an index of pandas, run no code of the user.
_ARRAYS = ("pandas", "jaxlib", "cupy")
#: Methods by which a class gives something else than its attributes.
_ACCESS = ("__getitem__", "__getattr__")


def signature(value: object) -> Signature:
    """Return a hashable description of the shapes and dtypes of all tensors in a value.

    Walks lists, tuples, dicts, arrays and attributes of objects, without running the user's code.
    Numbers, strings and similar values count by type only: batches that differ in a number have the
    same signature. Objects that cannot be inspected (iterators, objects without attributes) make
    the signature unique.
    """
    if (plain := _plain_signature(value)) is not None:
        return plain
    description: list[Any] = []
    _describe(value, description, set())
    return tuple(description)


def _plain_signature(value: Any) -> Signature | None:
    """The signature of a tensor, or of a list, tuple or dict of tensors; None for other values.

    In one function, since it is called at every batch.
    """
    kind = type(value)
    description: list[Any] = [kind]
    if kind is tuple or kind is list:
        description.append(len(value))
    elif kind is dict:
        description += map(_describable, value)
        value = value.values()
    elif kind is Tensor:
        description, value = [], (value,)
    else:
        return None
    for item in value:
        if type(item) is not Tensor or item.is_nested:
            return None
        description += (item.dtype, item.shape)
    return tuple(description)


def _describe(value: Any, description: list[Any], seen: set[int]) -> None:
    kind: Any = type(value)
    description.append(kind)
    if issubclass(kind, Tensor):
        description += _dtype_and_size(value)
    elif container(kind) is not None:
        items = entries(value)
        description.append(len(items))
        for key, item in items.items():
            description.append(_describable(key))
            _describe(item, description, seen)
        if kind not in (list, tuple, dict):
            for name, attribute in attributes(value).items():
                if issubclass(type(attribute), Tensor):
                    description.append(name)
                    _describe(attribute, description, seen)
    elif issubclass(kind, np.ndarray) or _is_array(value, kind):
        _describe_array(value, description, seen)
    elif not issubclass(kind, _LEAVES):
        _describe_object(value, description, seen)


def _describable(key: Any) -> object:
    """Return a key, or its type if comparing keys may run the user's code."""
    parts = key if type(key) is tuple else (key,)
    return key if all(type(part) in _KEYS for part in parts) else type(key)


def _dtype_and_size(value: Any) -> tuple[Any, ...]:
    kind: Any = Tensor
    with DisableTorchFunctionSubclass():
        # A nested tensor has no shape; its cost depends on the number of elements.
        nested = kind.is_nested.__get__(value)
        return kind.dtype.__get__(value), Size([kind.numel(value)]) if nested else shape_of(value)


def _is_array(value: Any, kind: type) -> bool:
    """Whether an object converts to one NumPy array, as an index of pandas does."""
    return (
        str(kind.__module__).startswith(_ARRAYS)
        and hasattr(kind, "__array__")
        and isinstance(getattr(value, "shape", None), tuple)
        and getattr(value, "dtype", None) is not None
    )


def _describe_array(value: Any, description: list[Any], seen: set[int]) -> None:
    array: Any = value
    if issubclass(type(value), np.ndarray):
        array = np.ndarray.view(value, np.ndarray)
    description += (array.dtype, Size(array.shape))
    if not getattr(array.dtype, "hasobject", False):
        return
    # Strings in most cases, but any of them may be a tensor.
    if array.dtype != object or array.size > MOST_OBJECTS or id(value) in seen:
        description.append(object())
        return
    seen.add(id(value))
    for item in np.asarray(array).flat:
        _describe(item, description, seen)


def _describe_object(value: Any, description: list[Any], seen: set[int]) -> None:
    """Describe an object by its attributes, in ``__dict__`` and slots."""
    if id(value) in seen:  # already described, or a cycle
        return
    seen.add(id(value))
    kind: Any = type(value)
    before = len(description)
    if issubclass(kind, Iterator) or has_hidden_state(kind) or len(seen) > MOST_OBJECTS:
        description.append(object())
        return
    parts = attributes(value)
    description += parts
    for part in parts.values():
        _describe(part, description, seen)
    known = any(type(each) is Size for each in description[before:])
    if not known and any(hasattr(kind, name) for name in _ACCESS):
        description.append(object())
