"""The peak of an NVIDIA device that the table does not have, from its units and their clock."""

from __future__ import annotations

from lightning_perf.flops.devices import COLUMNS

# Dense FLOPs per clock and multiprocessor by compute capability, after NVIDIA's architecture white
# papers. What follows from the 16-bit rate is derived below.
_RATES: dict[tuple[int, int], dict[str, int]] = {
    (6, 0): {"fp64": 64, "fp32": 128, "fp16": 256},
    (6, 1): {"fp64": 8, "fp32": 256, "int8": 1024},
    (7, 0): {"fp64": 64, "fp32": 128, "fp16": 1024},
    (7, 5): {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048},
    (8, 0): {"fp64": 128, "fp32": 128, "fp16": 2048, "int8": 4096},
    (8, 6): {"fp64": 4, "fp32": 256, "fp16": 1024, "int8": 2048},
    (8, 9): {"fp64": 4, "fp32": 256, "fp16": 1024, "int8": 2048},
    (9, 0): {"fp64": 256, "fp32": 256, "fp16": 4096, "int8": 8192},
    (10, 0): {"fp64": 128, "fp32": 256, "fp16": 8192, "int8": 16384},
    (12, 0): {"fp64": 4, "fp32": 256, "fp16": 1024, "int8": 2048},
}
# GeForce parts run floating-point products that add up in float32 at half the rate.
_HALVED_ON_GEFORCE = frozenset([(7, 5), (8, 6), (8, 9), (12, 0)])


def estimate_from_properties(
    sm_count: int,
    clock_hz: float,
    capability: tuple[int, int],
    dtype: str,
    *,
    tf32: bool = False,
    geforce: bool = False,
) -> float | None:
    """The dense peak of an NVIDIA device in FLOP/s: multiprocessors x clock x rate.

    Args:
        sm_count: Multiprocessors.
        clock_hz: Their highest clock, in hertz.
        capability: Compute capability, such as ``(8, 0)``.
        dtype: The operands', as in ``"bfloat16"``.
        tf32: Whether float32 products run as TensorFloat-32 where the device can.
        geforce: Whether it is a GeForce, whose tensor cores are slowed down.

    Returns:
        The estimate, or None if the capability is not known or has no unit for the dtype.

    Example:
        >>> round(estimate_from_properties(108, 1.41e9, (8, 0), "bfloat16") / 1e12)
        312
    """
    rates = _all_rates(capability, geforce=geforce)
    column = COLUMNS.get(dtype, "")
    if column == "fp32" and tf32 and "tf32" in rates:
        column = "tf32"
    rate = rates.get(column)
    return None if rate is None else sm_count * clock_hz * rate


def _all_rates(capability: tuple[int, int], *, geforce: bool) -> dict[str, int]:
    rates = dict(_RATES.get(capability, {}))
    if "fp16" not in rates:
        return rates
    full = rates["fp16"]
    half = full // 2 if geforce and capability in _HALVED_ON_GEFORCE else full
    rates["fp16"] = half
    if capability >= (8, 0):
        rates |= {"bf16": half, "tf32": half // 2}
    if capability >= (8, 9):
        rates["fp8"] = 2 * half
    if capability >= (10, 0):
        rates["fp4"] = 4 * full
    return rates
