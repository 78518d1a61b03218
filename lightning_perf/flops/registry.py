"""Maps operators to FLOP formulas, and detects operators that need one.

Elementwise operators, reductions, outer products and data movement do not count, as usual for MFU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from lightning_perf.flops import operators as ops

Formula = Callable[[ops.Args, Any], int]

_TABLE: dict[Formula, str] = {
    ops.product: """mm bmm mv dot vdot matmul linear mkldnn_linear _int_mm _scaled_mm _scaled_mm_v2
        _mixed_dtypes_linear _dyn_quant_matmul_4bit _weight_int8pack_mm _weight_int4pack_mm
        _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros""",
    ops.added_product: "addmm baddbmm addmv _addmm_activation",
    ops.summed_product: "addbmm",
    ops.listed_products: "_foreach_mm",
    ops.grouped_product: "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
    ops.linear_backward: "linear_backward",
    ops.matmul_backward: "matmul_backward",
    ops.plain_convolution: """mkldnn_convolution cudnn_convolution cudnn_convolution_relu
        cudnn_convolution_add_relu miopen_convolution miopen_convolution_relu
        miopen_convolution_add_relu miopen_depthwise_convolution _mps_convolution
        _slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
        _conv_depthwise2d conv_depthwise3d _nnpack_spatial_convolution""",
    ops.transposed_convolution: """cudnn_convolution_transpose miopen_convolution_transpose
        _mps_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d""",
    ops.convolution: "convolution _convolution convolution_overrideable",
    ops.convolution_backward: "convolution_backward",
    ops.convolution_backward_overrideable: "convolution_backward_overrideable",
    ops.recurrent: "_cudnn_rnn miopen_rnn",
    ops.recurrent_backward: "_cudnn_rnn_backward miopen_rnn_backward",
    ops.recurrent_mps: "_lstm_mps",
    ops.recurrent_layer: "mkldnn_rnn_layer",
    ops.recurrent_layer_backward: "mkldnn_rnn_layer_backward",
    ops.attention: """_scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_attention_math_for_mps higher_order::flex_attention""",
    ops.attention_backward: """_scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward""",
    ops.flex_attention_backward: "higher_order::flex_attention_backward",
    ops.flash_attention: "_flash_attention_forward",
    ops.flash_attention_backward: "_flash_attention_backward",
    ops.efficient_attention: "_efficient_attention_forward",
    ops.efficient_attention_backward: "_efficient_attention_backward",
    ops.multi_head_attention: "_native_multi_head_attention",
    ops.transformer_encoder_layer: "_transformer_encoder_layer_fwd",
}

#: Formulas by qualified name of the operator, without overload.
FORMULAS: dict[str, Formula] = {
    name if "::" in name else f"aten::{name}": formula
    for formula, names in _TABLE.items()
    for name in names.split()
}

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


#: The autocast keys of all devices.
AUTOCAST = DispatchKeySet(DispatchKey.Undefined)
for _name, _key in DispatchKey.__members__.items():
    if _name.startswith("Autocast"):
        AUTOCAST |= DispatchKeySet(_key)


class Kind(Enum):
    """The kind of an operator without a formula."""

    #: Its work does not count.
    LIGHT = "light"
    #: Its work counts or is unknown.
    OPAQUE = "opaque"


@cache
def classify(operator: Any) -> Formula | Kind:
    """Return the formula of an operator, or its kind if it has none.

    Args:
        operator: An overload or a higher-order operator, as passed to a dispatch mode.

    Example:
        >>> import torch
        >>> classify(torch.ops.aten.relu.default)
        <Kind.LIGHT: 'light'>
    """
    name = qualified_name(operator)
    if formula := FORMULAS.get(name):
        return formula
    namespace, _, base = name.partition("::")
    if namespace != "aten":
        return Kind.LIGHT if _LIGHT_NAMESPACE.fullmatch(namespace) else Kind.OPAQUE
    return Kind.OPAQUE if _HEAVY.match(base) else Kind.LIGHT


@cache
def is_composite(operator: Any) -> bool:
    """Whether an operator is composed of others on devices without a kernel for it.

    Args:
        operator: As for `classify`.

    Example:
        >>> import torch
        >>> is_composite(torch.ops.aten.einsum.default)
        True
    """
    namespace = qualified_name(operator).partition("::")[0]
    if namespace == "higher_order" or _LIGHT_NAMESPACE.fullmatch(namespace):
        return False
    # Operators without a tensor result return sizes and strides: for some subclasses these
    # decompose into themselves. `_can_decompose` is not used: it includes decompositions in Python,
    # which apply to tracing only, and it can abort the process outside aten.
    returns = operator._schema.returns
    tensors = any("Tensor" in str(one.type) for one in returns)
    return tensors and _registered(operator.name(), "CompositeImplicitAutograd")


def has_own_kernel(operator: Any, keys: DispatchKeySet) -> bool:
    """Whether a composite operator has a kernel for some tensors, which replaces its parts.

    Args:
        operator: An overload.
        keys: The dispatch keys of its arguments.

    Example:
        >>> import torch
        >>> silu_backward = torch.ops.aten.silu_backward.default
        >>> has_own_kernel(silu_backward, torch._C._dispatch_keys(torch.ones(2)))
        True
    """
    backends = keys & torch._C._after_ADInplaceOrView_keyset
    return _has_kernel(operator.name(), backends) or (
        keys.has(DispatchKey.AutogradNestedTensor)
        and _registered(operator.name(), "CompositeImplicitAutogradNestedTensor")
    )


def is_autocast(operator: Any, keys: DispatchKeySet) -> bool:
    """Whether autocast handles the operator itself, and not its parts.

    Args:
        operator: An overload.
        keys: The dispatch keys of its arguments.
    """
    return _has_kernel(operator.name(), keys & AUTOCAST)


def qualified_name(operator: Any) -> str:
    """Return ``aten::addmm`` for ``aten.addmm_.default`` and ``aten.addmm.out``."""
    name = str(operator.name())
    if "::" not in name:
        return f"higher_order::{name}"
    return name.partition(".")[0].rstrip("_")


def _registered(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _has_kernel(name: str, keys: DispatchKeySet) -> bool:
    return torch._C._dispatch_has_kernel_for_any_dispatch_key(name, keys)
