"""Counts a compiled module on a fake copy (a shadow), so that it stays compiled."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.data import DataLoader, Dataset

from lightning_perf.flops.batch import attributes, entries, tensors
from lightning_perf.flops.compat import fake_modes
from lightning_perf.flops.counter import Counts, FlopCounter
from lightning_perf.flops.effects import undone
from lightning_perf.flops.operators import FORMULAS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Module = TypeVar("Module", bound=nn.Module)


_MARK, _DISABLED = "_torchdynamo_orig_callable", "_torchdynamo_disable"
_WRAPPERS = "external_utils.py"


def is_compiled(module: nn.Module) -> bool:
    """Whether any part of a module is compiled by ``torch.compile``.

    Detects wrapped modules, ``module.compile()``, Lightning's ``from_compiled``, and compiled
    functions and methods of a module or its class, but not compiled global functions that a
    ``forward`` calls. Imports and runs nothing.
    """
    parts = list(module.modules())
    for part in parts:
        call = getattr(part, "_compiled_call_impl", None)
        if wrapped(part) is not None or call is not None or getattr(part, "_compiler_ctx", None):
            return True
    places = [*parts, *{base for part in parts for base in type(part).__mro__}]
    return any(is_compiled_function(value) for place in places for value in vars(place).values())


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a ``torch.compile(module)`` wrapper, or None."""
    dynamo = sys.modules.get("torch._dynamo")
    kind = getattr(dynamo, "OptimizedModule", ())
    inner: nn.Module | None = (
        vars(module)["_modules"]["_orig_mod"] if isinstance(module, kind) else None
    )
    return inner


def original(function: Any) -> Any:
    """Return the function or method before compilation."""
    while is_compiled_function(function):
        function = vars(function)[_MARK]
        # The compiler wraps functions of torch once more.
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith(_WRAPPERS):
            function = function.__wrapped__
    return function


def is_compiled_function(value: object) -> bool:
    """Whether a value is a function or method compiled by ``torch.compile``."""
    # Read from the dictionary: an attribute lookup would run the code of proxies and mocks.
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not isinstance(function, FunctionType):
        return False
    # `torch.compiler.disable` marks functions too, which then are not compiled.
    return _MARK in vars(function) and not vars(function).get(_DISABLED)


_READABLE = (bool, int, float, str, Enum, torch.device, type(None))
#: Attributes of a module that are not copied: data, which a step rarely uses; arrays of more bytes,
#: and containers of more items. And the objects that are looked at for that.
_DATA = (Dataset, DataLoader)
_LARGE, _LONG, _MOST_OBJECTS = 1 << 20, 1_000, 50_000
_SILENT = ("log", "log_dict", "print", "clip_gradients")


class Sink:
    """Accepts any call or access and does nothing: replaces loggers and schedulers."""

    def __getattr__(self, name: str) -> Sink:
        return self

    def __call__(self, *_args: object, **_kwargs: object) -> Sink:  # noqa: D102 (magic)
        return self

    def __getitem__(self, _key: object) -> Sink:
        return self


class IdleOptimizer:
    """An optimizer of the shadow's parameters that never changes them."""

    def __init__(
        self, original: Any, shadow: nn.Module, copies: Mapping[int, Any], closures: list[Counts]
    ) -> None:
        self._shadow: Any = shadow
        self._closures = closures
        self.param_groups = [
            {**group, "params": [copies[id(one)] for one in group["params"] if id(one) in copies]}
            for group in original.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None, **_: object) -> Any:
        """Run the closure only, once, and count it by itself."""
        with FlopCounter() as counter:
            loss = closure() if closure is not None else None
        self._closures.append(counter.counts)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the shadow runs a single step."""

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:  # noqa: ARG002 (Lightning's)
        """Disable gradients for the parameters of other optimizers inside the block."""
        self._shadow.toggle_optimizer(self)
        yield
        self._shadow.untoggle_optimizer(self)


class DetachedTrainer:
    """Gives read access to the numbers, strings and flags of a trainer, and to nothing else."""

    def __init__(self, original: Any, optimizers: list[IdleOptimizer]) -> None:
        self._original, self.optimizers = original, optimizers
        self.logger, self.loggers = Sink(), [Sink()]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if isinstance(value, _READABLE):
            return value
        raise AttributeError(f"trainer.{name} is not available while FLOPs are counted")


def detach(shadow: nn.Module, module: Any, copies: dict[int, Any], closures: list[Counts]) -> None:
    """Detach a shadow, a copy of the module, and its submodules from the trainer.

    ``copies`` are the copies of all objects by id of the original.
    """
    original = vars(module).get("_trainer")
    optimizers = [
        IdleOptimizer(one, shadow, copies, closures) for one in getattr(original, "optimizers", [])
    ]
    stubs: dict[str, Any] = dict.fromkeys(_SILENT, Sink())
    stubs["_trainer"] = None if original is None else DetachedTrainer(original, optimizers)
    stubs["_fabric"] = None
    stubs["optimizers"] = lambda *_, **__: optimizers[0] if len(optimizers) == 1 else optimizers
    stubs["lr_schedulers"] = lambda: _idle(module.lr_schedulers())
    stubs["manual_backward"] = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)
    for part in shadow.modules():
        if "_trainer" in vars(part):
            vars(part).update(stubs)


def _idle(schedulers: object) -> Any:
    if isinstance(schedulers, list):
        return [Sink() for _ in schedulers]
    return None if schedulers is None else Sink()


class ShadowError(RuntimeError):
    """A module, named by its class, whose FLOPs depend on more than shapes."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"{module} cannot be counted from shapes alone: {problem}")


