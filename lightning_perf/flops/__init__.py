"""How much work a model does, and how much a device could do.

Only torch is needed here: no trainer and no tracking server is known.
"""

from lightning_perf.flops.counter import Counts, FlopCounter
from lightning_perf.flops.devices import DevicePeaks, lookup, peak_flops, table
from lightning_perf.flops.fit import FlopModel, fit
from lightning_perf.flops.formulas import TransformerConfig, formula_for, megatron, nanogpt, palm
from lightning_perf.flops.measure import measure_peak
from lightning_perf.flops.peak import (
    Peak,
    check_peak,
    device_name,
    estimate_from_properties,
    measured_peak,
    resolve_peak,
    tf32_is_on,
)
from lightning_perf.flops.shadow import ShadowError, count_on_shadow, is_compiled
from lightning_perf.flops.signature import Signature, numel, signature

__all__ = [
    "Counts",
    "DevicePeaks",
    "FlopCounter",
    "FlopModel",
    "Peak",
    "ShadowError",
    "Signature",
    "TransformerConfig",
    "check_peak",
    "count_on_shadow",
    "device_name",
    "estimate_from_properties",
    "fit",
    "formula_for",
    "is_compiled",
    "lookup",
    "measure_peak",
    "measured_peak",
    "megatron",
    "nanogpt",
    "numel",
    "palm",
    "peak_flops",
    "resolve_peak",
    "signature",
    "table",
    "tf32_is_on",
]
