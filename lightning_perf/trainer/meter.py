"""The FLOPs of each batch and the time they would take at the device's peak."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import ConfigError, warn
from lightning_perf.flops import (
    Counts,
    FlopCounter,
    Peak,
    check_peak,
    is_compiled,
    resolve_peak,
    signature,
)
from lightning_perf.trainer.compat import precision

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from lightning.pytorch import LightningModule, Trainer

_COUNTED = ("training_step", "backward")
#: Batches that are counted without finding anything, before it is given up.
_MOST_IN_VAIN = 16
_DTYPES = {
    "64": "float64",
    "32": "float32",
    "16": "float16",
    "bf16": "bfloat16",
    "transformer-engine": "float8_e4m3fn",
}


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What one batch costs one rank."""

    #: Model FLOPs by the dtype of the products: forward and backward, without recomputation.
    flops: Mapping[str, float] = field(default_factory=dict)
    #: The same with the recomputation of activation checkpointing.
    hardware_flops: Mapping[str, float] = field(default_factory=dict)
    tracked_operations: int = 0
    untracked_operations: int = 0
    #: Seconds at the device's peak; 0 where a peak is not known.
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0

    #: Model FLOPs over all dtypes, and the peak FLOP/s for this mixture of them.
    total: float = 0.0
    peak: float = 0.0


