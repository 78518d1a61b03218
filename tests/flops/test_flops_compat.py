"""The internals of torch that counting uses: each is still there, and what ends without it."""

from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

from lightning_perf.flops import FlopCounter, compat, count_on_shadow, measure_peak
from lightning_perf.flops.operators import is_composite
from lightning_perf.flops.shadow import ShadowError

LAYER = 2 * 2 * 4 * 4  # one product of a layer of four features and two samples


class Without:
    """A module of which one name is missing, maybe one of its modules."""

    def __init__(self, module, path):
        attrgetter(path)(module)  # it is there
        self._module, (self._first, _, self._rest) = module, path.partition(".")

    def __getattr__(self, name):
        value = getattr(self._module, name)
        if name == self._first:
            if not self._rest:
                raise AttributeError(name)
            return Without(value, self._rest)
        return value


class Recomputes(torch.autograd.Function):
    """Activation checkpointing of another library than torch."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.layer(ctx.x).backward(grad)
        return None, None


def counted(step):
    with FlopCounter() as counter:
        step()
    return counter.counts


def recomputed():
    """The FLOPs without recomputation: by torch's checkpointing, and by another one."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    torchs = counted(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward())
    other = counted(lambda: Recomputes.apply(layer, x).sum().backward())
    return torchs.model_flops / LAYER, other.model_flops / LAYER


def test_without_the_state_of_a_backward(monkeypatch):
    """MFU includes what other libraries than torch recompute."""
    assert recomputed() == (3, 2)
    monkeypatch.setattr(compat, "torch", Without(torch, "_C._current_graph_task_id"))
    assert recomputed() == (3, 3)


def test_without_the_function_that_starts_a_backward(monkeypatch):
    """MFU includes what other libraries than torch recompute."""
    original = torch.autograd._engine_run_backward
    assert recomputed() == (3, 2)
    assert torch.autograd._engine_run_backward is original
    monkeypatch.setattr(compat, "RUN", "renamed")
    assert recomputed() == (3, 3)


def test_a_backward_that_others_wrap_is_left_to_them(monkeypatch):
    """A wrapper that was set while a counter ran stays, and later counters count through it."""
    original = torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", original)  # restored at the end
    with FlopCounter():
        ours = torch.autograd._engine_run_backward
        theirs = lambda *args, **options: ours(*args, **options)  # noqa: E731
        torch.autograd._engine_run_backward = theirs
    assert torch.autograd._engine_run_backward is theirs
    assert recomputed() == (3, 2)
    assert torch.autograd._engine_run_backward is theirs


@pytest.mark.parametrize("name", compat._DISPATCHER)
def test_without_the_dispatcher(monkeypatch, name):
    """Under inference_mode, what is composed of others counts only if it has a formula itself."""
    x = torch.ones(2, 4)

    @torch.inference_mode()
    def step():
        torch.einsum("bi,ij->bj", x, torch.ones(4, 4))
        F.linear(x, torch.ones(4, 4))

    is_composite.cache_clear()
    assert counted(step).model_flops == 2 * LAYER
    monkeypatch.setattr(compat, "torch", Without(torch, f"_C.{name}"))
    is_composite.cache_clear()
    try:
        assert counted(step).model_flops == LAYER
    finally:
        is_composite.cache_clear()


def test_without_the_name_of_the_innermost_mode(monkeypatch):
    """Counted code cannot construct tensors of its own classes; the counter runs all the same."""

    class Own(Tensor):
        pass

    counted(lambda: Own(torch.ones(2)))
    original = vars(Tensor).get("__new__")
    broken = Without(_python_dispatch, "_get_current_dispatch_mode")
    monkeypatch.setattr(compat, "_python_dispatch", broken)
    with FlopCounter() as counter:
        assert vars(Tensor).get("__new__") is original
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.counts.model_flops == 16


def test_a_constructor_that_others_replace_is_left_to_them(monkeypatch):
    """Tensor.__new__ is ours while a counter runs, unless somebody replaces it meanwhile."""
    theirs = lambda kind, *args, **kwargs: super(Tensor, kind).__new__(kind, *args, **kwargs)  # noqa: E731
    with FlopCounter():
        assert "__new__" in vars(Tensor)
    assert "__new__" not in vars(Tensor)
    try:
        with FlopCounter():
            Tensor.__new__ = theirs
        assert vars(Tensor)["__new__"] is theirs
        counted(lambda: torch.ones(2))
        assert vars(Tensor)["__new__"] is theirs
    finally:
        del Tensor.__new__


@pytest.mark.parametrize("name", ["FakeCopyMode", "FakeTensorMode"])
def test_without_fake_tensors(monkeypatch, name):
    """Compiled modules are not counted, with the reason."""
    layer, step = nn.Linear(4, 4), lambda module, x: module(x).sum()
    assert count_on_shadow(layer, torch.ones(2, 4), step).model_flops == 2 * LAYER
    monkeypatch.delattr(fake_tensor, name)
    with pytest.raises(ShadowError, match=name):
        count_on_shadow(layer, torch.ones(2, 4), step)


def test_without_products_of_int8(monkeypatch):
    """Their peak is not measured."""
    assert torch._int_mm(*2 * [torch.ones(32, 32, dtype=torch.int8)]).sum() == 32**3
    monkeypatch.delattr(torch, "_int_mm")
    assert measure_peak("cpu", "int8", 0.01) is None
