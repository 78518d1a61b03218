"""Classification of operators: counted, light, composite or opaque."""

import pytest
import torch

from lightning_perf.flops.operators import (
    FORMULAS,
    Kind,
    classify,
    is_composite,
    product,
)

aten = torch.ops.aten


def test_every_overload_has_the_formula_of_its_operator():
    """Out and in-place variants have the formula of the functional one."""
    formula = FORMULAS["aten::addmm"]
    assert classify(aten.addmm.default) is formula
    assert classify(aten.addmm.out) is formula
    assert classify(aten.addmm_.default) is formula
    assert classify(aten.mm.default) is product


def test_formulas_are_of_operators_that_exist():
    """Every formula belongs to an existing operator."""
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
    """Elementwise operators, views, reductions and metadata count as light."""
    packet, _, overload = name.partition(".")
    operator = getattr(aten, packet)
    overload = overload or next(o for o in operator.overloads() if o != "out")
    assert classify(getattr(operator, overload)) is Kind.LIGHT


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
    """Operators that need a formula and have none are opaque."""
    operator = getattr(aten, name)
    assert classify(getattr(operator, operator.overloads()[0])) is Kind.OPAQUE


@pytest.mark.parametrize("name", ["conv2d", "einsum", "scaled_dot_product_attention", "multi_dot"])
def test_composite_operators(name):
    """Operators composed of others are detected."""
    operator = getattr(aten, name, None) or getattr(aten, f"linalg_{name}")
    assert is_composite(operator.default)


def test_other_namespaces():
    """Communication is light; operators of other libraries are opaque."""
    assert classify(torch.ops.prim.device.default) is Kind.LIGHT
    assert classify(torch.ops.quantized.add.default) is Kind.OPAQUE
