"""Undoes what a step does to objects outside of its module, after it has run on fake tensors.

A step may keep tensors in a variable of its file, of a class or of a function, or in a cache: fake
tensors there would end the training at the next batch. Or it may count its calls there.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from io import IOBase
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Undo = Callable[[], None]

#: Objects that are looked at, entries of one of them, and objects within one that has changed.
_MOST_OBJECTS, _MOST_ENTRIES, _MOST_WITHIN = 20_000, 10_000, 1_000
#: Packages that keep no tensors of a step.
_SKIPPED = {
    *sys.stdlib_module_names, "torch", "numpy", "lightning", "pytorch_lightning",
    "lightning_fabric", "lightning_utilities", "torchmetrics", "lightning_perf",
}  # fmt: skip
#: The step changes a copy of modules, and no fake tensor gets into others. Modules of Python have
#: variables that code names.
_LEFT = (Tensor, nn.Module, ModuleType)
#: Objects that a step would advance for good.
_ADVANCED = (Iterator, IOBase)
#: How the state of a random number generator is read and set, by its class.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}
_CACHED = type(lru_cache(len))
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque, tuple, frozenset)
_MISSING = object()


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Undo what the block changes in objects that the code of a module names.

    These are variables of files, classes and functions, the containers, objects and random number
    generators that they refer to, and the environment. Changes in installed packages, whose threads
    may change them meanwhile, are undone where they keep fake tensors.

    Raises:
        TypeError: The code names an iterator or an open file, which cannot be restored, or too many
            objects.
    """
    undo: list[Undo] = [partial(_restore_all, os.environ, dict(os.environ), True)]
    undo += _undo_of(_code_of(module))
    try:
        yield
    finally:
        for each in undo:
            with suppress(Exception):  # an object of the user that refuses the change
                each()


def _code_of(module: nn.Module) -> Iterator[object]:
    """The classes of a module's parts, and functions in their attributes, which copies share."""
    for part in module.modules():
        yield type(part)
        yield from (value for value in vars(part).values() if isinstance(value, FunctionType))


def _undo_of(code: Iterable[object]) -> Iterator[Undo]:
    """Functions that undo later changes of all that classes and functions refer to."""
    # Objects, and whether each is the user's.
    waiting: list[tuple[Any, bool]] = [(each, False) for each in code]
    seen = set[int]()
    while waiting:
        value, own = waiting.pop()
        if id(value) in seen or issubclass(type(value), _LEFT):
            continue
        seen.add(id(value))
        large = type(value) in _CONTAINERS and len(value) > _MOST_ENTRIES
        if large or len(seen) > _MOST_OBJECTS:
            raise TypeError("its code uses more objects outside of the module than can be restored")
        if own and issubclass(type(value), _ADVANCED):
            raise TypeError(f"its code uses a {type(value).__name__} outside of the module")
        if type(value) in _GENERATORS:
            get, set_state = _GENERATORS[type(value)]
            yield partial(set_state, value, get(value))
            continue
        if (home := _home(value)) is not None:
            if home in _SKIPPED:
                continue
            own = _is_own(home)
        undo, reached = _code(value, own) or _data(value, own)
        yield from undo
        waiting += [(each, own) for each in reached]


def _home(value: Any) -> str | None:
    """The package of a function, a class or an object; None for containers and plain values."""
    kind = type(value)
    if kind is FunctionType:
        name = value.__module__
    else:
        name = vars(value if issubclass(kind, type) else kind).get("__module__", "builtins")
    package = name.partition(".")[0] if isinstance(name, str) else ""
    return None if package in ("builtins", "collections", "functools") else package


def _is_own(package: str) -> bool:
    """Whether a package is not an installed one."""
    place = getattr(sys.modules.get(package), "__file__", None) or ""
    return "-packages" not in place


