"""The FLOPs of each batch: declared by the module, or counted while it is worked on."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import ConfigError, warn
from lightning_perf.flops import (
    Counts,
    FlopCounter,
    FlopModel,
    Peak,
    ShadowError,
    Signature,
    check_peak,
    count_on_shadow,
    fit,
    is_compiled,
    measured_peak,
    resolve_peak,
    signature,
)
from lightning_perf.run.compat import precision
from lightning_perf.run.step_hooks import STEPS, StepHooks

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from lightning.pytorch import LightningModule, Trainer


_DTYPES = {"64": "float64", "32": "float32", "16": "float16", "bf16": "bfloat16"}
_FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What one batch costs one rank."""

    tracked_operations: int = 0
    untracked_operations: int = 0
    #: Seconds at the device's peak, without and with recomputation; 0 where a peak is not known.
    ideal_seconds: float = 0.0
    hardware_ideal_seconds: float = 0.0
    #: Model FLOPs over all dtypes, and the peak FLOP/s for this mixture of them.
    total: float = 0.0
    peak: float = 0.0


class PeakResolver:
    """The peaks of this rank's device, each resolved once."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._given: tuple[float | str, str] | None = None
        self._peaks: dict[str, Peak | None] = {}
        self._warned_above_peak = False

    def override(self, peak: float | str, name: str) -> None:
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

    def get(self, dtype: str) -> Peak | None:
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

    def cost_of(self, counts: Counts) -> BatchCost:
        """What a batch's FLOPs mean on this device."""
        total = float(sum(counts.model.values()))
        seconds = self._seconds(counts.model)
        peaks = {peak.value for dtype in counts.model if (peak := self.get(dtype))}
        return BatchCost(
            counts.tracked_operations,
            counts.untracked_operations,
            seconds,
            self._seconds(counts.hardware),
            total,
            # One peak stays the number that it is; several are averaged by their FLOPs.
            next(iter(peaks)) if len(peaks) == 1 else total / seconds if seconds else 0.0,
        )

    def warn_if_above_peak(self, mfu: float) -> None:
        """Flag a utilization that cannot be, once.

        Args:
            mfu: As reported; above 1, the peak is wrong.
        """
        if mfu <= 1.0 or self._warned_above_peak:
            return
        self._warned_above_peak = True
        peak = self.get(self.dtype)
        told = f"{peak.value:.3g} FLOP/s ({peak.source})" if peak else "unknown"
        warn(
            f"mfu is {mfu:.3g}, more than the hardware can do, so the peak is wrong: {told}. "
            "Give it as Flops(peak_flops=...), in FLOP/s of one device."
        )

    def setup(self) -> dict[str, object]:
        """The peak that is held against, for the run's params."""
        peak = self.get(self.dtype)
        return {"peak_flops": peak.value, "peak_source": peak.source} if peak else {}

    def _seconds(self, flops: Mapping[str, float]) -> float:
        peaks = {dtype: self.get(dtype) for dtype in flops}
        if any(peak is None for peak in peaks.values()):
            return 0.0
        return sum(flops[dtype] / peak.value for dtype, peak in peaks.items() if peak)


#: Shapes that are counted before the others are predicted from them; and at the very most.
_ENOUGH, MOST_COUNTED = 16, 64
#: Predictions that are remembered.
_MOST_KNOWN = 4096


@dataclass(slots=True)
class FlopCache:
    """What is known of one stage, with one part of the model frozen."""

    #: Batches that may still be counted without finding anything, before it is given up.
    tries: int
    counts: dict[Signature, Counts] = field(default_factory=dict)
    costs_by_signature: dict[Signature, BatchCost] = field(default_factory=dict)
    predictor: FlopModel | None = None
    #: How many shapes were known when a law was last looked for.
    fitted_at: int = 0

    def predict(self, shapes: Signature) -> Counts | None:
        """The counts of shapes that were not counted, once there are enough that were."""
        if len(self.counts) < _ENOUGH:
            return None
        # Shapes that a law does not explain are counted, and may tell a wider one.
        if len(self.counts) >= 2 * self.fitted_at:
            self.fitted_at = len(self.counts)
            self.predictor = fit(self.counts)
        return self.predictor.predict(shapes) if self.predictor is not None else None

    def remember(self, shapes: Signature, work: BatchCost) -> None:
        """Know the work of shapes from now on, within bounds."""
        if len(self.costs_by_signature) >= _MOST_KNOWN:
            self.costs_by_signature.clear()
        self.costs_by_signature[shapes] = work


