"""Activation checkpointing: recomputation counts for hardware FLOPs only."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from lightning_perf.flops import FlopCounter

ROWS, WIDTH, LAYERS = 6, 8, 3
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def segment():
    # It ends in an operator that saves its output, so that the whole segment is recomputed.
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def count(run):
    with FlopCounter() as counter:
        run().sum().backward()
    return counter.counts


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_count_for_hardware_flops(reentrant):
    """Hardware FLOPs include one more forward of each segment; model FLOPs do not."""
    segments = [segment() for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def plain(y=x):
        for one in segments:
            y = one(y)
        return y

    def saved(y=x):
        for one in segments:
            y = checkpoint(one, y, use_reentrant=reentrant)
        return y

    expected = 3 * 2 * LAYERS * PRODUCT
    without, counts = count(plain), count(saved)
    assert without.hardware_flops == without.model_flops == expected
    assert counts.model_flops == expected
    assert counts.hardware_flops == expected + 2 * LAYERS * PRODUCT


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_checkpoints(reentrant):
    """A second recomputation, with or without gradients, does not count for the model."""
    inner = segment()
    outer = segment()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def both(y):
        return outer(checkpoint(inner, y, use_reentrant=reentrant))

    counts = count(lambda: checkpoint(both, x, use_reentrant=reentrant))
    assert counts.model_flops == 3 * 4 * PRODUCT
    # The outer checkpoint runs both segments again, and the inner one its own again.
    assert counts.hardware_flops == counts.model_flops + (4 + 2) * PRODUCT


def test_a_gradient_inside_a_checkpoint_is_recomputed():
    """The backward of an energy inside a checkpoint counts once for the model."""
    layer = nn.Linear(WIDTH, 1, bias=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def force(y):
        y = y * 1.0
        return torch.autograd.grad(layer(y).square().sum(), y, create_graph=True)[0].relu()

    with FlopCounter() as plain:
        force(x)
    with FlopCounter() as once:
        out = checkpoint(force, x, use_reentrant=False)
    assert once.counts.model_flops == plain.counts.model_flops == 2 * 2 * ROWS * WIDTH
    with FlopCounter() as counter:
        out.sum().backward()
    counts = counter.counts
    # Two products, each with two gradients, and both recomputed.
    assert counts.model_flops == 4 * 2 * ROWS * WIDTH
    assert counts.hardware_flops == counts.model_flops + 2 * 2 * ROWS * WIDTH


class Recomputed(torch.autograd.Function):
    """Runs a module again in its backward, as DeepSpeed, Megatron and reversible layers do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        torch.autograd.backward(out, gradient)
        return x.grad, None


def test_functions_that_run_a_forward_again():
    """Their recomputation counts for hardware FLOPs only; their backward for both."""
    layers = segment()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    counts = count(lambda: Recomputed.apply(x, layers))
    assert counts.model_flops == 6 * PRODUCT
    assert counts.hardware_flops == 8 * PRODUCT


def test_functions_that_run_a_forward_again_of_a_graph_that_is_kept():
    """Their recomputation does not count for the model, though a second backward may follow."""
    layers = segment()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        Recomputed.apply(x, layers).sum().backward(retain_graph=True)
    assert counter.counts.model_flops == 6 * PRODUCT
    assert counter.counts.hardware_flops == 8 * PRODUCT


def test_a_gradient_inside_of_a_function_that_runs_a_forward_again():
    """The backward of an energy is part of the forward that a function runs again."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def force(y):
        with torch.enable_grad():
            y = y.requires_grad_()
            return torch.autograd.grad(layer(y).square().sum(), y, create_graph=True)[0]

    counts = count(lambda: Recomputed.apply(x, force))
    assert counts.hardware_flops == counts.model_flops + 2 * PRODUCT


def energy(layers, x, parameters=None):
    if parameters is None:
        parameters = dict(layers.named_parameters())
    return functional_call(layers, parameters, (x,)).square().mean()


class TorchCounter(TorchDispatchMode):
    """Torch's formulas without FlopCounterMode's hooks, which fail in gradients of gradients."""

    flops = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if (formula := flop_registry.get(operator.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def gradients(layers, x):
    """Functions that call autograd with ``create_graph``, by name."""
    parameters = dict(layers.named_parameters())
    of = lambda parameters, x: energy(layers, x, parameters)  # noqa: E731
    inputs = lambda **options: torch.autograd.grad(  # noqa: E731
        energy(layers, x), x, create_graph=True, **options
    )[0]
    return {
        "grad": lambda: grad(of)(parameters, x)["0.weight"],
        "grad_and_value": lambda: grad_and_value(of)(parameters, x)[0]["0.weight"],
        "vmap": lambda: vmap(grad(of), in_dims=(None, 0))(parameters, x)["0.weight"],
        "vjp": lambda: vjp(lambda x: of(parameters, x), x)[1](torch.ones(()))[0],
        "jacrev": lambda: jacrev(lambda x: functional_call(layers, parameters, (x,)))(x),
        "hessian": lambda: jacrev(jacrev(lambda x: of(parameters, x)))(x),
        "retained": inputs,
        "not retained": lambda: inputs(retain_graph=False),
    }


@pytest.mark.parametrize("name", gradients(segment(), torch.ones(1, WIDTH)))
@pytest.mark.parametrize("differentiated", [True, False])
def test_a_backward_that_can_be_differentiated_is_no_recomputation(name, differentiated):
    """Per-sample gradients, inner loops, gradient penalties: FLOPs are those of torch's counter."""
    layers, x = segment(), torch.randn(ROWS, WIDTH, requires_grad=True)
    run = gradients(layers, x)[name]
    with FlopCounter() as counter, TorchCounter() as torchs:
        out = run().square().sum()
        if differentiated and name != "not retained":
            out.backward()
    counts = counter.counts
    assert counts.model_flops == counts.hardware_flops == torchs.flops > 0


def test_a_checkpoint_whose_backward_is_differentiated():
    """What a checkpoint below a gradient penalty recomputes does not count for the model."""
    inner, x = segment(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def penalty(run):
        return torch.autograd.grad(run(x).square().sum(), x, create_graph=True)[0]

    plain = count(lambda: penalty(inner))
    saved = count(lambda: penalty(lambda y: checkpoint(inner, y, use_reentrant=False)))
    assert saved.model_flops == plain.model_flops == plain.hardware_flops < saved.hardware_flops
