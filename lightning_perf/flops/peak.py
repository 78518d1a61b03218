"""Resolves the peak FLOP/s of a device: given, from the table, estimated or measured."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_perf.errors import ConfigError
from lightning_perf.flops.devices import COLUMNS, lookup, peak_flops
from lightning_perf.flops.measure import BUDGET_SECONDS, measure_peak

# Dense FLOPs per clock and multiprocessor by compute capability, from NVIDIA's architecture white
# papers. `_all_rates` derives the others from the 16-bit rate.
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
# GeForce devices run products with float32 accumulation at half the rate.
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
    """Estimate the dense peak of an NVIDIA device in FLOP/s: multiprocessors x clock x rate.

    Args:
        sm_count: Number of multiprocessors.
        clock_hz: Maximum clock in hertz.
        capability: Compute capability, such as ``(8, 0)``.
        dtype: Operand dtype, such as ``"bfloat16"``.
        tf32: Whether float32 products use TensorFloat-32 if the device supports it.
        geforce: Whether it is a GeForce, whose tensor cores run at a reduced rate.

    Returns:
        The estimate, or None if the capability is unknown or does not support the dtype.

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


# Limits for the FLOP/s of one device.
_LEAST, _MOST = 1e9, 1e18


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of one device for one dtype."""

    #: FLOP/s.
    value: float
    #: ``given``, ``measured``, ``estimated: ...`` or ``table: ...``.
    source: str


def check_peak(given: object, field: str = "peak_flops") -> None:
    """Raise ConfigError unless given is None, ``"measure"`` or plausible FLOP/s of one device."""
    if given is None or given == "measure":
        return
    number = given if isinstance(given, int | float) and not isinstance(given, bool) else 0.0
    if not 0 < number < math.inf:
        problem = "is not a valid peak, expected FLOP/s of one device or 'measure'"
        raise ConfigError(field, given, problem, "312e12")
    if not _LEAST <= number <= _MOST:
        # A small number is probably in TFLOP/s, as in data sheets.
        example = f"{number:g}e12" if _LEAST <= number * 1e12 <= _MOST else "312e12"
        problem = "is out of range for one device, expected a value in FLOP/s (not TFLOP/s)"
        raise ConfigError(field, given, problem, example)


def resolve_peak(
    device: torch.device, dtype_name: str, given: float | str | None = None
) -> Peak | None:
    """Return the peak of a device: the given one, else from the table, else an estimate.

    A CPU is measured, and so is any device with ``given="measure"``. For float32 on CUDA the peak
    is that of TensorFloat-32 if it is enabled.

    Args:
        device: The device.
        dtype_name: Operand dtype, such as ``"bfloat16"``.
        given: None, ``"measure"``, or FLOP/s of one device.

    Returns:
        The peak, or None if it is unknown.

    Raises:
        ConfigError: If ``given`` is not valid.

    Example:
        >>> resolve_peak(torch.device("cuda"), "bfloat16", given=312e12)
        Peak(value=312000000000000.0, source='given')
    """
    check_peak(given)
    if given == "measure" or (given is None and device.type == "cpu"):
        return measured_peak(device, dtype_name)
    if given is not None:
        return Peak(float(given), "given")
    return _from_table(device, dtype_name) or _estimated(device, dtype_name)


def measured_peak(
    device: torch.device | str, dtype_name: str, budget_seconds: float = BUDGET_SECONDS
) -> Peak | None:
    """Return the measured rate of a matrix product, measured once per process.

    Args:
        device: The device, such as ``"cpu"``.
        dtype_name: Operand dtype, such as ``"bfloat16"``.
        budget_seconds: Approximate time limit.

    Returns:
        The peak, or None if the device does not exist or does not support the dtype, or if the
        measurement is implausible.
    """
    dtype = getattr(torch, dtype_name, None)
    try:
        device = torch.device(device)
    except RuntimeError:
        return None
    if not isinstance(dtype, torch.dtype):
        return None
    value = measure_peak(dtype, device, budget_seconds)
    return None if value is None else Peak(value, "measured")


def _from_table(device: torch.device, dtype_name: str) -> Peak | None:
    name = device_name(device)
    value = peak_flops(name, dtype_name, tf32=tf32_is_on())
    peaks = lookup(name)
    if value is None or peaks is None:
        return None
    return Peak(value, f"table: {peaks.name} ({peaks.confidence})")


def cuda_devices() -> tuple[str | None, list[str]]:
    """The CUDA or ROCm version that torch is built for, and the GPUs that it sees, by name."""
    build = torch.version.cuda or torch.version.hip
    numbers = range(torch.cuda.device_count())
    return build, [device_name(torch.device("cuda", number)) for number in numbers]


def device_name(device: torch.device | str) -> str:
    """Return the product name of a device, or its type if there is none.

    Example:
        >>> device_name(torch.device("meta"))
        'meta'
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_name()
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "get_device_name"):
        return str(backend.get_device_name(device))
    if device.type == "mps" and hasattr(torch.backends.mps, "get_name"):
        return str(torch.backends.mps.get_name())
    return device.type


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "cpu"


def _estimated(device: torch.device, dtype_name: str) -> Peak | None:
    # torch calls AMD devices cuda too, but their units and capabilities differ.
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    value = estimate_from_properties(
        properties.multi_processor_count,
        1e3 * getattr(properties, "clock_rate", 0),
        (properties.major, properties.minor),
        dtype_name,
        tf32=tf32_is_on(),
        geforce="GeForce" in properties.name,
    )
    return Peak(value, f"estimated: {properties.name}") if value else None


def tf32_is_on() -> bool:
    """Whether float32 matrix products may use TensorFloat-32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return precision == "tf32" or (precision is None and torch.backends.cuda.matmul.allow_tf32)
