"""Whether a module runs compiled code, which hides its operators from a counter."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_MARK = "_torchdynamo_orig_callable"
_WRAPPERS = "external_utils.py"


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
    parts = list(module.modules())
    if any(wrapped(part) is not None or _is_called_compiled(part) for part in parts):
        return True
    classes = {base for kind in map(type, parts) for base in kind.__mro__}
    values = _values([*map(vars, parts), *map(vars, classes)])
    return any(is_compiled_function(value) for value in values)


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` was called with, or None if this is no wrapper."""
    dynamo = sys.modules.get("torch._dynamo")
    kind = getattr(dynamo, "OptimizedModule", ())
    inner: nn.Module | None = (
        vars(module)["_modules"]["_orig_mod"] if isinstance(module, kind) else None
    )
    return inner


def original(function: Any) -> Any:
    """What a compiled function or method was before it was compiled."""
    while is_compiled_function(function):
        function = vars(function)[_MARK]
        # The compiler puts a function of its own around one of torch's.
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(_WRAPPERS):
            function = function.__wrapped__
    return function


def _is_called_compiled(module: nn.Module) -> bool:
    call = getattr(module, "_compiled_call_impl", None)
    return call is not None or bool(getattr(module, "_compiler_ctx", None))


def _values(spaces: list[Mapping[str, object]]) -> Iterator[object]:
    return (value for space in spaces for value in space.values())


def is_compiled_function(value: object) -> bool:
    """Whether a value is what ``torch.compile`` makes of a function or method."""
    # Read from the dictionary: an attribute lookup would run the code of proxies and mocks.
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return isinstance(function, FunctionType) and _MARK in vars(function)
