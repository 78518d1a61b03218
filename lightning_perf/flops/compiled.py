"""Whether a module runs compiled code, which hides its operators from a counter."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_MARK = "_torchdynamo_orig_callable"


def is_compiled(module: nn.Module) -> bool:
    """Whether any part of a module is compiled by ``torch.compile``.

    Found are wrapped modules, ``module.compile()``, Lightning's ``from_compiled``, and compiled
    functions and methods of a module or of its class. A compiled free function that a ``forward``
    calls is not.

    Args:
        module: Asked with all its submodules. Nothing is imported and nothing is run.

    Example:
        >>> from torch import nn
        >>> is_compiled(nn.Linear(2, 2))
        False
    """
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = getattr(dynamo, "OptimizedModule", ())
    parts = list(module.modules())
    if any(isinstance(part, wrapper) or _is_called_compiled(part) for part in parts):
        return True
    classes = {base for kind in map(type, parts) for base in kind.__mro__}
    return any(_is_marked(value) for value in _values([*map(vars, parts), *map(vars, classes)]))


def _is_called_compiled(module: nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    return call is not None or bool(getattr(module, "_compiler_ctx", None))


def _values(spaces: list[Mapping[str, object]]) -> Iterator[object]:
    return (value for space in spaces for value in space.values())


def _is_marked(value: object) -> bool:
    # Read from the dictionary: an attribute lookup would run the code of proxies and mocks.
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return isinstance(function, FunctionType) and _MARK in vars(function)