_CONTEXTS = {
    "train": "train_step_context",
    "validate": "val_step_context",
    "test": "test_step_context",
    "predict": "predict_step_context",
}
#: A training may skip some batches at first; another stage may have no products at all.
_TRIES = {"train": 8, "validate": 1, "test": 1, "predict": 1}


class FlopMeter:
    """Knows the FLOPs of a batch: by the module's own ``flops_per_batch``, else by counting it.

    Each new signature of input shapes is counted once, on the real batch, as it is worked on (a
    compiled module on a fake copy, so that it stays compiled); again when layers are frozen or
    thawed between epochs. Where shapes keep coming, what they cost is predicted from those that
    were counted. A batch that cannot be looked into has a new signature each time.
    ``flops_per_batch`` speaks of training: other stages are counted.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self.peaks = PeakResolver(trainer)
        self.wanted = False
        #: The present batch: its work, and whether it was slowed down by being counted.
        self.work: BatchCost | None = None
        self.counted = False
        #: Operators that do work which no formula knows.
        self.untracked: set[str] = set()
        self._stage = ""
        self._declared = self._compiled = False
        #: What the module declared last, and what that costs.
        self._declared_flops: float | None = None
        self._declared_cost: BatchCost | None = None
        self._caches: dict[Hashable, FlopCache] = {}
        self._cache = FlopCache(tries=0)
        self._stale = True
        self._signature: Signature = ()
        self._warned_unpredictable = False
        self._steps = StepHooks(trainer.strategy, self._on_step)
        #: Whether the present batch was looked at, and what went wrong then.
        self._begun = False
        self._error: Exception | None = None

    def require(self, peak: float | str | None, name: str) -> None:
        """Ask for FLOPs, and perhaps give the peak to judge them by.

        Args:
            peak: FLOP/s of one device, ``"measure"``, or None to find out.
            name: The argument that it came by.

        Raises:
            ConfigError: No peak can be so, or another callback was given another one.
        """
        self.wanted = True
        if peak is not None:
            self.peaks.override(peak, name)
        self.peaks.prepare()

    def start(self, stage: str) -> None:
        """Settle where FLOPs come from and what the peak is, before anything is timed.

        Args:
            stage: The one that begins.
        """
        if not self.wanted:
            return
        self._stage, self._stale = stage, True
        self.work, self.counted, self._begun = None, False, False
        self._declared = getattr(self._module, "flops_per_batch", None) is not None
        self._declared_flops = None
        self._compiled = is_compiled(self._module)
        if not (self._declared and stage == "train"):
            self._steps.watch(stage)
        self.peaks.get(self.peaks.dtype)

    def resume(self, stage: str) -> None:
        """A stage goes on, or a new epoch of it: what is frozen may be another part by now.

        Args:
            stage: The stage.
        """
        self._stage, self._stale = stage, True
        self.work, self.counted, self._begun = None, False, False

    def close(self) -> None:
        """Know of no batch any more, whatever happened."""
        self._stage = ""
        self._steps.leave()

    def _on_step(self, stage: str, batch: Any) -> None:
        # Lightning's sanity check has steps, but is no stage.
        if self._begun or stage != self._stage:
            return
        self._begun, self.counted, self.work = True, False, None
        try:
            self._look_up(batch)
        except Exception as error:  # training is on the stack: raised after it
            self._error = error

    def _look_up(self, batch: Any) -> None:
        """Know the batch by its shapes, and count it if they are new."""
        if self._stale:
            self._stale = False
            frozen = tuple(each.requires_grad for each in self._module.parameters())
            key = self._stage, frozen
            self._cache = self._caches.setdefault(key, FlopCache(_TRIES[self._stage]))
        self._signature = signature(batch)
        self.work = self._cache.costs_by_signature.get(self._signature)
        if self.work is None:
            self._find_out(batch)

    def _find_out(self, batch: Any) -> None:
        """Shapes that are new: predict what they cost, or count them."""
        cache = self._cache
        predicted = cache.predict(self._signature)
        if predicted is not None:
            self.work = self.peaks.cost_of(predicted)
            cache.remember(self._signature, self.work)
        elif len(cache.counts) >= MOST_COUNTED:
            self._warn_unpredictable()
        elif cache.tries and self._compiled:
            self._count_on_shadow(batch)
        elif cache.tries:
            self._steps.count(FlopCounter())

    def _warn_unpredictable(self) -> None:
        if not self._warned_unpredictable:
            self._warned_unpredictable = True
            warn(
                f"{MOST_COUNTED} shapes of batches were counted, and no law tells the FLOPs of "
                "others: batches of new shapes have none, and windows with them no mfu. Define "
                "flops_per_batch on the LightningModule to have it."
            )

    def _count_on_shadow(self, batch: Any) -> None:
        """A compiled module's kernels hide their operators: count a fake copy of it, as written."""
        self.counted = True
        try:
            counts = count_on_shadow(self._module, batch, self._step)
        except ShadowError as error:
            self._cache.tries = 0
            if not self._warned_unpredictable:
                self._warned_unpredictable = True
                warn(
                    f"this compiled module cannot be counted ({error}): no FLOPs and no mfu. "
                    "Define flops_per_batch on the LightningModule to have them."
                )
            return
        self._learn(counts, whole=True)

    def _step(self, module: Any, batch: Any) -> Any:
        """The stage's step of a module, in the context that the strategy gives it."""
        step, context = getattr(module, STEPS[self._stage]), _CONTEXTS[self._stage]
        wanted = len(inspect.signature(step).parameters)
        with getattr(self._trainer.precision_plugin, context)():
            return step(*(batch, 0, 0)[:wanted])

    def after_batch(self, batch: Any) -> None:
        """Know the work of the batch that has just ended."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._begun:  # it was skipped
            self.work, self.counted = None, False
        self._begun = False
        if self._steps.counter is not None:
            counts, self.counted = self._steps.counter.counts, True
            self._steps.stop_counting()
            self._learn(counts, whole=self._steps.backward_seen)
        elif self._declared and self._stage == "train":
            self.work = self._look_up_declared(batch)

    def _learn(self, counts: Counts, whole: bool) -> None:
        # A step that was skipped has no FLOPs, or none of a backward: the next one is counted.
        skipped = self._stage == "train" and self._module.automatic_optimization and not whole
        if counts.model_flops and not skipped:
            self.untracked |= counts.untracked_names.keys()
            self.work = self.peaks.cost_of(counts)
            self._cache.counts[self._signature] = counts
            self._cache.remember(self._signature, self.work)
            return
        self._cache.tries -= 1
        if not self._cache.tries and self._stage == "train":
            warn(
                "no FLOPs were found in the first batches: no mfu. Define flops_per_batch on the "
                "LightningModule to have it."
            )

    def _look_up_declared(self, batch: Any) -> BatchCost | None:
        try:
            value: Any = self._module.flops_per_batch
            if callable(value):
                value = value(batch)
            if type(value) in (int, float) and value == self._declared_flops:
                return self._declared_cost
            flops = float(value)
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
        each = {self.peaks.dtype: round(flops)}
        self._declared_flops = flops
        self._declared_cost = self.peaks.cost_of(Counts(model=each, hardware=each))
        return self._declared_cost
