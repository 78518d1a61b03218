"""The cost of a batch: its FLOPs held against the device's peak, and a cache of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, warn
from lightning_perf.flops.fit import FlopModel, fit
from lightning_perf.flops.measure import measure_peak
from lightning_perf.flops.peaks import Peak, check_peak, resolve_peak

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from lightning_perf.flops.counter import Counts
    from lightning_perf.flops.signature import Signature


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What one batch costs one rank."""

    tracked_operations: int = 0
    untracked_operations: int = 0
    #: Seconds at the device's peak, without and with recomputation; 0 if a peak is unknown.
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0
    #: Model FLOPs over all dtypes, and the peak FLOP/s for this mix of dtypes.
    total: float = 0.0
    peak: float = 0.0


_DTYPES = {"64": "float64", "32": "float32", "16": "float16", "bf16": "bfloat16"}
_FP8 = "float8_e4m3fn"


class PeakResolver:
    """The peaks of one device by dtype, each resolved once.

    ``precision`` is Lightning's name of the precision, such as ``bf16-mixed``.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        self._device = device
        self._mixed = precision.endswith("-mixed")
        base = precision.removesuffix("-mixed").removesuffix("-true")
        #: The dtype of the operands of matrix products.
        self.dtype = _DTYPES.get(base, _FP8 if base.startswith("transformer-engine") else "float32")
        self._given: float | str | None = None
        self._given_as = ""
        self._peaks: dict[str, Peak | None] = {}
        self._warned_above_peak = False

    def override(self, peak: float | str, name: str) -> None:
        """Use a peak given by the user: FLOP/s of one device, or ``"measure"``.

        Raises:
            ConfigError: If the peak is not valid or another argument gave a different one.
        """
        check_peak(peak, name)
        if self._given is not None and self._given != peak:
            problem = f"contradicts {self._given_as}={self._given!r}, which is for the same device"
            raise ConfigError(name, peak, problem, repr(self._given))
        self._given, self._given_as = peak, name

    def get(self, dtype: str) -> Peak | None:
        """Return the peak for a dtype such as ``"bfloat16"``; if unknown, None and a warning."""
        if dtype in self._peaks:
            return self._peaks[dtype]
        self._peaks[dtype] = peak = resolve_peak(self._device, dtype, self._given)
        if peak is None:
            problem, remedy = "is unknown", ", or use peak_flops='measure'"
            if self._is_measured:
                problem, remedy = "could not be measured (unsupported dtype or busy machine)", ""
            warn(
                f"the peak of {self._device} for {dtype} {problem}. mfu is not reported. Set "
                f"Flops(peak_flops=312e12), in FLOP/s of one device{remedy}."
            )
        return peak

    def prepare(self) -> None:
        """Measure the peaks that need it, before any batch is timed.

        All ranks of a node measure at the same time and share its cores, as they do in training.
        """
        if self._is_measured:
            # Autocast leaves some products in float32.
            for dtype in sorted({self.dtype, "float32"} if self._mixed else {self.dtype}):
                measure_peak(self._device, dtype)

    @property
    def _is_measured(self) -> bool:
        return self._given == "measure" or (self._given is None and self._device.type == "cpu")

    def cost_of(self, counts: Counts) -> BatchCost:
        """Return the cost of a batch on this device."""
        total = float(counts.model_flops)
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
        )

    def warn_if_above_peak(self, mfu: float) -> None:
        """Warn once if the reported utilization is above 1: the peak must be wrong."""
        if mfu <= 1.0 or self._warned_above_peak:
            return
        self._warned_above_peak = True
        peak = self.get(self.dtype)
        used = f"{peak.value:.3g} FLOP/s ({peak.source})" if peak else "unknown"
        warn(
            f"mfu is {mfu:.3g}, which is more than the hardware can do. The peak in use is wrong: "
            f"{used}. Set Flops(peak_flops=...), in FLOP/s of one device."
        )

    def setup(self) -> dict[str, object]:
        """Return the peak and its source for the parameters of the run."""
        peak = self.get(self.dtype)
        return {"peak_flops": peak.value, "peak_source": peak.source} if peak else {}

    def _seconds(self, flops: Mapping[str, float]) -> float:
        seconds = 0.0
        for dtype, count in flops.items():
            peak = self.get(dtype)
            if peak is None:
                return 0.0
            seconds += count / peak.value
        return seconds


#: Shapes that are counted before others are predicted, and at most.
_MIN_COUNTED, MOST_COUNTED = 16, 64
#: Costs that are cached at most.
_MOST_COSTS = 4096


@dataclass(slots=True)
class FlopCache:
    """FLOPs and costs by batch signature, for one stage and set of trainable parameters."""

    #: Batches without FLOPs that are still counted before counting is given up.
    tries: int
    counts: dict[Signature, Counts] = field(default_factory=dict)
    costs: dict[Signature, BatchCost] = field(default_factory=dict)
    predictor: FlopModel | None = None
    #: Size of ``counts`` at the last fit.
    fitted_at: int = 0

    def predict(self, signature: Signature) -> Counts | None:
        """Return the predicted FLOPs of a new signature, or None if it must be counted."""
        if len(self.counts) < _MIN_COUNTED:
            return None
        # Signatures that the predictor does not cover are counted, and extend the next fit.
        if len(self.counts) >= 2 * self.fitted_at:
            self.fitted_at = len(self.counts)
            self.predictor = fit(self.counts)
        return self.predictor.predict(signature) if self.predictor is not None else None

    def store(self, signature: Signature, cost: BatchCost) -> None:
        """Cache the cost of a signature."""
        if len(self.costs) >= _MOST_COSTS:
            self.costs.clear()
        self.costs[signature] = cost
