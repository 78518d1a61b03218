"""Counting a module without running it, on a shadow of fake tensors that have shapes only.

A compiled module hides its operators, and a counter around it would leave it eager for good. Its
shadow runs what was compiled as it was written, and the module itself never notices.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_perf.flops.compiled import is_compiled_function, original, wrapped
from lightning_perf.flops.counter import Counts, FlopCounter
from lightning_perf.flops.detached import detach
from lightning_perf.flops.registry import FORMULAS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    Module = TypeVar("Module", bound=nn.Module)


class ShadowError(RuntimeError):
    """A module whose work depends on more than shapes, so that it can be counted only by running.

    Args:
        module: The module's class.
        problem: What it needed.
    """

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(module, problem)
        self.module, self.problem = module, problem

    def __str__(self) -> str:
        return f"{self.module} cannot be counted by shapes alone: {self.problem}"


def count_on_shadow(
    module: Module, batch: Any, step: Callable[[Module, Any], Tensor | None]
) -> Counts:
    """Count the FLOPs of a step without computing anything.

    Parameters, gradients, buffers, random numbers and compiled code stay as they are, and no weight
    is copied. What the step does to objects that are not the module's own, it does to them.

    Args:
        module: Compiled or not; a LightningModule may be attached to its trainer, whose numbers and
            flags the shadow can read.
        batch: Any nesting of tensors that can be copied.
        step: Called with the shadow and a fake batch, in the present grad mode. The backward of the
            loss that it returns is counted too, unless the module optimizes manually and has done
            that itself.

    Raises:
        ShadowError: The module cannot be copied, or its work depends on values.

    Example:
        >>> layer = torch.nn.Linear(4, 8)
        >>> count_on_shadow(layer, torch.ones(2, 4), lambda model, x: model(x).sum()).model
        {'float32': 256}
    """
    name = type(module).__name__
    if isinstance(batch, Iterator):
        raise ShadowError(name, "a copy would take its batches from the iterator that has them")
    try:
        with _unchanged():
            counts = _count(module, batch, step)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ShadowError(name, f"{type(error).__name__}: {reason}") from error
    if unknown := sorted(FORMULAS.keys() & counts.untracked_names):
        raise ShadowError(name, f"the sizes in {', '.join(unknown)} depend on data")
    return counts


def _count(module: Any, batch: Any, step: Callable[[Any, Any], Any]) -> Counts:
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    # Real tensors that the copy has missed are refused: their gradients would be fake ones.
    mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=shapes)
    shadow, fake = _copy(module, batch, mode)
    # Compiled functions that no module owns cannot be found: the stance runs them as written.
    with torch.compiler.set_stance("force_eager"), mode, FlopCounter() as counter:
        loss = step(shadow, fake)
        automatic = getattr(module, "automatic_optimization", True)
        if automatic and isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    return counter.counts


def _copy(module: Any, batch: Any, mode: FakeTensorMode) -> tuple[Any, Any]:
    copies: dict[int, Any] = {
        id(value): None
        for part in module.modules()
        for name in ("_trainer", "_fabric")
        if (value := vars(part).get(name)) is not None
    }
    with FakeCopyMode(mode):
        # From the innermost: a wrapper may hold modules that hold wrappers.
        for wrapper in reversed([part for part in module.modules() if wrapped(part) is not None]):
            copies[id(wrapper)] = deepcopy(wrapped(wrapper), copies)
        shadow, fake = deepcopy((module, batch), copies)
        for part in shadow.modules():
            _uncompile(part, copies)
    detach(shadow, wrapped(module) or module, copies)
    return shadow, fake


def _uncompile(part: nn.Module, copies: dict[int, Any]) -> None:
    own = vars(part)
    own.pop("_compiled_call_impl", None)
    # Copying leaves functions as they are: bound to the original.
    own |= {
        name: deepcopy(original(value), copies)
        for name, value in own.items()
        if is_compiled_function(value)
    }


@contextmanager
def _unchanged() -> Iterator[None]:
    """Put back random numbers and the grad mode, whatever a step does to them."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
