"""How much work a model does, and how much a device can do. Uses torch, but not Lightning."""

from lightning_perf.flops.counter import FlopCounter
from lightning_perf.flops.formulas import TransformerConfig, check_formula, formula_for, palm
from lightning_perf.flops.measure import (
    kept_file,
    kept_peaks,
    measure_peak,
    trusted_peak,
)
from lightning_perf.flops.operators import tf32_is_on
from lightning_perf.flops.peaks import (
    DevicePeaks,
    check_peak,
    cuda_devices,
    device_name,
    lookup,
    peak_flops,
    table,
)
from lightning_perf.flops.shadow import count_on_shadow, is_compiled

__all__ = [
    "DevicePeaks",
    "FlopCounter",
    "TransformerConfig",
    "check_formula",
    "check_peak",
    "count_on_shadow",
    "cuda_devices",
    "device_name",
    "formula_for",
    "is_compiled",
    "kept_file",
    "kept_peaks",
    "lookup",
    "measure_peak",
    "palm",
    "peak_flops",
    "table",
    "tf32_is_on",
    "trusted_peak",
]
