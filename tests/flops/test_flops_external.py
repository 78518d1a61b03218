"""Code outside of torch's dispatcher: counted by formulas, or listed by name.

The packages are stand-ins with the names and arguments of the real ones, which need a GPU. Their
kernels compute with NumPy, so that torch sees as little of them as of a kernel of CUDA.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_perf import ConfigError, PerfWarning
from lightning_perf.extend import flop_formula
from lightning_perf.flops import FlopCounter, external

TOKENS, IN, OUT = 6, 4, 5
PRODUCT = 2 * TOKENS * IN * OUT


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """A product that torch does not see, like a function written in C."""
    return torch.from_numpy(np.matmul(a.detach().numpy(), b.detach().numpy()))


class OpaqueLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return sys.modules["transformer_engine_torch"].generic_gemm(x, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        product = sys.modules["transformer_engine_torch"].generic_gemm
        return product(grad, weight), product(grad.T, x)


class Linear(nn.Module):
    """As ``transformer_engine.pytorch.Linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUT, IN))
        self.bias = nn.Parameter(torch.zeros(OUT))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return OpaqueLinear.apply(inp, self.weight) + self.bias


class DotProductAttention(nn.Module):
    """As ``transformer_engine.pytorch.DotProductAttention``."""

    qkv_format, attn_mask_type, window_size = "sbhd", "causal", None

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor,
        attention_mask: Tensor | None = None, qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return torch.zeros_like(query_layer)


class JITFunction:
    """As ``triton.runtime.jit.JITFunction``: launches a kernel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def run(self, *args: Any, grid: Any, warmup: bool) -> None:
        self.fn(*args)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.run(*args, grid=grid, warmup=False)


def packages(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Stand-ins for packages that are imported: their modules, by name with ``__`` for a dot."""
    for name, content in names.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(content)
        for value in content.values():
            if callable(value) and isinstance(value, type(gemm)):
                value.__module__ = module.__name__
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def generic_gemm(a: Tensor, b: Tensor) -> Tensor:
        return gemm(a, b)

    packages(
        monkeypatch,
        transformer_engine__pytorch={"Linear": Linear, "DotProductAttention": DotProductAttention},
        transformer_engine_torch={"generic_gemm": generic_gemm},
    )


def counted(step: Any) -> Any:
    with FlopCounter() as counter:
        step()
    return counter.counts


@pytest.mark.usefixtures("transformer_engine")
def test_modules_of_transformer_engine_are_counted() -> None:
    """Forward and both gradients, without those that are not needed; nothing is unknown."""
    layer, x = Linear(), torch.randn(TOKENS, IN, requires_grad=True)
    counts = counted(lambda: layer(x).sum().backward())
    assert counts.model == {"float32": 3 * PRODUCT}
    assert not counts.untracked_names
    assert counted(lambda: layer(x.detach()).sum().backward()).model == {"float32": 2 * PRODUCT}
    layer.weight.requires_grad_(False)
    assert counted(lambda: layer(inp=x).sum().backward()).model == {"float32": 2 * PRODUCT}
    with torch.no_grad():
        assert counted(lambda: layer(x)).model == {"float32": PRODUCT}


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_operators_that_torch_sees_count_once(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    """A formula adds what torch does not see of it: none, half or two thirds, and the backward."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Linear(IN, OUT, bias=False)
            self.unseen = nn.ModuleList(Linear() for _ in range(hidden))

        def forward(self, x: Tensor) -> Tensor:
            return sum((each(x) for each in self.unseen), self.seen(x))

    monkeypatch.setattr(sys.modules[__name__], "Mixed", Mixed, raising=False)
    Mixed.__qualname__ = "Mixed"
    packages(monkeypatch, transformer_engine_torch={"generic_gemm": gemm})
    flop_formula(Mixed, lambda module, x, out: PRODUCT * (1 + hidden))
    x, model = torch.randn(TOKENS, IN, requires_grad=True), Mixed()
    counts = counted(lambda: model(x).sum().backward())
    assert counts.model == {"float32": 3 * PRODUCT * (1 + hidden)}
    assert counted(lambda: model(x)).model == {"float32": PRODUCT * (1 + hidden)}


PRODUCTS = {"torch": torch.matmul, "kernel": gemm}


def fused(forward: str, backward: str) -> Any:
    """A product whose forward and backward torch sees, or does not."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return PRODUCTS[forward](x, weight)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return PRODUCTS[backward](grad, weight.T), PRODUCTS[backward](x.T, grad)

    return Fused.apply


@dataclass
class Result:
    loss: Tensor
    output: Tensor


class Opaque:
    def __init__(self, output: Tensor) -> None:
        self.output = output


RESULTS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda y: y, lambda out: out),
    "dict": (lambda y: {"y": y}, lambda out: out["y"]),
    "second": (lambda y: (y.sum(-1), y), lambda out: out[1]),
    "dataclass": (lambda y: Result(y.mean(), y), lambda out: out.output),
    "object": (Opaque, lambda out: out.output),
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a function with a formula, and returns its module."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))

    def register(function: Any, formula: Any) -> Any:
        packages(monkeypatch, my_kernels={"run": function})
        flop_formula("my_kernels:run", formula)
        return sys.modules["my_kernels"]

    return register


