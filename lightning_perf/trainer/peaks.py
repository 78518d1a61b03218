"""Which peaks a run's work is held against, and what that makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, warn
from lightning_perf.flops import Counts, Peak, check_peak, measured_peak, resolve_peak
from lightning_perf.trainer.compat import precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import Trainer

_DTYPES = {"64": "float64", "32": "float32", "16": "float16", "bf16": "bfloat16"}
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What one batch costs one rank."""

    tracked_operations: int = 0
    untracked_operations: int = 0
    #: Seconds at the device's peak, without and with recomputation; 0 where a peak is not known.
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0
    #: Model FLOPs over all dtypes, and the peak FLOP/s for this mixture of them.
    total: float = 0.0
    peak: float = 0.0


class Peaks:
    """The peaks of this rank's device, each resolved once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._given: tuple[float | str, str] | None = None
        self._peaks: dict[str, Peak | None] = {}
        self._doubted = False

    def give(self, peak: float | str, name: str) -> None:
        """Take the user's word.

        Args:
            peak: FLOP/s of one device, or ``"measure"``.
            name: The argument that it came by.

        Raises:
            ConfigError: No peak can be so, or another callback was given another one.
        """
        check_peak(peak, name)
        if self._given is not None and self._given[0] != peak:
            other, where = self._given
            raise ConfigError(
                name, peak, f"is not what {where}={other!r} says of the same device", repr(other)
            )
        self._given = (peak, name)

    @property
    def dtype(self) -> str:
        """The dtype that the trainer's precision multiplies matrices in."""
        base = precision(self._trainer).removesuffix("-mixed").removesuffix("-true")
        return _DTYPES.get(base, _FP8 if base.startswith("transformer-engine") else "float32")

    def of(self, dtype: str) -> Peak | None:
        """The peak for products of a dtype, or None with one warning.

        Args:
            dtype: Such as ``"bfloat16"``.
        """
        if dtype not in self._peaks:
            device = self._trainer.strategy.root_device
            given = self._given[0] if self._given else None
            self._peaks[dtype] = resolve_peak(device, dtype, given)
            if self._peaks[dtype] is None:
                if self._is_measured:
                    problem = "could not be measured: no such product there, or a busy machine"
                    remedy = ""
                else:
                    problem, remedy = "is not known", ", or peak_flops='measure'"
                warn(
                    f"the peak of {device} in {dtype} {problem}. No mfu. Give it as "
                    f"Flops(peak_flops=312e12), in FLOP/s of one device{remedy}."
                )
        return self._peaks[dtype]

    def prepare(self) -> None:
        """Measure now what has to be measured: before anybody's clock runs, on all ranks at once.

        The ranks of a node then share its cores as they do in training.
        """
        if not self._is_measured:
            return
        # Autocast leaves some products in float32.
        dtypes = {self.dtype, "float32"} if self._is_mixed else {self.dtype}
        for dtype in sorted(dtypes):
            measured_peak(self._trainer.strategy.root_device, dtype)

    @property
    def _is_measured(self) -> bool:
        given = self._given[0] if self._given else None
        on_cpu = self._trainer.strategy.root_device.type == "cpu"
        return given == "measure" or (given is None and on_cpu)

    @property
    def _is_mixed(self) -> bool:
        return precision(self._trainer).endswith("-mixed")

    def priced(self, counts: Counts) -> BatchWork:
        """What a batch's FLOPs mean on this device."""
        total = float(sum(counts.model.values()))
        seconds = self._seconds(counts.model)
        peaks = {peak.value for dtype in counts.model if (peak := self.of(dtype))}
        return BatchWork(
            counts.tracked_operations,
            counts.untracked_operations,
            seconds,
            self._seconds(counts.hardware),
            total,
            # One peak stays the number that it is; several are averaged by their FLOPs.
            next(iter(peaks)) if len(peaks) == 1 else total / seconds if seconds else 0.0,
        )

    def doubt(self, mfu: float) -> None:
        """Flag a utilization that cannot be, once.

        Args:
            mfu: As reported; above 1, the peak is wrong.
        """
        if mfu <= 1.0 or self._doubted:
            return
        self._doubted = True
        peak = self.of(self.dtype)
        told = f"{peak.value:.3g} FLOP/s ({peak.source})" if peak else "unknown"
        warn(
            f"mfu is {mfu:.3g}, more than the hardware can do, so the peak is wrong: {told}. "
            "Give it as Flops(peak_flops=...), in FLOP/s of one device."
        )

    def setup(self) -> dict[str, object]:
        """The peak that is held against, for the run's params."""
        peak = self.of(self.dtype)
        return {"peak_flops": peak.value, "peak_source": peak.source} if peak else {}

    def _seconds(self, flops: Mapping[str, float]) -> float:
        peaks = {dtype: self.of(dtype) for dtype in flops}
        if any(peak is None for peak in peaks.values()):
            return 0.0
        return sum(flops[dtype] / peak.value for dtype, peak in peaks.items() if peak)
