"""Activation checkpointing: recomputation counts for hardware FLOPs only."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def test_a_backward_that_is_differentiated_is_no_recomputation():
    """A gradient penalty costs two backwards of the model."""
    layer = nn.Linear(WIDTH, 1, bias=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def penalty():
        out = layer(x).square().sum()
        return torch.autograd.grad(out, x, create_graph=True)[0].square()

    counts = count(penalty)
    assert counts.model_flops == counts.hardware_flops