@pytest.mark.parametrize("recomputes", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("work", [PRODUCT, (PRODUCT, 2 * PRODUCT)], ids=["one", "pair"])
@pytest.mark.parametrize(("forward", "backward"), [*product(PRODUCTS, PRODUCTS)])
def test_what_torch_sees_of_either_direction_counts_once(
    registered: Any, forward: str, backward: str, work: Any, recomputes: str | None
) -> None:
    """Three products per call, whatever of them runs as operators; also when recomputed."""
    call = fused(forward, backward)
    kernels = registered(lambda x, weight: call(x, weight), lambda *_, out: work)
    x, weight = (torch.randn(*size, requires_grad=True) for size in ((TOKENS, IN), (IN, OUT)))

    def step() -> None:
        if recomputes is None:
            y = kernels.run(x, weight)
        else:
            function = lambda x: kernels.run(x, weight)  # noqa: E731
            y = checkpoint(function, x, use_reentrant=recomputes == "reentrant")
        y.sum().backward()

    counts = counted(step)
    assert counts.model == {"float32": 3 * PRODUCT}
    assert counts.hardware == {"float32": (3 + (recomputes is not None)) * PRODUCT}


@pytest.mark.parametrize("name", RESULTS)
def test_a_backward_counts_whatever_the_results_are(registered: Any, name: str) -> None:
    """Also where the loss uses another result than the first; twice if it runs twice."""
    wrap, choose = RESULTS[name]
    call = fused("kernel", "kernel")
    kernels = registered(lambda x, weight: wrap(call(x, weight)), lambda *_, out: PRODUCT)
    x, weight = (torch.randn(*size, requires_grad=True) for size in ((TOKENS, IN), (IN, OUT)))
    assert counted(lambda: choose(kernels.run(x, weight)).sum().backward()).model == {
        "float32": 3 * PRODUCT
    }

    def twice() -> None:
        loss = choose(kernels.run(x, weight)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert counted(twice).model == {"float32": 5 * PRODUCT}


@pytest.mark.parametrize("work", [2 * PRODUCT, (2 * PRODUCT, 5 * PRODUCT)], ids=["one", "pair"])
def test_a_kernel_beside_an_operator(registered: Any, work: Any) -> None:
    """A pair may say that the backward of the kernel costs three products, not two."""
    kernel = fused("kernel", "kernel")
    kernels = registered(lambda x, a, b: kernel(x, a) + x @ b, lambda *_, out: work)
    a, b = (torch.randn(IN, OUT, requires_grad=True) for _ in range(2))
    x = torch.randn(TOKENS, IN, requires_grad=True)
    counts = counted(lambda: kernels.run(x, a, b).sum().backward())
    assert counts.model == {"float32": (7 if isinstance(work, tuple) else 6) * PRODUCT}
    if not isinstance(work, tuple):  # without the gradient of one operand, of which torch decides
        x = x.detach()
        assert counted(lambda: kernels.run(x, a.detach(), b).sum().backward()).model == {
            "float32": 3 * PRODUCT
        }


def test_a_kernel_that_writes_to_an_argument(registered: Any) -> None:
    """Its backward is that of the argument."""
    kernel = fused("kernel", "kernel")

    def write(x: Tensor, a: Tensor, y: Tensor) -> None:
        y.add_(kernel(x, a))

    kernels = registered(write, lambda *_, out: PRODUCT)
    x, a = (torch.randn(*size, requires_grad=True) for size in ((TOKENS, IN), (IN, OUT)))

    def step() -> None:
        y = torch.zeros(TOKENS, OUT)
        kernels.run(x, a, y)
        y.sum().backward()

    assert counted(step).model == {"float32": 3 * PRODUCT}


def test_without_numbers_of_nodes(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward is listed, not left out without a word."""
    call = fused("kernel", "kernel")
    kernels = registered(lambda x, weight: call(x, weight), lambda *_, out: PRODUCT)
    monkeypatch.setattr("lightning_perf.flops.compat.next_node", int)
    x, weight = (torch.randn(*size, requires_grad=True) for size in ((TOKENS, IN), (IN, OUT)))
    counts = counted(lambda: kernels.run(x, weight).sum().backward())
    assert counts.model == {"float32": PRODUCT}
    assert counts.untracked_names == {"my_kernels.run": 1}


def test_attention_of_transformer_engine_that_is_an_operator_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backends for FlashAttention 2 and 3 are operators, and the unfused one is products."""

    class OfOperators(DotProductAttention):
        def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
            return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).permute(2, 0, 1, 3)

    packages(monkeypatch, transformer_engine__pytorch={"DotProductAttention": OfOperators})
    x = torch.randn(8, 2, 3, 16, requires_grad=True)  # length, batch, heads, head dimension
    forward = 2 * 2 * 2 * 3 * 8 * 8 * 16
    assert counted(lambda: OfOperators()(x, x, x).sum().backward()).model == {
        "float32": 3 * forward
    }


@pytest.mark.usefixtures("transformer_engine")
def test_numbers_are_those_without_counting() -> None:
    """Gradients are equal bit by bit, and everything wrapped is restored."""
    layer, x = Linear(), torch.randn(TOKENS, IN, requires_grad=True)
    before = Linear.forward, sys.modules["transformer_engine_torch"].generic_gemm

    def step() -> list[Tensor]:
        layer.zero_grad()
        x.grad = None
        layer(x).square().sum().backward()
        return [x.grad, layer.weight.grad, layer.bias.grad]

    plain, under = step(), []
    counted(lambda: under.extend(step()))
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))
    assert before == (Linear.forward, sys.modules["transformer_engine_torch"].generic_gemm)


