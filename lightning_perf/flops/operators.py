"""Operators: the formulas of their FLOPs, which ones need a formula, and how torch dispatches them.

Elementwise operators, reductions, outer products and data movement do not count, as usual for MFU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.flops.attention import Attention, Work
from lightning_perf.flops.compat import is_registered_composite

if TYPE_CHECKING:
    from torch import Tensor

Args = Sequence[Any]
#: FLOPs; FLOPs with those that a causal mask hides; or a function that returns them later.
Flops = int | Work | Callable[[], Work]


@dataclass(frozen=True)
class Call:
    """A call of an operator: an overload or a higher-order operator."""

    operator: Any
    args: Args
    kwargs: Mapping[str, Any]

    def named(self) -> dict[str, Any]:
        """The arguments by name, with their defaults."""
        schema = getattr(self.operator, "_schema", None)
        if schema is None:
            defaults = dict.fromkeys(_HIGHER_ORDER.get(self.operator.name(), ()))
        else:
            defaults = {each.name: each.default_value for each in schema.arguments}
        return {**defaults, **dict(zip(defaults, self.args, strict=False)), **self.kwargs}


#: The arguments of operators without a schema.
_HIGHER_ORDER = {
    "flex_attention": ("query", "key", "value", "score_mod", "block_mask"),
    "flex_attention_backward": (
        "query", "key", "value", "out", "logsumexp", "grad_out", "grad_logsumexp", "fw_graph",
        "joint_graph", "block_mask",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ByName:
    """A formula that gets the arguments of a call by name."""

    formula: Callable[[Mapping[str, Any]], Flops]


@dataclass(frozen=True)
class ByCall:
    """A formula that gets the arguments as they were given, and the result as ``out_name``."""

    formula: Callable[..., int]
    out_name: str = "out"


#: FLOPs from the arguments and the result of an operator.
Formula = Callable[[Args, Any], int] | ByName | ByCall


def work_of(formula: Formula, call: Call, out: object) -> Flops:
    """The FLOPs of a call."""
    if isinstance(formula, ByName):
        return formula.formula(call.named())
    if isinstance(formula, ByCall):
        return formula.formula(*call.args, **call.kwargs, **{formula.out_name: out})
    return formula(call.args, out)


def operand(tensors: Sequence[Tensor]) -> Tensor:
    """The first tensor of a call that a product may have: no ids and masks, vectors last."""
    fits = (
        each
        for each in tensors
        if each.is_floating_point() or each.is_complex() or each.dtype == torch.int8
    )
    return max(fits, key=lambda each: each.dim() > 1, default=tensors[0])


def product(args: Args, out: Tensor) -> int:
    """A product that contracts the last dimension of its first argument ``[..., k]``."""
    return 2 * out.numel() * _contracted(args[0])


def _contracted(a: Tensor) -> int:
    # A 4-bit dtype such as float4_e2m1fn_x2 has two values per element.
    return int(a.size(-1)) * (2 if str(a.dtype).endswith("_x2") else 1)


def grouped_product(args: Args, out: Tensor) -> int:
    """One product per expert."""
    a, b = args[:2]
    if a.dim() == b.dim() == 2:
        # The groups split the contracted dimension; the output has one matrix per group.
        return 2 * int(a.size(0) * b.size(1)) * _contracted(a)
    return product(args, out)


def plain_convolution(args: Args, out: Tensor) -> int:
    """One filter over the channels of a group per output element."""
    weight = args[1]
    return int(2 * out.numel() * (weight.numel() // weight.size(0)))


def transposed_convolution(args: Args, _: object) -> int:
    """One filter per input element."""
    return plain_convolution(args, args[0])


def convolution(args: Args, out: Tensor) -> int:
    """A convolution of any dimensions and groups, transposed or not."""
    transposed = args[6]
    return transposed_convolution(args, out) if transposed else plain_convolution(args, out)


def convolution_backward(args: Args, _: object) -> int:
    """The cost of the forward for each requested gradient of input and weight."""
    grad, *forward, mask = args
    return int(sum(mask[:2])) * convolution(forward, grad)


def recurrent(args: Args, _: object) -> int:
    """Every weight matrix of every layer and direction, once per step of every sequence.

    The arguments are the input ``[time, batch, features]`` or packed ``[total, features]``, then
    the list of weights, of which the biases have one dimension.
    """
    x, weights = args[:2]
    steps = x.numel() // x.size(-1)
    return int(2 * steps * sum(w.numel() for w in weights if w.dim() == 2))


def recurrent_backward(args: Args, out: object) -> int:
    """The gradients of the data, which are always computed, and of the weights if requested."""
    mask = args[-1]
    return recurrent(args, out) * (2 if mask[3] else 1)


def _sequences(x: Tensor) -> list[int]:
    # The fast path of nn.TransformerEncoder converts a padded batch to a nested tensor.
    if x.is_nested:
        return [int(length) for length in x._nested_tensor_size()[:, 0]]
    return [x.size(1)] * x.size(0)


def multi_head_attention(args: Args, _: object) -> int:
    """Projections and attention in one operator, for inference.

    The arguments are query, key and value ``[batch, length, width]`` or nested, then the width.
    """
    query, key, _value, width = args[:4]
    lengths = zip(_sequences(query), _sequences(key), strict=True)
    return sum(4 * width * ((q + k) * width + q * k) for q, k in lengths)


def transformer_encoder_layer(args: Args, out: object) -> int:
    """Self-attention and the two linear layers after it in one operator, for inference."""
    x, width, first, second = args[0], args[1], args[14], args[16]
    feed_forward = 2 * sum(_sequences(x)) * (first.numel() + second.numel())
    return int(multi_head_attention([x, x, x, width], out) + feed_forward)


# The formulas of operators, those of aten by their base name. A lambda brings the arguments into
# the order of the formula.
_TABLE: dict[str, Formula] = {
    """mm bmm mv dot vdot matmul linear mkldnn_linear _int_mm _scaled_mm _scaled_mm_v2
    _mixed_dtypes_linear _dyn_quant_matmul_4bit _weight_int8pack_mm _weight_int4pack_mm
    _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros
    affine_grid_generator""": product,
    "addmm baddbmm addmv _addmm_activation": lambda args, out: product(args[1:], out),
    "addbmm": lambda args, out: int(args[1].size(0)) * product(args[1:], out),  # a sum of products
    "_foreach_mm": lambda args, out: sum(
        product([a], one) for a, one in zip(args[0], out, strict=True)
    ),
    "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": grouped_product,
    # One product for each requested gradient of input and weight.
    "linear_backward": lambda args, _: sum(args[3][:2]) * product(args, args[1]),
    "matmul_backward": lambda args, _: sum(args[3]) * product(args[1:], args[0]),
    """mkldnn_convolution cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_relu miopen_convolution_add_relu
    miopen_depthwise_convolution _mps_convolution _slow_conv2d_forward slow_conv3d_forward
    slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d conv_depthwise3d
    _nnpack_spatial_convolution""": plain_convolution,
    """cudnn_convolution_transpose miopen_convolution_transpose _mps_convolution_transpose
    slow_conv_transpose2d slow_conv_transpose3d""": transposed_convolution,
    "convolution _convolution convolution_overrideable": convolution,
    "convolution_backward": convolution_backward,
    # Without the sizes of the bias.
    "convolution_backward_overrideable": lambda args, out: convolution_backward(
        [*args[:3], None, *args[3:]], out
    ),
    "_cudnn_rnn miopen_rnn": recurrent,
    "_cudnn_rnn_backward miopen_rnn_backward": recurrent_backward,
    # The state comes before the weights.
    "_lstm_mps": lambda args, out: recurrent([args[0], args[2]], out),
    # One layer in one direction, with separate weights of input and state.
    "mkldnn_rnn_layer": lambda args, out: recurrent([args[0], args[1:3]], out),
    "mkldnn_rnn_layer_backward": lambda args, out: 2 * recurrent([args[0], args[1:3]], out),
    """_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
    higher_order::flex_attention""": ByName(Attention(heads_first=True)),
    """_scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward
    higher_order::flex_attention_backward""": ByName(Attention(heads_first=True, backward=True)),
    """_flash_attention_forward _flash_attention_forward_no_dropout_inplace
    _efficient_attention_forward torch_attn::_varlen_attn flash_attn::_flash_attn_forward
    flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd
    flash_attn_3::_flash_attn_forward""": ByName(Attention()),
    """_flash_attention_backward _efficient_attention_backward torch_attn::_varlen_attn_backward
    flash_attn::_flash_attn_backward flash_attn::_flash_attn_varlen_backward flash_attn_3::bwd
    flash_attn_3::_flash_attn_backward""": ByName(Attention(backward=True)),
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
}
#: Formulas by qualified name of the operator, without overload.
FORMULAS: dict[str, Formula] = {
    name if "::" in name else f"aten::{name}": formula
    for names, formula in _TABLE.items()
    for name in names.split()
}

#: Formulas of cuDNN's operators, which have their own TensorFloat-32 setting, on by default.
CUDNN: frozenset[Formula] = frozenset({
    plain_convolution, transposed_convolution, convolution, convolution_backward, recurrent,
    recurrent_backward,
})  # fmt: skip


def tf32_is_on(cudnn: bool = False) -> bool:
    """Whether float32 products on CUDA, or those of cuDNN, may use TensorFloat-32."""
    backend: Any = torch.backends.cuda.matmul
    if cudnn:
        backend = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
    precision = getattr(backend, "fp32_precision", None)
    return bool(precision == "tf32" or (precision is None and backend.allow_tf32))


@contextmanager
def tf32() -> Iterator[None]:
    """Let float32 products on CUDA use TensorFloat-32, as those of cuDNN do."""
    backend: Any = torch.backends.cuda.matmul
    # torch.backends.cuda.matmul.fp32_precision replaces allow_tf32 from torch 2.9 on.
    new = hasattr(backend, "fp32_precision")
    name, on = ("fp32_precision", "tf32") if new else ("allow_tf32", True)
    before = getattr(backend, name)
    setattr(backend, name, on)
    try:
        yield
    finally:
        setattr(backend, name, before)


# Names in aten without a formula that do count; in other namespaces most operators do.
_HEAVY = re.compile(
    r"""_?(
    linalg_(?!check_errors|_powsum|vecdot|cross|diagonal|vector_norm|matrix_norm)
    | fft_(r2c|c2c|c2r) | cdist | pdist | euclidean_dist | compute_linear_combination
    | cholesky | geqrf | ormqr | triangular_solve | spsolve
    | trilinear | conv_tbc | slow_conv | (mps|mkldnn)_\w*(convolution|linear)
    | lstm_mps | quantized_(lstm|gru) | fbgemm_linear | triton | \w*attention(?!_mask)
    | (cslt_|semi_structured_|sparse_)+\w*(mm|matmul|linear) | hspmm | sspaddmm
    )""",
    re.VERBOSE,
)
# Communication, metadata and bookkeeping.
_LIGHT_NAMESPACE = re.compile(r"prims?|_?c10d\w*|_dtensor|fsdp|symm_mem|profiler|inductor")


def unknown(_args: Args, _out: object) -> int:
    """The formula of operators whose work counts or is unknown."""
    raise NotImplementedError


@cache
def formula_of(operator: Any) -> Formula | None:
    """Return the formula of an operator; None if its work does not count.

    The operator is an overload or a higher-order operator, as passed to a dispatch mode.
    """
    name = qualified_name(operator)
    namespace, _, base = name.partition("::")
    is_aten = namespace == "aten"
    counts = _HEAVY.match(base) if is_aten else not _LIGHT_NAMESPACE.fullmatch(namespace)
    return FORMULAS.get(name) or _of_torch(operator) or (unknown if counts else None)


def _of_torch(operator: Any) -> Formula | None:
    """A formula that another library has registered with torch's own counter, as xformers does."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    return None if formula is None else ByCall(formula, out_name="out_val")


def qualified_name(operator: Any) -> str:
    """Return ``aten::addmm`` for ``aten.addmm_.default`` and ``aten.addmm.out``."""
    name = str(operator.name())
    if "::" not in name:
        return f"higher_order::{name}"
    return name.partition(".")[0].rstrip("_")


@cache
def is_composite(operator: Any) -> bool:
    """Whether an operator is composed of others on devices without a kernel for it."""
    namespace = qualified_name(operator).partition("::")[0]
    if namespace == "higher_order" or _LIGHT_NAMESPACE.fullmatch(namespace):
        return False
    return is_registered_composite(operator)
