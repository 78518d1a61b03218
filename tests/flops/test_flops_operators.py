"""Formulas of operators, on meta tensors, and which operators have one."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from lightning_perf.flops import FlopCounter
from lightning_perf.flops import operators as ops
from lightning_perf.flops.attention import when_read
from lightning_perf.flops.operators import (
    FORMULAS,
    Call,
    formula_of,
    is_composite,
    product,
    unknown,
    work_of,
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


def call(schema, **given):
    """The FLOPs of a call of an operator, by its formula, and those that a causal mask hides."""
    parsed = torch._C.parse_schema(schema)
    operator = SimpleNamespace(_schema=parsed, name=lambda: parsed.name)
    names = [argument.name for argument in parsed.arguments if not argument.kwarg_only]
    assert given.keys() <= {argument.name for argument in parsed.arguments}
    args = [given.pop(name, None) for name in names]
    work = work_of(FORMULAS[parsed.name], Call(operator, args, given), None)
    return tuple(work() if callable(work) else work)


def aten_schema(name):
    overload = getattr(torch.ops.aten, name).default
    return str(overload._schema)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "fused"])
def test_sdpa_on_a_gpu(kind):
    """Each kernel has the same FLOPs, also with grouped queries; backward has twice as many."""
    suffix = "_overrideable" if kind == "fused" else ""
    name = f"_scaled_dot_product_{kind}_attention{suffix}"
    tensors = dict(zip(("query", "key", "value"), heads_first(), strict=True))
    assert call(aten_schema(name), **tensors) == (FORWARD, 0)
    assert call(aten_schema(f"{name}_backward"), **tensors) == (2 * FORWARD, 0)


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_attention_with_heads_last(kind):
    """The kernels below SDPA, which other libraries call, have the heads after the length."""
    tensors = dict(zip(("query", "key", "value"), heads_last(), strict=True))
    assert call(aten_schema(f"_{kind}_attention_forward"), **tensors) == (FORWARD, 0)
    assert call(aten_schema(f"_{kind}_attention_backward"), **tensors) == (2 * FORWARD, 0)


#: The arguments of operators as their libraries declare them, up to what decides FLOPs.
LIBRARIES = {
    "aten flash": aten_schema("_flash_attention_forward"),
    "aten flash backward": aten_schema("_flash_attention_backward"),
    "flash-attn": (
        "flash_attn::_flash_attn_forward(Tensor q, Tensor k, Tensor v, float p, float scale, "
        "bool causal, int window_size_left, int window_size_right) -> Tensor"
    ),
    "flash-attn backward": (
        "flash_attn::_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor lse, Tensor? dq, Tensor? dk, Tensor? dv, float p, float scale, bool causal, "
        "int window_size_left, int window_size_right) -> Tensor"
    ),
    "flash-attn packed": (
        "flash_attn::_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_q, int max_k, float p, float scale, "
        "bool causal, int window_size_left, int window_size_right) -> Tensor"
    ),
    "flash-attn packed backward": (
        "flash_attn::_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, "
        "Tensor out, Tensor lse, Tensor? dq, Tensor? dk, Tensor? dv, Tensor cu_seqlens_q, "
        "Tensor cu_seqlens_k, int max_q, int max_k, float p, float scale, bool causal, "
        "int window_size_left, int window_size_right) -> Tensor"
    ),
    "FlashAttention-3": (
        "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, "
        "Tensor? q_v=None, Tensor? out=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1) -> Tensor"
    ),
    "FlashAttention-3 backward": (
        "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? dq=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "bool is_causal=False, int window_size_left=-1, int window_size_right=-1) -> Tensor"
    ),
    "torch packed": (
        "torch_attn::_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, "
        "Tensor? cu_seq_k, int max_q, int max_k, bool is_causal=False, float? scale=None, "
        "SymInt[]? window_size=None) -> Tensor"
    ),
    "torch packed backward": (
        "torch_attn::_varlen_attn_backward(Tensor grad_out, Tensor query, Tensor key, "
        "Tensor value, Tensor out, Tensor lse, Tensor cu_seq_q, Tensor cu_seq_k, int max_q, "
        "int max_k, bool is_causal, Tensor rng, SymInt[]? window_size=None) -> Tensor"
    ),
}
LENGTH = 10


def library_call(name, ends=None, causal=False, window=None):
    """A call of a library's operator with its own names of arguments."""
    schema = LIBRARIES[name]
    names = [argument.name for argument in torch._C.parse_schema(schema).arguments]
    packed = any(each.startswith(("cu_", "cum_")) for each in names) and ends is not None
    shape = (LENGTH, HEADS, WIDTH) if packed else (1, LENGTH, HEADS, WIDTH)
    values = {"query": meta(*shape), "key": meta(*shape), "value": meta(*shape)}
    values |= {"q": values["query"], "k": values["key"], "v": values["value"]}
    for each in ("cu_seqlens_q", "cu_seqlens_k", "cum_seq_q", "cum_seq_k", "cu_seq_q", "cu_seq_k"):
        values[each] = ends
    values |= {"causal": causal, "is_causal": causal, "window_size": window}
    left, right = window or (-1, -1)
    values |= {"window_size_left": left, "window_size_right": right}
    return call(schema, **{key: value for key, value in values.items() if key in names})


def expected(name, pairs, hidden=0):
    """The FLOPs of pairs of queries and keys."""
    per_pair = (2 if "backward" in name else 1) * 4 * HEADS * WIDTH
    return per_pair * pairs, per_pair * hidden