def _code(value: Any, own: bool) -> tuple[Sequence[Undo], Iterable[object]] | None:
    """Functions that undo changes of a function, a class or a wrapper, and what it refers to.

    None for other values.
    """
    kind = type(value)
    if kind is FunctionType:
        return _variables(value, own)
    if issubclass(kind, type):
        now = dict(vars(value))
        return [partial(_restore_all, value, now, own)], [*now.values(), *value.__bases__]
    if kind is _CACHED:
        return [partial(_clear_fakes, value)], [value.__wrapped__]
    if kind is partial:
        return [], [value.func, *value.args, *value.keywords.values()]
    if kind in (staticmethod, classmethod, MethodType):
        return [], [value.__func__, getattr(value, "__self__", None)]
    return ([], [value.fget]) if kind is property else None


def _data(value: Any, own: bool) -> tuple[Sequence[Undo], Iterable[object]]:
    """As `_code`, for a container, or an object with attributes."""
    kind = type(value)
    if kind in (list, set, deque):
        items = list(value)
        return [partial(_restore_items, value, items, own)], items
    if kind in (tuple, frozenset):
        return [], value
    space = value if kind in (dict, OrderedDict, defaultdict) else None
    with suppress(AttributeError):
        space = object.__getattribute__(value, "__dict__") if space is None else space
    if space is None:
        return [], []
    now = dict(space)
    return [partial(_restore_all, space, now, own)], [kind, *now.values()]


def _variables(function: FunctionType, own: bool) -> tuple[Sequence[Undo], Iterable[object]]:
    """As `_code`, for the variables that a function names."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    here = function.__globals__
    undo: list[Undo] = []
    reached = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    reached += vars(function).values()
    modules = (each for each in map(here.get, names) if isinstance(each, ModuleType))
    spaces = (vars(each) for each in modules if each.__name__.partition(".")[0] not in _SKIPPED)
    for space in (here, *spaces):
        now = {name: space.get(name, _MISSING) for name in names}
        undo.append(partial(_restore, space, now, own))
        reached += now.values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty
            undo.append(partial(_restore_cell, cell, cell.cell_contents, own))
            reached.append(cell.cell_contents)
    return undo, reached


def _restore_all(owner: Any, before: dict[Any, Any], own: bool) -> None:
    """Restore a dictionary, or the variables of a class."""
    space = vars(owner) if issubclass(type(owner), type) else owner
    _restore(owner, before | dict.fromkeys(space.keys() - before.keys(), _MISSING), own)


def _restore(owner: Any, before: dict[Any, Any], own: bool) -> None:
    """Restore some of its entries; `_MISSING` for those that it did not have."""
    is_class = issubclass(type(owner), type)
    space = vars(owner) if is_class else owner
    for name, value in before.items():
        now = space.get(name, _MISSING)
        if now is value or not (own or _keeps_fakes(now)):
            continue
        if value is _MISSING:
            type.__delattr__(owner, name) if is_class else space.pop(name)
        elif is_class:
            type.__setattr__(owner, name, value)
        else:
            space[name] = value


def _restore_items(container: Any, before: list[Any], own: bool) -> None:
    # Equality could run code of the user.
    same = [*map(id, container)] == [*map(id, before)]
    if not same and (own or _keeps_fakes(container)):
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _restore_cell(cell: Any, before: object, own: bool) -> None:
    if cell.cell_contents is not before and (own or _keeps_fakes(cell.cell_contents)):
        cell.cell_contents = before


def _clear_fakes(cached: Any) -> None:
    if _keeps_fakes(cached):
        cached.cache_clear()


def _keeps_fakes(value: object) -> bool:
    """Whether a fake tensor is reachable from an object through others."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_WITHIN:
        each = waiting.pop()
        if isinstance(each, FakeTensor):
            return True
        if id(each) not in seen and not isinstance(each, ModuleType | type | FunctionType):
            seen.add(id(each))
            waiting += gc.get_referents(each)
    return False
