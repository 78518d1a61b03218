"""Whole models, counted exactly."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_perf.flops import FlopCounter

B, T, WIDTH, HEADS, VOCAB = 2, 6, 16, 4, 20


def count(step):
    with FlopCounter() as counter:
        step()
    assert counter.counts.untracked_names == {}
    return counter.counts


class Experts(nn.Module):
    """A router and several feed-forward nets; each token uses some of them.

    Args:
        experts: How many there are.
        top_k: How many a token goes through, the same ones for every token.
    """

    def __init__(self, experts, top_k):
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
            for _ in range(experts)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            update = expert(flat[rows]) * weights[rows, slot, None]
            out = out.index_add(0, rows, update)
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, kv_heads=HEADS, feed_forward=None):
        super().__init__()
        self.kv_heads, self.head = kv_heads, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.head)
        self.feed_forward = feed_forward or nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, self.head)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x).relu()


class Language(nn.Module):
    """Embedding, layers and an output layer, which shares the embedding's matrix if tied."""

    def __init__(self, *layers, tied=False, reentrant=None):
        super().__init__()
        self.tokens, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            # A checkpointed layer ends in an addition, which saves nothing; relu makes it run to
            # its end.
            x = layer(x) if self.reentrant is None else self.saved(layer, x)
        return F.cross_entropy(self.output(x).flatten(0, 1), ids.flatten())

    def saved(self, layer, x):
        return checkpoint(lambda y: layer(y).relu(), x, use_reentrant=self.reentrant)


IDS = torch.arange(B * T).view(B, T)
ATTENTION = 4 * B * T * T * WIDTH
OUTPUT = 2 * B * T * WIDTH * VOCAB


def layer_forward(kv_heads=HEADS, feed_forward=WIDTH * WIDTH):
    kv = 2 * WIDTH * kv_heads * WIDTH // HEADS
    return 2 * B * T * (2 * WIDTH * WIDTH + kv + feed_forward) + ATTENTION


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model(kv_heads, tied):
    """Layers cost by query heads, and the output layer costs the same tied or not."""
    model = Language(Layer(kv_heads), Layer(kv_heads), tied=tied)
    expected = 3 * (2 * layer_forward(kv_heads) + OUTPUT)
    assert count(lambda: model(IDS).backward()).model == {"float32": expected}


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_mixture_of_experts(top_k):
    """Each token costs the router and its active experts."""
    model = Language(Layer(feed_forward=Experts(5, top_k)))
    forward = layer_forward(feed_forward=WIDTH * 5 + top_k * 2 * WIDTH * 24)
    assert count(lambda: model(IDS).backward()).model == {"float32": 3 * (forward + OUTPUT)}


def test_a_frozen_backbone():
    """Layers below the first trainable one cost only their forward."""
    model = Language(Layer(), Layer(), Layer())
    model.requires_grad_(False)
    model.layers[1].requires_grad_(True)
    # Frozen above: gradients of the data; both operands of attention are data.
    above = layer_forward() - ATTENTION + 2 * ATTENTION
    frozen_above = layer_forward() + above + 2 * OUTPUT
    # Trainable: only the weights of query, key and value, as nothing below needs a gradient.
    inputs = 2 * B * T * 3 * WIDTH * WIDTH
    trained = 3 * layer_forward() - inputs
    counts = count(lambda: model(IDS).backward())
    assert counts.model_flops == layer_forward() + trained + frozen_above


def test_a_gradient_penalty():
    """Each product of the forward and the backward is differentiated."""
    first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 1, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def step():
        out = second(first(x).square())
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + gradient.norm()).backward()

    one, two = 2 * 4 * 8 * 16, 2 * 4 * 16
    # Forward; gradient of the data; and both gradients of these four products, except the unneeded
    # one of the constant before the second layer.
    assert count(step).model_flops == 2 * (one + two) + 4 * one + 3 * two
