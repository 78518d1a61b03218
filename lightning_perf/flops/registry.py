"""Which operators do work that counts, and how to know the others.

Elementwise work, reductions, outer products and data movement are left out, as is usual for MFU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

from lightning_perf.flops import attention as att
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
    att.attention: """_scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_attention_math_for_mps higher_order::flex_attention""",
    att.attention_backward: """_scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward""",
    att.flex_attention_backward: "higher_order::flex_attention_backward",
    att.flash_attention: "_flash_attention_forward",
    att.flash_attention_backward: "_flash_attention_backward",
    att.efficient_attention: "_efficient_attention_forward",
    att.efficient_attention_backward: "_efficient_attention_backward",
    att.multi_head_attention: "_native_multi_head_attention",
    att.transformer_encoder_layer: "_transformer_encoder_layer_fwd",
}

#: Formulas by the operator's name, namespace included, without overload.
FORMULAS: dict[str, Formula] = {
    name if "::" in name else f"aten::{name}": formula
    for formula, names in _TABLE.items()
    for name in names.split()
}

# Looked for in aten, where most operators are light; elsewhere most are not.
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


class Kind(Enum):
    """What an operator without a formula is."""

    #: No work that counts.
    LIGHT = "light"
    #: Made of other operators, which can be counted one by one.
    COMPOSITE = "composite"
    #: Work that counts, or that cannot be seen into.
    OPAQUE = "opaque"


@cache
def classify(operator: Any) -> Formula | Kind:
    """The formula of an operator, or what it is if it has none.

    Args:
        operator: An overload or a higher-order operator, as a dispatch mode gets it.

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
    if _is_composite(operator):
        return Kind.COMPOSITE
    return Kind.OPAQUE if _HEAVY.match(base) else Kind.LIGHT


def qualified_name(operator: Any) -> str:
    """``aten::addmm`` for ``aten.addmm_.default`` and ``aten.addmm.out``."""
    name = str(operator.name())
    if "::" not in name:
        return f"higher_order::{name}"
    return name.partition(".")[0].rstrip("_")


def _is_composite(operator: Any) -> bool:
    # Operators that return no tensor tell sizes and strides: for some subclasses these decompose
    # into themselves. Asking this of an operator outside aten can abort the process.
    returns = operator._schema.returns
    return any("Tensor" in str(one.type) for one in returns) and bool(operator._can_decompose())
