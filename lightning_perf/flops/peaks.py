"""Peak FLOP/s of devices by dtype, without sparsity: given, from a table, estimated or measured.

The table is ``device_peaks.json``. Peaks are those of the matrix units of one device as ``torch``
sees it. The cost of a batch is the time that its FLOPs take at the peak.
"""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.cgroup import usable_cpus
from lightning_perf.checks import is_number
from lightning_perf.errors import ConfigError, warn
from lightning_perf.flops.measure import best_peak, measure_peak
from lightning_perf.flops.operators import tf32_is_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.flops.counter import Counts

#: The column of the table for each dtype; ``tf32`` is float32 in TensorFloat-32.
COLUMNS = {
    "float64": "fp64",
    "float32": "fp32",
    "tf32": "tf32",
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
    patterns: Sequence[str]
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
    #: Multiprocessors, and the clock at which the peaks of the matrix units hold, in MHz.
    sm: int | None = None
    boost_mhz: float | None = None
    #: The address of a vendor's page, its line with a peak (``[]``: added), and when it was read,
    #: in a public copy or a transcript.
    url: str = ""
    quote: str = ""
    checked: str = ""

    @property
    def quality(self) -> str:
        """The confidence, and whether no line of a source is on record."""
        return self.confidence if self.url else f"{self.confidence}, unverified"

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
    return tuple(DevicePeaks(name, **row) for name, row in json.loads(text).items())


def lookup(device_name: str) -> DevicePeaks | None:
    """Return the table entry of a device by its name in torch: the first match, or None.

    Example:
        >>> lookup("NVIDIA A100-SXM4-40GB").bf16 / 1e12
        312.0
    """
    return next((peaks for peaks in table() if peaks.matches(device_name)), None)


def peak_flops(device_name: str, dtype: str, tf32: bool = False) -> float | None:
    """Return the FLOP/s of a device for matrix products of one dtype, or None if unknown.

    With ``tf32``, float32 products use TensorFloat-32 if the device supports it. Without it,
    ``"tf32"`` is float32.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-40GB", "float32", tf32=True) / 1e12
        156.0
    """
    peaks = lookup(device_name)
    return None if peaks is None else _of_dtype(asdict(peaks), dtype, tf32)


def _of_dtype(columns: Mapping[str, Any], dtype: str, tf32: bool) -> Any:
    """The value of a dtype; TensorFloat-32 counts as float32 if it is not supported."""
    column = COLUMNS.get(dtype, "")
    if column == "tf32" or (column == "fp32" and tf32):
        column = "tf32" if columns.get("tf32") else "fp32"
    return columns.get(column)


# Dense FLOPs per clock and multiprocessor by compute capability, from NVIDIA's architecture white
# papers. The other dtypes follow from the 16-bit rate.
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


def estimated_peak(properties: Any, dtype: str, tf32: bool = False) -> float | None:
    """Estimate the dense peak of an NVIDIA device in FLOP/s: multiprocessors x clock x rate.

    Returns None if its properties, as torch has them, lack a clock or have an unknown compute
    capability, or if that does not support the dtype.
    """
    capability = properties.major, properties.minor
    rates = dict(_RATES.get(capability, {}))
    full = rates.get("fp16", 0)
    halved = "GeForce" in properties.name and capability in _HALVED_ON_GEFORCE
    half = full // 2 if halved else full
    rates["fp16"] = half
    if capability >= (8, 0):
        rates |= {"bf16": half, "tf32": half // 2}
    if capability >= (8, 9):
        rates["fp8"] = 2 * half
    if capability >= (10, 0):
        rates["fp4"] = 4 * full
    clock_hz = 1e3 * getattr(properties, "clock_rate", 0)
    return (
        properties.multi_processor_count * clock_hz * (_of_dtype(rates, dtype, tf32) or 0) or None
    )


# Limits for the FLOP/s of one device.
_LEAST, _MOST = 1e9, 1e18


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of one device for one dtype."""

    #: FLOP/s.
    value: float
    #: ``given``, ``measured``, ``estimated: ...`` or ``table: ...``.
    source: str
    #: The clock in hertz at which it holds, if the table has it.
    clock: float | None = None


def check_peak(given: object, field: str = "peak_flops") -> None:
    """Raise ConfigError unless given is None, ``"measure"`` or plausible FLOP/s of one device."""
    if given is None or given == "measure":
        return
    number = given if is_number(given) else 0.0
    if not _LEAST <= number <= _MOST:
        # A small number is probably in TFLOP/s, as in data sheets.
        example = f"{number:g}e12" if _LEAST <= number * 1e12 <= _MOST else "312e12"
        problem = "is not the peak of one device, expected 'measure' or it in FLOP/s (not TFLOP/s)"
        raise ConfigError(field, given, problem, example)


def resolve_peak(
    device: torch.device, dtype_name: str, given: float | str | None = None, processes: int = 1
) -> Peak | None:
    """Return the peak of a device: the given one, else from the table, else an estimate.

    A CPU, a device that is not known, and any with ``given="measure"`` are measured; ``processes``
    measure at the same time. For float32 on CUDA the peak is that of TensorFloat-32 if it is
    enabled. None if the peak is unknown.
    """
    if given not in (None, "measure"):
        return Peak(float(given), "given")
    known = None if given or device.type == "cpu" else _known_peak(device, dtype_name)
    if known is not None:
        return known
    measured = measure_peak(device, dtype_name)
    if device.type == "cpu":
        # Measurements with these in common have one peak: the best of them.
        shared = f"{processes} processes of {torch.get_num_threads()} threads, {dtype_name}"
        setting = f"{device_name(device)}, {usable_cpus()} usable CPUs, {shared}"
        measured = best_peak(setting, measured)
    return None if measured is None else Peak(measured, "measured")


def _known_peak(device: torch.device, dtype_name: str) -> Peak | None:
    """The peak of a device from the table, or an estimate."""
    name = device_name(device)
    value, peaks = peak_flops(name, dtype_name, tf32=tf32_is_on()), lookup(name)
    if value is not None and peaks is not None:
        # Units other than those for matrices may run at another clock.
        matrix = dtype_name not in ("float64", "float32") or value == peaks.tf32
        clock = 1e6 * peaks.boost_mhz if peaks.boost_mhz and matrix else None
        return Peak(value, f"table: {peaks.name} ({peaks.quality})", clock)
    # torch calls AMD devices cuda too, but their units and capabilities differ.
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    value = estimated_peak(properties, dtype_name, tf32_is_on())
    return Peak(value, f"estimated: {properties.name}") if value else None


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of one batch on one rank."""

    tracked_operations: int = 0
    untracked_operations: int = 0
    #: Seconds at the device's peak, without and with recomputation; 0 if a peak is unknown.
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0
    #: Model FLOPs over all dtypes, and the peak FLOP/s for this mix of dtypes.
    total: float = 0.0
    peak: float = 0.0
    #: As `ideal_seconds`, without the pairs of attention that causal masks hide.
    causal_ideal_seconds: float = 0.0

    def times(self, runs: int) -> BatchCost:
        """The cost of several runs."""
        return BatchCost(
            self.tracked_operations * runs,
            self.untracked_operations * runs,
            self.ideal_seconds * runs,
            self.hardware_ideal_seconds * runs,
            self.total * runs,
            self.peak,
            self.causal_ideal_seconds * runs,
        )


_DTYPES = {"64": "float64", "32": "float32", "16": "float16", "bf16": "bfloat16"}
_FP8 = "float8_e4m3fn"


class PeakResolver:
    """The peaks of one device by dtype, each resolved once.

    ``precision`` is Lightning's name of the precision, such as ``bf16-mixed``.
    """

    def __init__(self, device: torch.device, precision: str, processes: int = 1) -> None:
        self._device, self._processes = device, processes
        self._mixed = precision.endswith("-mixed")
        base = precision.removesuffix("-mixed").removesuffix("-true")
        #: The dtype of the operands of matrix products, by the precision.
        self.dtype = _DTYPES.get(base, _FP8 if base.startswith("transformer-engine") else "float32")
        # The dtype of most of the work that was counted last.
        self._counted = self.dtype
        #: The peak that the user gave, and its argument; a CPU is measured.
        self._given: float | str | None = "measure" if device.type == "cpu" else None
        self._given_as = ""
        self._peaks: dict[str, Peak | None] = {}
        self._warned_above_peak = False

    def override(self, peak: float | str, name: str) -> None:
        """Use a peak given by the user: FLOP/s of one device, or ``"measure"``.

        Raises:
            ConfigError: If the peak is not valid or another argument gave a different one.
        """
        check_peak(peak, name)
        if self._given_as and self._given != peak:
            problem = f"contradicts {self._given_as}={self._given!r}, which is for the same device"
            raise ConfigError(name, peak, problem, repr(self._given))
        self._given, self._given_as = peak, name

    def get(self, dtype: str) -> Peak | None:
        """Return the peak for a dtype such as ``"bfloat16"``; if unknown, None and a warning."""
        if dtype in self._peaks:
            return self._peaks[dtype]
        self._peaks[dtype] = peak = resolve_peak(self._device, dtype, self._given, self._processes)
        if peak is None:
            warn(
                f"the peak of {self._device} for {dtype} could not be measured (unsupported dtype "
                "or busy machine). mfu is not reported. Set Flops(peak_flops=312e12), in FLOP/s of "
                "one device."
            )
        return peak

    def prepare(self) -> None:
        """Measure the peaks that need it, before any batch is timed.

        All ranks of a node measure at the same time and share its cores, as they do in training.
        """
        if self._given == "measure":
            # Autocast leaves some products in float32.
            for dtype in sorted({self.dtype, "float32"} if self._mixed else {self.dtype}):
                resolve_peak(self._device, dtype, "measure", self._processes)

    def cost_of(self, counts: Counts) -> BatchCost:
        """Return the cost of a batch on this device."""
        total = float(counts.model_flops)
        self._counted = max(counts.model, key=counts.model.__getitem__, default=self._counted)
        seconds = self._seconds(counts.model)
        peaks = {peak.value for dtype in counts.model if (peak := self.get(dtype))}
        return BatchCost(
            counts.tracked_operations,
            counts.untracked_operations,
            seconds,
            self._seconds(counts.hardware),
            total,
            # A single peak is kept exactly; several are averaged, weighted by their FLOPs.
            next(iter(peaks)) if len(peaks) == 1 else total / seconds if seconds else 0.0,
            max(seconds - self._seconds(counts.hidden), 0.0),
        )

    def warn_if_above_peak(self, mfu: float) -> None:
        """Warn once if the reported utilization is above 1: the peak must be wrong."""
        if mfu <= 1.0 or self._warned_above_peak:
            return
        self._warned_above_peak = True
        peak = self.get(self._counted)
        used = f"{peak.value:.3g} FLOP/s ({peak.source})" if peak else "unknown"
        warn(
            f"mfu is {mfu:.3g}, which is more than the hardware can do. The peak in use is wrong: "
            f"{used}. Set Flops(peak_flops=...), in FLOP/s of one device."
        )

    def clock(self) -> float | None:
        """The clock in hertz at which the peak of most of the work holds, if the table has it."""
        peak = self.get(self._counted)
        return None if peak is None else peak.clock

    def setup(self) -> dict[str, object]:
        """Return the peak, its source and clock for the parameters of the run; that of float32."""
        peak, found = self.get(self._counted), dict[str, object]()
        if peak is not None:
            found = {"peak_flops": peak.value, "peak_source": peak.source}
            if peak.clock is not None:
                found["peak_clock"] = peak.clock
        if self._mixed and self._given == "measure" and (single := self.get("float32")):
            found["float32_peak_flops"] = single.value  # measured, too: autocast leaves some in it
        return found

    def _seconds(self, flops: Mapping[str, float]) -> float:
        seconds = 0.0
        for dtype, count in flops.items():
            peak = self.get(dtype)
            if peak is None:
                return 0.0
            seconds += count / peak.value
        return seconds


def cuda_devices() -> tuple[str | None, list[str]]:
    """The CUDA or ROCm version that torch is built for, and the GPUs that it sees, by name."""
    build = torch.version.cuda or torch.version.hip
    numbers = range(torch.cuda.device_count())
    return build, [device_name(torch.device("cuda", number)) for number in numbers]


def device_name(device: torch.device | str) -> str:
    """Return the product name of a device, or its type if there is none."""
    device = torch.device(device)
    if device.type == "cpu":
        # Not read whole: it has some lines for each core.
        with suppress(OSError, StopIteration), Path("/proc/cpuinfo").open() as lines:
            named = (line for line in lines if line.startswith("model name"))
            return next(named).partition(":")[2].strip()
        return platform.processor() or "cpu"
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "get_device_name"):
        return str(backend.get_device_name(device))
    if device.type == "mps" and hasattr(torch.backends.mps, "get_name"):
        return str(torch.backends.mps.get_name())
    return device.type
