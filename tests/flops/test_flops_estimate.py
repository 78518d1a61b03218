"""Peaks estimated from units and clock, compared with data sheets."""

import pytest

from lightning_perf.flops import peak_flops
from lightning_perf.flops.peaks import estimate_from_properties


@pytest.mark.parametrize(
    ("device", "sm_count", "clock_ghz", "capability"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 1.41, (8, 0)),
        ("NVIDIA H100 80GB HBM3", 132, 1.83, (9, 0)),
        ("NVIDIA B200", 148, 1.856, (10, 0)),
        ("NVIDIA L4", 58, 2.04, (8, 9)),
        ("NVIDIA A40", 84, 1.74, (8, 6)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, (12, 0)),
        ("Tesla T4", 40, 1.59, (7, 5)),
        ("Tesla V100-SXM2-16GB", 80, 1.53, (7, 0)),
        ("Tesla P100-SXM2-16GB", 56, 1.48, (6, 0)),
        ("NVIDIA GeForce RTX 4090", 128, 2.52, (8, 9)),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, (8, 6)),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, (12, 0)),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, (7, 5)),
    ],
)
def test_known_devices(device, sm_count, clock_ghz, capability):
    """The table and the estimate agree to a few percent."""
    compared = 0
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int8", "float4_e2m1fn_x2", "float32"):
        for tf32 in (False, True):
            ours = estimate_from_properties(
                sm_count,
                clock_ghz * 1e9,
                capability,
                dtype,
                tf32=tf32,
                geforce="GeForce" in device,
            )
            known = peak_flops(device, dtype, tf32=tf32)
            if known is not None and ours is not None:
                compared += 1
                # Some data sheets give float32 at a higher clock than the tensor cores'.
                assert ours == pytest.approx(known, rel=0.1)
    assert compared >= 4


def test_published_figures():
    """The estimates of A100 and H100 equal their published peaks."""
    a100 = estimate_from_properties(108, 1.41e9, (8, 0), "bfloat16")
    h100 = estimate_from_properties(132, 1.83e9, (9, 0), "bfloat16")
    assert a100 == pytest.approx(312e12, rel=1e-3)
    assert h100 == pytest.approx(989.4e12, rel=1e-3)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((3, 7), "float32"), ((99, 0), "float16"), ((7, 5), "bfloat16"), ((8, 0), "float8_e4m3fn")],
)
def test_unknown_units(capability, dtype):
    """Unknown capabilities and unsupported dtypes have no estimate."""
    assert estimate_from_properties(10, 1e9, capability, dtype) is None
