"""How much work a model does, and how much a device can do. Uses torch, but not Lightning."""

from lightning_perf.flops.counter import FlopCounter
from lightning_perf.flops.formulas import TransformerConfig, formula_for, palm
from lightning_perf.flops.measure import measure_peak
from lightning_perf.flops.peaks import device_name, lookup, peak_flops, table
from lightning_perf.flops.shadow import count_on_shadow

__all__ = [
    "FlopCounter",
    "TransformerConfig",
    "count_on_shadow",
    "device_name",
    "formula_for",
    "lookup",
    "measure_peak",
    "palm",
    "peak_flops",
    "table",
]