class FlopMeter:
    """Knows the FLOPs of a batch: by the module's own ``flops_per_batch``, else by counting it.

    Each new signature of input shapes is counted once, on the real batch, while it trains; again
    when layers are frozen or thawed between epochs.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._given: tuple[float | str, str] | None = None
        self._peaks: dict[str, Peak | None] = {}
        self._known: dict[Hashable, BatchWork] = {}
        self._by_state: dict[Hashable, dict[Hashable, BatchWork]] = {}
        self._counter: FlopCounter | None = None
        self._restore: list[Callable[[], None]] = []
        self._declared = False
        self._state: Hashable = None
        self._stale = True
        self._backward_seen = False
        self._in_vain = 0
        self._doubted = False
        self.wanted = False
        #: The present batch: its work, and whether it was slowed down by being counted.
        self.work: BatchWork | None = None
        self.counted = False

    def require(self, peak: float | str | None, name: str) -> None:
        """Ask for FLOPs, and perhaps give the peak to judge them by.

        Args:
            peak: FLOP/s of one device, ``"measure"``, or None to find out.
            name: The argument that it came by.

        Raises:
            ConfigError: No peak can be so, or another callback was given another one.
        """
        self.wanted = True
        if peak is None:
            return
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
        word = precision(self._trainer)
        base = word.removesuffix("-mixed").removesuffix("-true")
        return _DTYPES.get(base, "float8_e4m3fn" if base.startswith("transformer") else "float32")

    def start(self) -> None:
        """Settle where FLOPs come from and what the peak is, before training is timed."""
        if not self.wanted:
            return
        self._declared = getattr(self._module, "flops_per_batch", None) is not None
        if not self._declared and is_compiled(self._module):
            self.wanted = False
            warn(
                "a compiled module is not counted yet, since its kernels hide their operators: no "
                "FLOPs and no mfu. Define flops_per_batch on the LightningModule to have them."
            )
            return
        self.peak(self.dtype)

    def setup(self) -> dict[str, object]:
        """The peak that is held against, for the run's params."""
        peak = self.peak(self.dtype) if self.wanted else None
        return {"peak_flops": peak.value, "peak_source": peak.source} if peak else {}

    def peak(self, dtype: str) -> Peak | None:
        """The peak of this rank's device, resolved once a dtype.

        Args:
            dtype: Such as ``"bfloat16"``.
        """
        if dtype not in self._peaks:
            given = self._given[0] if self._given else None
            found = resolve_peak(self._trainer.strategy.root_device, dtype, given)
            self._peaks[dtype] = found
            if found is None:
                warn(
                    f"the peak of {self._trainer.strategy.root_device} in {dtype} is not known: no "
                    "mfu. Give it as Flops(peak_flops=...) in FLOP/s, or peak_flops='measure'."
                )
        return self._peaks[dtype]

    def refresh(self) -> None:
        """An epoch has ended: what is frozen may be another part of the model from now on."""
        self._stale = True

    def before_batch(self, batch: Any) -> None:
        """Look the batch up by its shapes, and count it if they are new."""
        self.counted = False
        self.work = None
        if not self.wanted or self._declared:
            return
        if self._stale:
            self._stale = False
            self._state = tuple(each.requires_grad for each in self._module.parameters())
            self._known = self._by_state.setdefault(self._state, {})
        self._signature = signature(batch)
        self.work = self._known.get(self._signature)
        if self.work is None:
            self._arm()

    def after_batch(self, batch: Any) -> None:
        """Know the work of the batch that has just ended."""
        if self._counter is not None:
            counts, self.counted = self._counter.counts, True
            self.disarm()
            self._learn(counts)
        elif self._declared and self.wanted:
            self.work = self._declared_work(batch)

    def _learn(self, counts: Counts) -> None:
        # A step that was skipped has no FLOPs, or none of a backward: the next one is counted.
        whole = self._backward_seen or not self._module.automatic_optimization
        if whole and counts.model_flops:
            self.work = self._known[self._signature] = self._priced(counts)
            return
        self._in_vain += 1
        if self._in_vain == _MOST_IN_VAIN:
            self.wanted = False
            warn(
                f"no FLOPs were found in {_MOST_IN_VAIN} batches: no mfu. Define flops_per_batch "
                "on the LightningModule to have it."
            )

    def doubt(self, mfu: float) -> None:
        """Flag a utilization that cannot be.

        Args:
            mfu: As reported; above 1, the peak is wrong.
        """
        if mfu <= 1.0 or self._doubted:
            return
        self._doubted = True
        peak = self.peak(self.dtype)
        told = f"{peak.value:.3g} FLOP/s ({peak.source})" if peak else "unknown"
        warn(
            f"mfu is {mfu:.3g}, more than the hardware can do, so the peak is wrong: {told}. "
            "Give it as Flops(peak_flops=...), in FLOP/s of one device."
        )

    def disarm(self) -> None:
        """Take the wraps off, whatever happened."""
        self._counter = None
        while self._restore:
            self._restore.pop()()

    def _arm(self) -> None:
        self._counter, self._backward_seen = FlopCounter(), False
        for name in _COUNTED:
            self._wrap(name, self._counter)

    def _wrap(self, name: str, counter: FlopCounter) -> None:
        strategy = self._trainer.strategy
        before = vars(strategy).get(name)
        original = getattr(strategy, name)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._backward_seen |= name == "backward"
            with counter:
                return original(*args, **kwargs)

        def restore() -> None:
            if before is None:
                vars(strategy).pop(name, None)
            else:
                setattr(strategy, name, before)

        setattr(strategy, name, counted)
        self._restore.append(restore)

    def _declared_work(self, batch: Any) -> BatchWork | None:
        try:
            value: Any = self._module.flops_per_batch
            flops = float(value(batch) if callable(value) else value)
            if not (math.isfinite(flops) and flops > 0):
                raise ValueError(f"{flops!r} is no number of FLOPs")
        except Exception as error:
            self.wanted = False
            warn(
                f"flops_per_batch failed ({type(error).__name__}: {error}): no FLOPs and no mfu. "
                "It is a number, or takes the batch and returns one: the FLOPs of this rank's "
                "batch, forward and backward."
            )
            return None
        each = {self.dtype: round(flops)}
        return self._priced(Counts(model=each, hardware=each))

    def _priced(self, counts: Counts) -> BatchWork:
        total = float(sum(counts.model.values()))
        seconds = self._seconds_at_peak(counts.model)
        peaks = {peak.value for dtype in counts.model if (peak := self.peak(dtype))}
        return BatchWork(
            dict(counts.model),
            dict(counts.hardware),
            counts.tracked_operations,
            counts.untracked_operations,
            seconds,
            self._seconds_at_peak(counts.hardware),
            total,
            # One peak stays the number that it is; several are averaged by their FLOPs.
            next(iter(peaks)) if len(peaks) == 1 else total / seconds if seconds else 0.0,
        )

    def _seconds_at_peak(self, flops: Mapping[str, float]) -> float:
        peaks = {dtype: self.peak(dtype) for dtype in flops}
        if any(peak is None for peak in peaks.values()):
            return 0.0
        return sum(flops[dtype] / peak.value for dtype, peak in peaks.items() if peak)
