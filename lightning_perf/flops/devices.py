"""Peak FLOP/s of devices by dtype, without sparsity, each with its source.

The table is ``device_peaks.json``. Peaks are those of the matrix units of one device as ``torch``
sees it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

#: The column of the table for each dtype.
COLUMNS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "int8": "int8",
    "uint8": "int8",
    "float4_e2m1fn_x2": "fp4",
}
_MOBILE = re.compile(r"laptop|max-?q|mobile", re.IGNORECASE)
# A MIG slice has the name of the whole device.
_SLICE = re.compile(r"\bMIG\b")


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Peak FLOP/s of one device model; None if unsupported or unknown."""

    name: str
    #: Regular expressions; the name of the device matches at least one.
    patterns: tuple[str, ...]
    fp64: float | None
    #: Without the matrix units, if different.
    fp64_vector: float | None
    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    int8: float | None
    fp4: float | None
    #: Where the values come from.
    source: str
    #: Quality of the source: ``datasheet``, ``derived`` from units and clock, or ``secondary`` for
    #: third-party sources; or which of these applies to which value.
    confidence: str
    note: str = ""

    def matches(self, device_name: str) -> bool:
        """Whether a device name is of this model. Laptop and desktop models differ."""
        if _SLICE.search(device_name):
            return False
        if _MOBILE.search(device_name) and not _MOBILE.search(self.name):
            return False
        return any(re.search(pattern, device_name, re.IGNORECASE) for pattern in self.patterns)


@cache
def table() -> tuple[DevicePeaks, ...]:
    """Return all known devices in the order of matching."""
    text = resources.files(__package__).joinpath("device_peaks.json").read_text("utf-8")
    known = [field.name for field in fields(DevicePeaks)]
    return tuple(
        DevicePeaks(
            **{"name": name, **{key: row[key] for key in known if key in row}}
            | {"patterns": tuple(row["patterns"])}
        )
        for name, row in json.loads(text).items()
    )


def lookup(device_name: str) -> DevicePeaks | None:
    """Return the table entry of a device.

    Args:
        device_name: The result of ``torch.cuda.get_device_name``.

    Returns:
        The first match, or None if the device is not in the table.

    Example:
        >>> lookup("NVIDIA A100-SXM4-40GB").bf16 / 1e12
        312.0
    """
    return next((peaks for peaks in table() if peaks.matches(device_name)), None)


def peak_flops(device_name: str, dtype: str, tf32: bool = False) -> float | None:
    """Return the peak of a device for matrix products of one dtype, in FLOP/s.

    Args:
        device_name: The result of ``torch.cuda.get_device_name``.
        dtype: Operand dtype, such as ``"bfloat16"``.
        tf32: Whether float32 products use TensorFloat-32 if the device supports it.

    Returns:
        The peak, or None if unknown.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-40GB", "float32", tf32=True) / 1e12
        156.0
    """
    peaks = lookup(device_name)
    column = COLUMNS.get(dtype)
    if peaks is None or column is None:
        return None
    if column == "fp32" and tf32 and peaks.tf32 is not None:
        return peaks.tf32
    value: float | None = getattr(peaks, column)
    return value