def count_on_shadow(
    module: Module,
    batch: Any,
    step: Callable[[Module, Any], Tensor | None],
    closures: list[Counts] | None = None,
    *,
    isolated: bool = False,
) -> Counts:
    """Count the FLOPs of a step on fake tensors, without computing it.

    Parameters, gradients, buffers, random state and compiled code do not change, and no weights are
    copied. What the step does to objects outside of the module is undone where `undone` can, unless
    this process is ``isolated``: a child that ends afterwards. The step is called with the
    shadow and a fake batch, in the current grad mode; the backward of the returned loss is counted
    too, except with manual optimization. The counts of each closure that the step gives to an
    optimizer, which runs it once, are appended to ``closures``.

    Raises:
        ShadowError: If the module cannot be copied or its FLOPs depend on values.
    """
    name = type(module).__name__
    if isinstance(batch, Iterator):
        raise ShadowError(name, "the batch is an iterator, which a copy would consume")
    try:
        with _preserved_state(), nullcontext() if isolated else undone(module):
            counts = _count(module, batch, step, [] if closures is None else closures, isolated)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ShadowError(name, f"{type(error).__name__}: {reason}") from error
    if unknown := sorted(FORMULAS.keys() & counts.untracked_names):
        raise ShadowError(name, f"the sizes in {', '.join(unknown)} depend on data")
    return counts


def _count(
    module: Any,
    batch: Any,
    step: Callable[[Any, Any], Any],
    closures: list[Counts],
    isolated: bool,
) -> Counts:
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    # Refuse real tensors outside of the module, which would get fake gradients.
    fake_mode, copy_mode = fake_modes()
    mode = fake_mode(allow_non_fake_inputs=isolated, shape_env=shapes)
    with copy_mode(mode):
        shadow, fake, copies = _copy(module, batch, isolated)
    detach(shadow, wrapped(module) or module, copies, closures)
    if isolated:  # what a step warns of, it has warned of in the training
        warnings.simplefilter("ignore")
    # Runs compiled global functions, which cannot be found, without compilation.
    with torch.compiler.set_stance("force_eager"), mode, FlopCounter() as counter:
        loss = step(shadow, fake)
        automatic = getattr(module, "automatic_optimization", True)
        if automatic and isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return counter.counts


def _copy(module: Any, batch: Any, isolated: bool) -> tuple[Any, Any, dict[int, Any]]:
    """Return a copy of the module that is not compiled, one of the batch, and all copies by id."""
    copies: dict[int, Any] = {
        id(value): None
        for part in module.modules()
        for name in ("_trainer", "_fabric")
        if (value := vars(part).get(name)) is not None
    }
    copies |= _not_copied(module, copies, isolated)
    # From the innermost: wrappers may be nested.
    for wrapper in reversed([part for part in module.modules() if wrapped(part) is not None]):
        copies[id(wrapper)] = deepcopy(wrapped(wrapper), copies)
    shadow, fake = deepcopy((module, batch), copies)
    for part in shadow.modules():
        _uncompile(part, copies)
        if hasattr(part, "num_batches_tracked"):
            # A batch norm without momentum reads a tensor's value, which a shadow does not have.
            vars(part)["momentum"] = vars(part).get("momentum") or 0.0
    return shadow, fake, copies


def _not_copied(module: nn.Module, copies: dict[int, Any], isolated: bool) -> dict[int, Any]:
    """Data of a module that would take long to copy: what replaces it, by id.

    Datasets and the items of long lists stay the same objects. Large arrays do, too, but refuse
    changes unless this process is ``isolated``. What has a copy, such as the trainer, is skipped.
    """
    instead: dict[int, Any] = {}
    waiting, seen = [value for part in module.modules() for value in vars(part).values()], {*copies}
    while waiting:
        value: Any = waiting.pop()
        kind = type(value)
        if id(value) in seen or issubclass(kind, Tensor | nn.Module | type):
            continue
        seen.add(id(value))
        if len(seen) > _MOST_OBJECTS:
            raise ValueError("it holds too many objects to be copied")
        items = entries(value)
        if issubclass(kind, _DATA):
            instead[id(value)] = value
        elif issubclass(kind, np.ndarray) and value.nbytes > _LARGE:
            instead[id(value)] = view = value.view()
            view.flags.writeable &= isolated
        elif len(items) > _LONG and not any(isinstance(each, Tensor) for _, each in tensors(value)):
            instead[id(value)] = copy(value)
        else:
            waiting += [*(items or attributes(value)).values()]
    return instead


def _uncompile(part: nn.Module, copies: dict[int, Any]) -> None:
    own = vars(part)
    own.pop("_compiled_call_impl", None)
    # deepcopy keeps functions, bound to the original module.
    own |= {
        name: deepcopy(original(value), copies)
        for name, value in own.items()
        if is_compiled_function(value)
    }


@contextmanager
def _preserved_state() -> Iterator[None]:
    """Restore random state and grad mode afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