@pytest.mark.usefixtures("transformer_engine")
def test_recomputation_counts_in_hardware_flops_only() -> None:
    """Activation checkpointing runs the forward again."""
    layer, x = Linear(), torch.randn(TOKENS, IN, requires_grad=True)
    counts = counted(lambda: checkpoint(layer, x, use_reentrant=False).sum().backward())
    assert counts.model == {"float32": 3 * PRODUCT}
    assert counts.hardware == {"float32": 4 * PRODUCT}


FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"


@pytest.mark.parametrize(
    ("recipe", "products", "gradients", "attention"),
    [
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ({"fp8_dpa": False, "fp8_mha": False}, FP8, FP8, "bfloat16"),
        ({"fp8_dpa": True}, FP8, FP8, FP8),
        ({"fp8_dpa": False, "nvfp4": lambda: True}, FP4, FP4, "bfloat16"),
        ({"backward_override": "high_precision"}, FP8, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("transformer_engine")
def test_low_precision_has_its_peak(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, products: str, gradients: str, attention: str
) -> None:
    """The recipe of Transformer Engine decides, for attention by an option of its own."""

    class State:
        is_fp8_enabled = staticmethod(lambda: recipe is not None)
        get_fp8_recipe = staticmethod(lambda: SimpleNamespace(**recipe))

    packages(monkeypatch, transformer_engine__pytorch__fp8={"FP8GlobalStateManager": State})
    x = torch.randn(TOKENS, IN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        counts = counted(lambda: Linear()(x).sum().backward())
    expected = Counter({products: PRODUCT})
    expected[gradients] += 2 * PRODUCT
    assert counts.model == expected
    q = torch.randn(8, 2, 3, 4, dtype=torch.bfloat16)
    assert [*counted(lambda: DotProductAttention()(q, q, q)).model] == [attention]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_peak_is_that_of_the_operands(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Ids, masks and scales before them do not decide, for functions and operators."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))

    def route(ids: Tensor, mask: Tensor, scale: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gemm(x.float(), weight.float())

    packages(monkeypatch, my_kernels={"route": route})
    flop_formula("my_kernels:route", lambda *args, out: PRODUCT)
    operator = torch.library.custom_op(f"perf_tests::route_{dtype}", route, mutates_args=())
    flop_formula(operator, lambda *args, out: PRODUCT)
    ids, mask = torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    x, weight = (
        torch.ones(size, dtype=getattr(torch, dtype)) for size in ((TOKENS, IN), (IN, OUT))
    )
    args, module = (ids, mask, torch.ones(OUT), x, weight), sys.modules["my_kernels"]
    assert counted(lambda: module.route(*args)).model == {dtype: PRODUCT}
    assert counted(lambda: operator(*args)).model == {dtype: PRODUCT}


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(IN, OUT, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        return ids * 2


def test_the_peak_of_a_module_that_gets_only_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of its weights."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))
    flop_formula(Embeds, lambda module, ids, out: 7)
    counts = counted(lambda: Embeds()(torch.zeros(3, dtype=torch.long)))
    assert counts.model == {"bfloat16": 7}


@pytest.mark.usefixtures("transformer_engine")
def test_attention_of_transformer_engine() -> None:
    """Layouts with the length first, the batch first, and packed ones; a causal mask hides half."""
    x = torch.randn(8, 2, 3, 4)  # length, batch, heads, features
    attention = DotProductAttention()
    square = 4 * 2 * 3 * 4 * 8 * 8
    counts = counted(lambda: attention(x, x, x))
    assert counts.model == {"float32": square}
    assert counts.hidden == {"float32": square // 64 * 28}
    y = x.transpose(0, 1)
    assert counted(lambda: attention(y, y, y, None, "bshd")).model == {"float32": square}
    z, ends = torch.randn(10, 3, 4), torch.tensor([0, 3, 10])
    counts = counted(lambda: attention(z, z, z, None, "thd", ends, ends))
    assert counts.model == {"float32": 4 * 3 * 4 * (9 + 49)}


@pytest.mark.usefixtures("transformer_engine")
def test_other_calls_of_its_kernels_are_listed() -> None:
    """What has no formula is named, once per call of the forward."""
    package = sys.modules["transformer_engine_torch"]
    counts = counted(lambda: package.generic_gemm(torch.ones(2, 3), torch.ones(3, 4)))
    assert counts.untracked_names == {"transformer_engine_torch.generic_gemm": 1}
    assert not counts.model


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def scans(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:  # noqa: N803
    return Twice.apply(u) if u.requires_grad else u * 2


def test_selective_scan_of_mamba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine FLOPs per batch, channel, step and state; also where another module imported it."""
    name = "mamba_ssm__ops__selective_scan_interface"
    packages(monkeypatch, **{name: {"selective_scan_fn": scans}, "my_model": {"scan": scans}})
    u, states = torch.randn(2, 3, 5, requires_grad=True), torch.randn(3, 16)
    for function in (sys.modules["my_model"], sys.modules[name.replace("__", ".")]):
        call = getattr(function, "scan", None) or "selective_scan_fn"

        def step(function: ModuleType = function, call: Any = call) -> None:
            run = getattr(function, "scan" if callable(call) else call)
            run(u, u, states, None, C=None).sum().backward()

        assert counted(step).model == {"float32": 3 * 9 * 2 * 3 * 5 * 16}
    assert sys.modules["my_model"].scan is scans


def chunk_scan(x: Tensor, dt: Any, A: Any, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:  # noqa: N803
    return x


def linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None) -> Tensor:
    return v


@pytest.mark.parametrize("name", ["Mamba-2", "fla", "FlashAttention-4"])
def test_public_functions_of_other_packages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their formulas are those of the algorithm, written out here by its products."""
    b, t, h, d, n = 2, 128, 3, 4, 5
    x, s = torch.randn(b, t, h, d), torch.randn(b, t, 1, n)
    if name == "Mamba-2":
        packages(
            monkeypatch,
            mamba_ssm__ops__triton__ssd_combined={"mamba_chunk_scan_combined": chunk_scan},
        )
        module, expected = "mamba_ssm.ops.triton.ssd_combined", 2 * b * t * (32 * n + h * 32 * d)
        expected += 2 * 2 * b * t * h * d * n
        call = sys.modules[module].mamba_chunk_scan_combined
        counts = counted(
            lambda: sys.modules[module].mamba_chunk_scan_combined(x, None, None, s, s, 32)
        )
        assert call is chunk_scan
    elif name == "fla":
        packages(monkeypatch, fla__ops__gla={"chunk_gla": linear_attention})
        v = torch.randn(b, t, h, n)
        expected = b * t * h * (2 * 64 * (d + n) + 4 * d * n)
        counts = counted(lambda: sys.modules["fla.ops.gla"].chunk_gla(x, x, v))
    else:
        packages(monkeypatch, flash_attn__cute__interface={"flash_attn_func": attention_4})
        expected = 4 * b * h * d * t * 33
        interface = sys.modules["flash_attn.cute.interface"]
        counts = counted(
            lambda: interface.flash_attn_func(x, x, x, causal=True, window_size=(32, None))
        )
    assert counts.model == {"float32": expected}


def attention_4(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = (None, None)
) -> Tensor:
    return q


#: Names in public sources: of liger_kernel, fla, mamba_ssm, unsloth and bitsandbytes.
LIGHT = """
    _rms_norm_forward_kernel _layer_norm_backward_kernel _fused_add_rms_norm_forward_kernel
    _dyt_fwd_kernel _group_norm_reduce_param_grads_kernel _geglu_tanh_forward_kernel
    _swiglu_backward_kernel _triton_rope _triton_qwen2vl_mrope liger_cross_entropy_kernel
    element_mul_kernel _jsd_kernel _kldiv_kernel_forward _tv_distance_kernel
    _softmax_single_block_forward_kernel _sparsemax_forward_kernel _grpo_loss_fwd_kernel
    embedding_forward_kernel _relu_squared_forward_kernel _selective_log_softmax_kernel
    chunk_local_cumsum_scalar_kernel l2norm_fwd_kernel layer_norm_gated_fwd_kernel
    rotary_embedding_kernel causal_conv1d_fwd_kernel logsumexp_fwd_kernel kl_div_kernel
    cross_entropy_fwd_kernel copy_input_kernel logsigmoid_fwd_kernel softmax_bwd_kernel
    activation_quant_fwd_kernel _layer_norm_fwd_1pass_kernel _swiglu_fwd_kernel
    _chunk_cumsum_fwd_kernel rotary_kernel _gemma_rms_layernorm_forward _rms_layernorm_forward
    _rope_embedding _fg_kernel _DWf_DW_dfg_kernel _exact_forward_kernel _approx_backward_kernel
    _cross_entropy_forward weight_dequant_kernel act_quant_kernel _quantize_rowwise
    _dequantize_rowwise
"""
HEAVY = """
    matmul_248_kernel quant_matmul_248_kernel transpose_quant_matmul_248_kernel
    _int8_matmul_rowwise_dequantize _mhc_mm_norm_fwd_kernel _fused_up_proj_swiglu_kernel
    _sparse_neighborhood_qk_softmax_kernel chunk_ttt_linear_bwd_kernel_norm
    _fp8_rowwise_gemv_rows_reduce _chunk_scan_fwd_kernel _bmm_chunk_fwd_kernel
    _selective_state_update _grouped_gemm_forward_kernel parallel_attn_fwd_kernel
    matmul_relu_kernel flash_prefill optimized_matmul matmul_kernel2 broadcast_gemm mat_mul_loss
    matmul_splitk_reduce fused_linear_cross_entropy_fwd_kernel conv2d_relu layer_norm_linear
"""


@pytest.mark.parametrize(
    ("kernel", "listed"),
    [*((name, True) for name in HEAVY.split()), *((name, False) for name in LIGHT.split())],
)
def test_triton_kernels(monkeypatch: pytest.MonkeyPatch, kernel: str, listed: bool) -> None:
    """A kernel that is launched directly is listed, unless its name says that it has no product."""

    def body(x: Tensor) -> None:
        x.numpy()[:] += 1

    body.__name__, body.__module__ = kernel, "my_kernels"
    packages(monkeypatch, triton__runtime__jit={"JITFunction": JITFunction})
    launch, x = JITFunction(body), torch.zeros(3)
    before = JITFunction.run
    counts = counted(lambda: launch[1, 1](x))
    assert counts.untracked_names == ({f"my_kernels.{kernel}": 1} if listed else {})
    assert x.tolist() == [1, 1, 1]
    assert JITFunction.run is before


def test_a_formula_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, functions, modules and addresses can be registered; kernels within are covered."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))

    @torch.library.custom_op("perf_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x * x * x

    assert counted(lambda: cube(torch.ones(4))).untracked_names == {"perf_tests::cube": 1}
    for target in (cube, torch.ops.perf_tests.cube, torch.ops.perf_tests.cube.default):
        flop_formula(target, lambda x, out: 2 * x.numel())
        counts = counted(lambda: cube(torch.ones(4)))
        assert counts.model == {"float32": 8}
        assert not counts.untracked_names

    def scan(u: Tensor, *rest: Tensor) -> Tensor:
        return Twice.apply(u)

    packages(monkeypatch, my_kernels={"scan": scan, "Linear": Linear})
    flop_formula("my_kernels:scan", lambda u, *rest, out: (7, 5))
    u = torch.randn(2, requires_grad=True)
    run = sys.modules["my_kernels"]
    counts = counted(lambda: run.scan(u, u, u, u, u).sum().backward())
    assert counts.model == {"float32": 7 + 5}


@pytest.mark.parametrize("target", ["my_kernels", 7, "a b:c"])
def test_a_target_that_is_nothing_to_count(target: object) -> None:
    """The message says what it may be."""
    with pytest.raises(ConfigError, match="no operator, function, module class or address"):
        flop_formula(target, lambda *_: 0)


class Layer(nn.Module):
    """What can be registered of classes."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return OPAQUE(x, weight)

    def attend(self, x: Tensor, weight: Tensor) -> Tensor:
        return OPAQUE(x, weight)

    @staticmethod
    def static(x: Tensor, weight: Tensor) -> Tensor:
        return OPAQUE(x, weight)


class Sub(Layer):
    pass


OPAQUE = fused("kernel", "kernel")


def decorated(function: Any) -> Any:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return function(x, weight)

    return call


renamed = decorated(OPAQUE)
CALLS: dict[str, tuple[Any, Any]] = {
    "class": (Layer, Layer()),
    "forward": (Layer.forward, Layer()),
    "method": (Layer.attend, Layer().attend),
    "inherited": (Sub.attend, Sub().attend),
    "static": (Layer.static, lambda *args: Layer.static(*args)),
    "address of a method": (f"{__name__}:Layer.attend", Layer().attend),
    "under another name": (None, lambda *args: renamed(*args)),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_and_decorated_functions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are counted where a class or a module has them, and restored."""
    monkeypatch.setattr(external, "EXTERNAL", dict(external.EXTERNAL))
    target, call = CALLS[name]
    target = target or renamed
    flop_formula(target, lambda *_, out: PRODUCT)
    before = dict(vars(Layer)), renamed
    x, weight = (torch.randn(*size, requires_grad=True) for size in ((TOKENS, IN), (IN, OUT)))
    bound = getattr(call, "__name__", "__call__")
    step = call if not hasattr(call, "__self__") else lambda *a: getattr(call.__self__, bound)(*a)
    assert counted(lambda: step(x, weight).sum().backward()).model == {"float32": 3 * PRODUCT}
    assert before == (dict(vars(Layer)), renamed)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


LIBRARY = torch.library.Library("perf_tests_composite", "DEF")
LIBRARY.define("run(Tensor x) -> Tensor")
LIBRARY.impl("run", Product.apply, "CompositeImplicitAutograd")


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (decorated(OPAQUE), "a module has under a name"),
        (f"{__name__}:Layer.attendd", "is not found .*attendd"),
        (f"{__name__}:Sub.attend", "is not found .*attend"),
        (Sub, "is not found .*forward"),
        ("no_such_package:run", "No module named"),
        (Product.forward, "a function that calls its apply"),
        (f"{__name__}:Product.apply", "is not found .*apply"),
        (f"{__name__}:Product", "no function"),
        (torch.ops.perf_tests_composite.run, "a function that calls it"),
    ],
)
def test_what_can_never_be_counted_is_refused(target: object, advice: str) -> None:
    """At once, and the message says what to register."""
    before = dict(external.EXTERNAL)
    with pytest.raises(ConfigError, match=advice):
        flop_formula(target, lambda *_, out: 0)
    assert before == external.EXTERNAL


@pytest.mark.parametrize(
    "hold",
    [
        lambda f: {"fast": f},
        lambda f: partial(f, None),
        lambda f: lambda x, f=f: f(x),
        lambda f: lambda x: f(x),
    ],
)
def test_what_else_has_a_function_is_named(registered: Any, hold: Any) -> None:
    """Calls from there are not counted, which a warning says at registration."""

    def run(x: Tensor) -> Tensor:
        return x

    kept = hold(run)
    with pytest.warns(PerfWarning, match="also has my_kernels:run. Calls from there are not"):
        registered(run, lambda *_, out: 0)
    assert kept


def test_formulas_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library registers with torch's own counter is used, as xformers and NATTEN do."""
    from torch.utils import flop_counter

    monkeypatch.setattr(flop_counter, "flop_registry", dict(flop_counter.flop_registry))

    @torch.library.custom_op("perf_tests::neighborhood", mutates_args=())
    def neighborhood(x: Tensor, radius: int) -> Tensor:
        return x.clone()

    @flop_counter.register_flop_formula(torch.ops.perf_tests.neighborhood)
    def formula(x: Any, radius: int, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * x[0] * (2 * radius + 1)

    counts = counted(lambda: neighborhood(torch.ones(10), 3))
    assert counts.model == {"float32": 2 * 10 * 7}


def test_odd_packages_stop_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy or partial modules of known names are left alone, and nothing of them is run."""

    class Static(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x

    def lazy(name: str) -> Any:
        raise RuntimeError(name)

    packages(
        monkeypatch,
        triton__runtime__jit={"JITFunction": type("Slotted", (), {"__slots__": ()})},
        transformer_engine__pytorch={"Linear": Static},
        selective_scan_cuda={"__getattr__": lazy},
    )
    before = vars(Static)["forward"]
    counted(lambda: Static.forward(torch.ones(2)))
    assert vars(Static)["forward"] is before


def test_a_counted_function_is_equal_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a key, pickled, compiled, kept, or imported meanwhile, it is the user's function."""
    name = "mamba_ssm.ops.selective_scan_interface"
    monkeypatch.setattr(scans, "__qualname__", "selective_scan_fn")
    packages(monkeypatch, mamba_ssm={}, mamba_ssm__ops={})
    packages(monkeypatch, **{name.replace(".", "__"): {"selective_scan_fn": scans}})
    module, kept = sys.modules[name], []
    u, states, table = torch.randn(2, 3, 5), torch.randn(3, 4), {scans: 3}

    def step() -> None:
        function = module.selective_scan_fn
        assert table[function] == 3
        assert pickle.loads(pickle.dumps(function)) is function
        torch.compile(lambda x: function(x, x, states, x, x), fullgraph=True, backend="eager")(u)
        packages(monkeypatch, imported_late={})
        vars(sys.modules["imported_late"])["scan"] = function
        kept.append(function)

    counted(step)
    assert module.selective_scan_fn is scans
    assert sys.modules["imported_late"].scan is scans
    assert counted(lambda: kept[0](u, u, states, u, u)).model == {}


@pytest.mark.parametrize("target", [torch.autograd.Function, lru_cache(scans), nn.Linear(2, 2)])
def test_callables_that_are_more_than_a_call_are_refused(target: object) -> None:
    """Replacing them for a batch would take the rest of their interface away."""
    with pytest.raises(ConfigError, match="no operator, function, module class or address"):
        flop_formula(target, lambda *_: 0)
