"""Formulas of products, convolutions and recurrent layers, on meta tensors."""

import pytest
import torch
from torch import nn

from lightning_perf.flops import operators as ops
from lightning_perf.flops.operators import FORMULAS


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def flops(name, args, out):
    return FORMULAS[name](args, out)


B, M, K, N = 3, 4, 5, 7


@pytest.mark.parametrize(
    ("name", "args", "out", "products"),
    [
        ("mm", (meta(M, K), meta(K, N)), meta(M, N), M * K * N),
        ("bmm", (meta(B, M, K), meta(B, K, N)), meta(B, M, N), B * M * K * N),
        ("mv", (meta(M, K), meta(K)), meta(M), M * K),
        ("dot", (meta(K), meta(K)), meta(), K),
        ("matmul", (meta(B, M, K), meta(K, N)), meta(B, M, N), B * M * K * N),
        ("linear", (meta(B, M, K), meta(N, K), meta(N)), meta(B, M, N), B * M * K * N),
        ("addmm", (meta(N), meta(M, K), meta(K, N)), meta(M, N), M * K * N),
        ("addmv", (meta(M), meta(M, K), meta(K)), meta(M), M * K),
        ("baddbmm", (meta(M, N), meta(B, M, K), meta(B, K, N)), meta(B, M, N), B * M * K * N),
        ("addbmm", (meta(M, N), meta(B, M, K), meta(B, K, N)), meta(M, N), B * M * K * N),
        ("_scaled_mm", (meta(M, K, dtype=torch.float8_e4m3fn),), meta(M, N), M * K * N),
        ("_int_mm", (meta(M, K, dtype=torch.int8),), meta(M, N), M * K * N),
        ("_weight_int8pack_mm", (meta(M, K), meta(N, K)), meta(M, N), M * K * N),
        ("_foreach_mm", ([meta(M, K)] * 2, [meta(K, N)] * 2), [meta(M, N)] * 2, 2 * M * K * N),
    ],
)
def test_products(name, args, out, products):
    """Every product operator costs two FLOPs per multiply-add."""
    assert flops(f"aten::{name}", args, out) == 2 * products


def test_four_bit_operands_have_two_values_per_element():
    """The contracted size is the number of values, not of bytes."""
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no 4-bit dtype")
    packed = meta(M, K, dtype=torch.float4_e2m1fn_x2)
    assert flops("aten::_scaled_mm", (packed,), meta(M, N)) == 2 * M * 2 * K * N


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (meta(M, K), meta(B, K, N), meta(M, N)),  # tokens sorted by expert
        (meta(B, M, K), meta(B, K, N), meta(B, M, N)),  # as many for each expert
        (meta(B, M, K), meta(K, N), meta(M, N)),
        (meta(M, K), meta(K, N), meta(B, M, N)),  # the weights' gradient
    ],
)
def test_grouped_product(a, b, out):
    """An expert costs only its own tokens."""
    experts = B if a.dim() == b.dim() == 3 else 1
    assert flops("aten::_grouped_mm", (a, b), out) == 2 * experts * M * K * N


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, False, True)])
def test_backward_of_linear_and_matmul(mask):
    """Each requested gradient is one product; the bias has none."""
    x, grad, weight = meta(B, M, K), meta(B, M, N), meta(N, K)
    each = 2 * B * M * K * N
    backward = flops("aten::linear_backward", (x, grad, weight, mask), None)
    assert backward == each * sum(mask[:2])
    backward = flops("aten::matmul_backward", (grad, x, meta(K, N), mask[:2]), None)
    assert backward == each * sum(mask[:2])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolution_of_every_backend(groups):
    """Operators of all backends cost the same as the general one, also in backward."""
    x, weight, out = meta(2, 8, 6, 6), meta(12, 8 // groups, 3, 3), meta(2, 12, 4, 4)
    geometry = [[1, 1], [0, 0], [1, 1], False, [0, 0], groups]
    expected = 2 * 2 * 12 * 4 * 4 * (8 // groups) * 9
    assert flops("aten::convolution", [x, weight, None, *geometry], out) == expected
    assert flops("aten::cudnn_convolution", [x, weight], out) == expected
    mask = [True, True, True]
    args = [out, x, weight, None, *geometry, mask]
    assert flops("aten::convolution_backward", args, None) == 2 * expected
    args = [out, x, weight, *geometry, mask]
    assert flops("aten::convolution_backward_overrideable", args, None) == 2 * expected


def test_transposed_convolution():
    """A transposed convolution applies its filter once per input element."""
    x, weight, out = meta(2, 8, 4, 4), meta(8, 6, 3, 3), meta(2, 12, 9, 9)
    expected = 2 * 2 * 8 * 4 * 4 * 6 * 9
    geometry = [[2, 2], [0, 0], [1, 1], True, [0, 0], 2]
    assert flops("aten::convolution", [x, weight, None, *geometry], out) == expected
    assert flops("aten::cudnn_convolution_transpose", [x, weight], out) == expected


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("projection", [0, 3])
def test_cudnn_rnn(bidirectional, projection):
    """The fused layer costs all its matrices once per step, packed or not."""
    lstm = nn.LSTM(8, 16, 2, bidirectional=bidirectional, proj_size=projection, device="meta")
    weights = list(lstm.parameters())
    matrices = sum(p.numel() for name, p in lstm.named_parameters() if name.startswith("weight"))
    for x in (meta(5, 3, 8), meta(15, 8)):
        forward = flops("aten::_cudnn_rnn", [x, weights], None)
        assert forward == 2 * 15 * matrices
        rest = [x, weights, [True, False, False, True]]
        assert flops("aten::_cudnn_rnn_backward", rest, None) == 2 * forward
        rest[-1] = [True, False, False, False]
        assert flops("aten::_cudnn_rnn_backward", rest, None) == forward
        assert flops("aten::_lstm_mps", [x, [], weights], None) == forward


def test_a_formula_reads_no_values():
    """Formulas work on fake tensors, which have no values."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        a = torch.empty(M, K)
        assert ops.product([a], torch.empty(M, N)) == 2 * M * K * N