@pytest.mark.parametrize("name", [name for name in LIBRARIES if "_seq" in LIBRARIES[name]])
def test_packed_sequences(name):
    """Packed sequences cost the sum of their squared lengths; a causal mask hides a part."""
    ends = torch.tensor([0, 3, 10])
    assert library_call(name, ends) == expected(name, 3**2 + 7**2)
    assert library_call(name, ends, causal=True) == expected(name, 3**2 + 7**2, 3 + 21)


@pytest.mark.parametrize("name", [name for name in LIBRARIES if "packed" not in name])
def test_windows(name):
    """A query counts the keys of its window; the start of a causal window is hidden only."""
    assert library_call(name) == expected(name, 100)
    assert library_call(name, causal=True) == expected(name, 100, 45)
    # Three keys per query, of which the first two queries see one and two.
    assert library_call(name, causal=True, window=(2, 0)) == expected(name, 30, 3)
    assert library_call(name, window=(2, 1)) == expected(name, 40)
    # A window that is as long as the sequence is no window.
    assert library_call(name, causal=True, window=(99, 0)) == expected(name, 100, 45)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_causal_masks_of_memory_efficient_attention(kind):
    """Its kinds of masks begin at the first keys, or end at the last ones."""
    schema = aten_schema(f"_efficient_attention_{kind}")
    tensors = {"query": meta(1, 3, HEADS, WIDTH)}
    tensors |= dict.fromkeys(("key", "value"), meta(1, 5, HEADS, WIDTH))
    for mask, hidden in ((0, 0), (1, 4 + 3 + 2), (2, 2 + 1)):
        work = call(schema, custom_mask_type=mask, **tensors)
        assert work == expected(kind, 15, hidden)
    assert call(schema, custom_mask_type=2, window_size=2, **tensors) == expected(kind, 6)


def test_causal_mask_of_sdpa():
    """Both conventions are counted of one training step: the square, and the half."""
    x = torch.randn(2, 3, 16, 8, requires_grad=True)
    with FlopCounter() as counter:
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    per_pair = 3 * 4 * 2 * 3 * 8
    assert counter.counts.model == {"float32": per_pair * 16**2}
    assert counter.counts.hidden == {"float32": per_pair * 16 * 15 // 2}


def test_flex_attention_counts_the_blocks_of_its_mask():
    """Without a mask it is counted in full, with one the blocks that it leaves are."""
    from torch.nn.attention import flex_attention as flex

    x = torch.randn(2, 4, 512, 16)
    near = flex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 512, 512, device="cpu"
    )
    for mask, blocks in ((None, 16), (near, 7)):
        with (
            pytest.MonkeyPatch.context() as patch,
            FlopCounter() as counter,
        ):
            patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            flex.flex_attention(x, x, x, block_mask=mask)
        assert counter.counts.model == {"float32": 4 * 2 * 4 * 16 * blocks * 128**2}
        assert not counter.counts.untracked_names


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("length", [100, 200, 300])
def test_blocks_at_the_end_count_what_exists_of_them(window: int | None, length: int):
    """The last block of a length that is no multiple of the block is smaller, to both sides."""
    from torch.nn.attention import flex_attention as flex

    def visible(b, h, q, k):
        return (q >= k) if window is None else (q >= k) & (q - k < window)

    x = torch.randn(1, 2, length, 8)
    mask = flex.create_block_mask(visible, None, None, length, length, device="cpu")
    starts = range(0, length, 128)
    left = [
        min(128, length - row) * min(128, length - column)
        for row, ones in zip(starts, mask.to_dense()[0, 0].tolist(), strict=True)
        for column, one in zip(starts, ones, strict=True)
        if one
    ]
    with pytest.MonkeyPatch.context() as patch, FlopCounter() as counter:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        flex.flex_attention(x, x, x, block_mask=mask)
    assert counter.counts.model == {"float32": 4 * 2 * 8 * sum(left)}


class OnDevice(torch.Tensor):
    """A tensor of a GPU, whose values are read after the batch."""

    is_cuda = True
    read: ClassVar[list[str]] = []

    def tolist(self):
        self.read.append("read")
        return super().tolist()

    def clone(self):
        return torch.Tensor.clone(self).as_subclass(OnDevice)


def test_lengths_on_a_gpu_are_read_after_the_batch(monkeypatch):
    """Reading them at once would make the host wait for the device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ends = torch.tensor([0, 3, 10]).as_subclass(OnDevice)
    OnDevice.read.clear()
    work = when_read([ends, ends], lambda *values: values)
    assert not OnDevice.read
    assert work() == ([0, 3, 10], [0, 3, 10])
    assert len(OnDevice.read) == 2


def test_no_value_is_read_while_a_cuda_graph_is_captured(monkeypatch):
    """It would end the capture; the operator is reported as uncounted instead."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ends = torch.tensor([0, 3, 10]).as_subclass(OnDevice)
    OnDevice.read.clear()
    with pytest.raises(RuntimeError, match="capture"):
        library_call("aten flash", ends)
    assert not OnDevice.read


def test_the_grid_of_an_affine_map():
    """Each coordinate is a row of the matrix times a position, in forward and backward."""
    matrix = torch.randn(2, 2, 3, requires_grad=True)
    with FlopCounter() as counter:
        torch.nn.functional.affine_grid(matrix, [2, 1, 4, 5], False).sum().backward()
    assert counter.counts.model == {"float32": 2 * 2 * 3 * (2 * 4 * 5 * 2)}


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
