"""Formulas of operators, on meta tensors, and which operators have one."""

import pytest
import torch
from torch import nn

from lightning_perf.flops import operators as ops
from lightning_perf.flops.operators import (
    FORMULAS,
    formula_of,
    is_composite,
    product,
    unknown,
)


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


BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, VALUES = 2, 8, 2, 5, 7, 16, 24
FORWARD = 2 * BATCH * HEADS * QUERIES * KEYS * (WIDTH + VALUES)


def heads_first():
    return [
        meta(BATCH, HEADS, QUERIES, WIDTH),
        meta(BATCH, KV_HEADS, KEYS, WIDTH),
        meta(BATCH, KV_HEADS, KEYS, VALUES),
    ]


def heads_last():
    return [x.transpose(1, 2) for x in heads_first()]


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "fused"])
def test_sdpa_on_a_gpu(kind):
    """Each kernel has the same FLOPs, also with grouped queries; backward has twice as many."""
    suffix = "_overrideable" if kind == "fused" else ""
    name = f"aten::_scaled_dot_product_{kind}_attention{suffix}"
    assert FORMULAS[name](heads_first(), None) == FORWARD
    grad = meta(BATCH, HEADS, QUERIES, VALUES)
    assert FORMULAS[f"{name}_backward"]([grad, *heads_first()], None) == 2 * FORWARD


def test_flex_attention():
    """Flex attention is counted in full, also with a mask."""
    assert FORMULAS["higher_order::flex_attention"](heads_first(), None) == FORWARD
    assert FORMULAS["higher_order::flex_attention_backward"](heads_first(), None) == 2 * FORWARD


def arguments(kind, qkv, ends):
    """The operators' arguments: forward, or backward with gradient, output and log-sum-exp."""
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


#: Operators of attention outside of aten, with arguments in the order of their libraries.
LIBRARIES = {
    "flash_attn::_flash_attn_forward": "Tensor q, Tensor k, Tensor v, float p, bool causal",
    "flash_attn::_flash_attn_backward": (
        "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!)? dq, "
        "Tensor(b!)? dk, Tensor(c!)? dv, float p, bool causal"
    ),
    "flash_attn::_flash_attn_varlen_forward": (
        "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, float p"
    ),
    "flash_attn::_flash_attn_varlen_backward": (
        "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!)? dq, "
        "Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_q, Tensor cu_k, int max_q, int max_k, float p"
    ),
    "torch_attn::_varlen_attn": (
        "Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor? cu_k, int max_q, int max_k"
    ),
    "torch_attn::_varlen_attn_backward": (
        "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
        "Tensor cu_q, Tensor cu_k, int max_q, int max_k, bool is_causal"
    ),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_attention_of_libraries(name):
    """The kernels of flash-attn and of torch's variable-length attention are counted."""
    packed, ends = "varlen" in name, torch.tensor([0, 3, 10])
    tensor = torch.empty(10, HEADS, WIDTH) if packed else torch.empty(1, 10, HEADS, WIDTH)
    values = {"float": 0.0, "int": 7, "bool": False, "Tensor": tensor}
    kinds = [one.split() for one in LIBRARIES[name].split(", ")]
    args = [
        ends if argument.startswith("cu_") else values.get(kind.rstrip("?"))
        for kind, argument in kinds
    ]
    flops = FORMULAS[name](args, None)
    pairs = 3**2 + 7**2 if packed else 10**2
    assert flops == (2 if "backward" in name else 1) * 4 * HEADS * WIDTH * pairs


def test_no_value_is_read_while_a_cuda_graph_is_captured(monkeypatch):
    """It would end the capture; the operator is reported as uncounted instead."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    class OnDevice(torch.Tensor):
        is_cuda = True

        def tolist(self):
            raise AssertionError("read")

    ends, tensor = torch.tensor([0, 3, 10]).as_subclass(OnDevice), torch.empty(10, HEADS, WIDTH)
    with pytest.raises(RuntimeError, match="capture"):
        FORMULAS["aten::_flash_attention_forward"]([tensor, tensor, tensor, ends, ends], None)


def test_fused_multi_head_attention():
    """Four projections and attention; queries and keys may differ in length."""
    query, key = meta(BATCH, QUERIES, WIDTH), meta(BATCH, KEYS, WIDTH)
    projections = 2 * WIDTH * WIDTH * BATCH * (2 * QUERIES + 2 * KEYS)
    expected = projections + 4 * BATCH * QUERIES * KEYS * WIDTH
    name = "aten::_native_multi_head_attention"
    assert FORMULAS[name]([query, key, key, WIDTH], None) == expected


aten = torch.ops.aten


def test_every_overload_has_the_formula_of_its_operator():
    """Out and in-place variants have the formula of the functional one."""
    formula = FORMULAS["aten::addmm"]
    assert formula_of(aten.addmm.default) is formula
    assert formula_of(aten.addmm.out) is formula
    assert formula_of(aten.addmm_.default) is formula
    assert formula_of(aten.mm.default) is product


def test_formulas_belong_to_existing_operators():
    """No formula is registered for an operator that torch lacks."""
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    new_since_2_6 = {
        "aten::_dyn_quant_matmul_4bit",
        "aten::_foreach_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
        "aten::_scaled_mm_v2",
        "aten::_weight_int4pack_mm_with_scales_and_zeros",
    }
    missing = {name for name in FORMULAS if name.startswith("aten::")} - known - new_since_2_6
    assert missing == set()


@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "add",
        "_softmax",
        "view",
        "t",
        "transpose.int",
        "native_layer_norm",
        "_fused_sdp_choice",
        "_thnn_fused_lstm_cell",
        "linalg_vector_norm",
        "embedding",
        "_local_scalar_dense",
        "upsample_bilinear2d",
        "addr",
        "_fused_adamw_",
        "sym_size",
        "is_contiguous",
        "_convert_indices_from_coo_to_csr",
    ],
)
def test_light_operators(name):
    """Elementwise operators, views, reductions and metadata do not count."""
    packet, _, overload = name.partition(".")
    operator = getattr(aten, packet)
    overload = overload or next(o for o in operator.overloads() if o != "out")
    assert formula_of(getattr(operator, overload)) is None


@pytest.mark.parametrize(
    "name",
    [
        "_fft_r2c",
        "_linalg_svd",
        "linalg_lu_factor_ex",
        "_cdist_forward",
        "_euclidean_dist",
        "_sparse_addmm",
        "_trilinear",
        "_cudnn_attention_forward",
        "triangular_solve",
        "linalg_matrix_exp",
    ],
)
def test_heavy_operators_without_a_formula(name):
    """Operators that need a formula and have none are unknown."""
    operator = getattr(aten, name)
    assert formula_of(getattr(operator, operator.overloads()[0])) is unknown


@pytest.mark.parametrize("name", ["conv2d", "einsum", "scaled_dot_product_attention", "multi_dot"])
def test_composite_operators(name):
    """Operators composed of others are detected."""
    operator = getattr(aten, name, None) or getattr(aten, f"linalg_{name}")
    assert is_composite(operator.default)


def test_other_namespaces():
    """Communication does not count; operators of other libraries are unknown."""
    assert formula_of(torch.ops.prim.device.default) is None
    assert formula_of(torch.ops.quantized.add.default) is unknown
