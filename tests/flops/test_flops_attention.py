"""Formulas of attention: two products forward, four backward, by query heads."""

import pytest
import torch

from lightning_perf.flops.operators import FORMULAS

B, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, VALUES = 2, 8, 2, 5, 7, 16, 24
FORWARD = 2 * B * HEADS * QUERIES * KEYS * (WIDTH + VALUES)


def meta(*shape):
    return torch.empty(shape, device="meta")


def heads_first():
    return [
        meta(B, HEADS, QUERIES, WIDTH),
        meta(B, KV_HEADS, KEYS, WIDTH),
        meta(B, KV_HEADS, KEYS, VALUES),
    ]


def heads_last():
    return [x.transpose(1, 2) for x in heads_first()]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "fused"])
def test_sdpa_on_a_gpu(kind):
    """Each kernel has the same FLOPs, also with grouped queries; backward has twice as many."""
    suffix = "_overrideable" if kind == "fused" else ""
    name = f"aten::_scaled_dot_product_{kind}_attention{suffix}"
    assert FORMULAS[name](heads_first(), None) == FORWARD
    grad = meta(B, HEADS, QUERIES, VALUES)
    assert FORMULAS[f"{name}_backward"]([grad, *heads_first()], None) == 2 * FORWARD


def test_flex_attention():
    """Flex attention is counted in full, also with a mask."""
    assert FORMULAS["higher_order::flex_attention"](heads_first(), None) == FORWARD
    assert FORMULAS["higher_order::flex_attention_backward"](heads_first(), None) == 2 * FORWARD


def arguments(kind, qkv, ends):
    """The operators' own order: forward, and backward with gradient, output and log-sum-exp."""
    grad = out = logsumexp = None
    if kind == "flash":
        return [*qkv, *ends], [grad, *qkv, out, logsumexp, *ends]
    return [*qkv, None, *ends], [grad, *qkv, None, out, *ends]


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_attention_with_heads_last(kind):
    """The kernels below SDPA, which other libraries call, have the heads after the length."""
    forward, backward = arguments(kind, heads_last(), (None, None))
    assert FORMULAS[f"aten::_{kind}_attention_forward"](forward, None) == FORWARD
    assert FORMULAS[f"aten::_{kind}_attention_backward"](backward, None) == 2 * FORWARD


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_packed_sequences(kind):
    """Packed sequences cost the sum of their squared lengths."""
    packed = meta(10, HEADS, WIDTH)
    ends = torch.tensor([0, 3, 10])
    forward, backward = arguments(kind, [packed] * 3, (ends, ends))
    expected = 4 * HEADS * WIDTH * (3**2 + 7**2)
    assert FORMULAS[f"aten::_{kind}_attention_forward"](forward, None) == expected
    assert FORMULAS[f"aten::_{kind}_attention_backward"](backward, None) == 2 * expected


def test_fused_multi_head_attention():
    """Four projections and attention; queries and keys may differ in length."""
    query, key = meta(B, QUERIES, WIDTH), meta(B, KEYS, WIDTH)
    projections = 2 * WIDTH * WIDTH * B * (2 * QUERIES + 2 * KEYS)
    expected = projections + 4 * B * QUERIES * KEYS * WIDTH
    name = "aten::_native_multi_head_attention"
    assert FORMULAS[name]([query, key, key, WIDTH], None) == expected
