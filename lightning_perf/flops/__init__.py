"""How much work a model does, and how much a device can do. Uses torch, but not Lightning."""

from lightning_perf.flops.counter import FlopCounter
from lightning_perf.flops.formulas import TransformerConfig, check_formula, formula_for, palm
from lightning_perf.flops.measure import measure_peak
from lightning_perf.flops.peaks import check_peak, device_name, lookup, peak_flops, table
from lightning_perf.flops.shadow import count_on_shadow, is_compiled

__all__ = [
    "FlopCounter",
    "TransformerConfig",
    "check_formula",
    "check_peak",
    "count_on_shadow",
    "device_name",
    "formula_for",
    "is_compiled",
    "lookup",
    "measure_peak",
    "palm",
    "peak_flops",
    "table",
]
