"""The FLOPs of each batch: declared by the module, or counted while the batch runs."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn
from lightning_perf.flops.counter import Counts, FlopCounter
from lightning_perf.flops.peaks import BatchCost as BatchCost
from lightning_perf.flops.peaks import PeakResolver
from lightning_perf.flops.shadow import ShadowError, count_on_shadow, is_compiled
from lightning_perf.flops.shapes import MOST_COUNTED, FlopCache, Signature, signature
from lightning_perf.patches import MethodPatch, PatchSet
from lightning_perf.timing.clock import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer

#: The strategy's method that processes a batch, by stage.
_STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
_CONTEXTS = {
    "train": "train_step_context",
    "validate": "val_step_context",
    "test": "test_step_context",
    "predict": "predict_step_context",
}
#: The first training batches may be skipped; other stages may have no products at all.
_TRIES = {"train": 8, "validate": 1, "test": 1, "predict": 1}
#: Batches of known shapes before some are counted again. With manual optimization one batch often
#: trains another network than the next one; with automatic optimization short runs have one count.
_RECOUNT = {False: 0, True: 16}
#: Batches of known shapes in a row, after which a batch is only looked up at its end, because to
#: announce each step takes a third of the time of all that we do per batch.
_SETTLED = 64
_DEFINE = "Define flops_per_batch on the LightningModule to report it."


class FlopMeter:
    """Determines the FLOPs of each batch.

    The module's ``flops_per_batch`` takes precedence in training. Otherwise each new signature of
    input shapes is counted on the real batch while it runs; a compiled module is counted on a fake
    copy, so that it stays compiled. Some batches of known signatures are counted again, because
    those of a model with random structure differ. Counting is repeated when layers are frozen or
    unfrozen between epochs. After enough signatures, the FLOPs of new ones are predicted. After
    ``_SETTLED`` batches of known signatures, the meter is settled: a new signature is counted when
    it comes again.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self.peaks = PeakResolver(trainer.strategy.root_device, str(trainer.precision))
        self.wanted = False
        #: How many ranks train on each batch, whose declared FLOPs they share.
        self.sharing = 1
        #: Cost of the current batch, and whether counting slowed it down.
        self.work: BatchCost | None = None
        self.counted = False
        #: Names of operators whose FLOPs are unknown.
        self.untracked: set[str] = set()
        #: Whether the run's context has reported them.
        self.untracked_reported = False
        self._stage = ""
        self._declares = self._compiled = False
        #: Whether the module declares the FLOPs of this stage's batches.
        self.declared = False
        #: The last declared value and its cost.
        self._declared_flops: float | None = None
        self._declared_cost: BatchCost | None = None
        self._caches: dict[Hashable, FlopCache] = {}
        #: The costs of this stage's signatures; None until its next step.
        self._cache: FlopCache | None = None
        self._signature: Signature = ()
        #: Whether steps are not announced (any more): the cost of a batch follows from its shapes.
        self.settled = False
        # Batches of known signatures so far, and signatures that came too late to be counted.
        self._known = 0
        self._missed: set[Signature] = set()
        self._warned_unpredictable = False
        #: Counts the FLOPs of the current batch, if they are not known.
        self.counter: FlopCounter | None = None
        # Whether a backward ran under the counter.
        self._backward_seen = False
        # Patches of each step, and patches during a counted batch.
        self._steps, self._counting = PatchSet(), PatchSet()
        #: Whether the step of the current batch has started.
        self._begun = False

    def require(self, peak: float | str | None, name: str) -> None:
        """Request FLOPs, optionally with the device's peak, which an argument ``name`` gave.

        ConfigError if the peak is not valid or contradicts another callback's.
        """
        self.wanted = True
        if peak is not None:
            self.peaks.override(peak, name)
        self.peaks.prepare()

    def start(self, stage: str) -> None:
        """Prepare for a stage and resolve the peak, before any batch is timed."""
        if not self.wanted:
            return
        self._declares = getattr(self._module, "flops_per_batch", None) is not None
        self._declared_flops = None
        self._compiled = is_compiled(self._module)
        self.resume(stage)
        self.peaks.get(self.peaks.dtype)

    def resume(self, stage: str) -> None:
        """Continue a stage or start its next epoch: frozen parameters may have changed."""
        self._stage, self._cache = stage, None
        self.work, self.counted, self._begun, self.settled = None, False, False, False
        self.declared = stage == "train" and self._declares
        if self.declared:
            self.settled = True
        elif stage and self.wanted:
            self._announce()

    def _announce(self) -> None:
        """Receive each step of the stage before it starts."""
        self._known, self.settled = 0, False
        step = partial(_Step, stage=self._stage, meter=self)
        self._steps.wrap(self._trainer.strategy, _STEPS[self._stage], step)

    def close(self) -> None:
        """Stop counting and restore the strategy."""
        self._stage = ""
        self._stop_counting()
        self._steps.restore()

    def on_step(self, stage: str, batch: Any) -> None:
        """A step starts; a batch has several if its step has several closures. Never raises."""
        # Sanity-check validation runs steps too, but is not a stage.
        if self._begun or stage != self._stage:
            return
        self._begun, self.counted = True, False
        self._look_up(batch)

    def _look_up(self, batch: Any) -> None:
        """Find the cost of a batch that starts, or of one that ended without an announcement."""
        self.work = None
        try:
            if self._cache is None:
                trainable = tuple(each.requires_grad for each in self._module.parameters())
                recounts = self._stage == "train" and not self._compiled  # a shadow stays the same
                automatic = self._module.automatic_optimization
                cache = FlopCache(_TRIES[self._stage], _RECOUNT[automatic] if recounts else None)
                self._cache = self._caches.setdefault((self._stage, trainable), cache)
            self._signature = signature(batch)
            self.work = self._cache.cost(self._signature)
            if self.work is None:
                self._find_cost(self._cache, batch)
        except Exception as error:
            self.wanted = self.settled = self.counted = False
            warn(
                f"FLOPs are no longer counted ({describe(error)}): mfu is not reported. {_DEFINE} "
                "Please report this."
            )

    def _find_cost(self, cache: FlopCache, batch: Any) -> None:
        """Predict the cost of a batch with a new signature, or start counting it."""
        predicted = cache.predict(self._signature)
        if predicted is not None:
            self.work = self.peaks.cost_of(predicted)
            cache.store(self._signature, self.work)
        elif self.settled:
            self.counted = True  # excluded from rates, as if it had been counted
            self._missed.add(self._signature)
            self._announce()
        elif len(cache.counts) >= MOST_COUNTED and self._signature not in cache.counts:
            self._warn_unpredictable(
                f"the FLOPs of batches with new shapes could not be predicted from {MOST_COUNTED} "
                "counted ones: such batches are excluded from mfu."
            )
        elif cache.tries and self._compiled:
            self._count_on_shadow(cache, batch)
        elif cache.tries:
            strategy, counter = self._trainer.strategy, FlopCounter()
            self._counting.wrap_in_context(strategy, "backward", self._in_backward)
            self._counting.wrap(strategy, "optimizer_step", partial(_Update, counter=counter))
            # Last, because nothing would stop it after an error above.
            self.counter, self._backward_seen = counter, False

    def _in_backward(self) -> AbstractContextManager[Any]:
        self._backward_seen = True
        return self.counter or NOTHING

    def _stop_counting(self) -> None:
        self.counter = None
        self._counting.restore()

    def _warn_unpredictable(self, message: str) -> None:
        if not self._warned_unpredictable:
            self._warned_unpredictable = True
            warn(f"{message} {_DEFINE}")

    def _count_on_shadow(self, cache: FlopCache, batch: Any) -> None:
        self.counted = True
        try:
            counts = count_on_shadow(self._module, batch, self._step)
        except ShadowError as error:
            cache.tries = 0
            self._warn_unpredictable(
                f"the FLOPs of this compiled module cannot be counted ({error}): mfu is not "
                "reported."
            )
            return
        self._store(cache, counts, whole=True)

    def _step(self, module: Any, batch: Any) -> Any:
        """Run the stage's step of a module in the precision plugin's context."""
        step, context = getattr(module, _STEPS[self._stage]), _CONTEXTS[self._stage]
        arguments = len(inspect.signature(step).parameters)
        with getattr(self._trainer.precision_plugin, context)():
            return step(*(batch, 0, 0)[:arguments])

    def after_batch(self, batch: Any) -> None:
        """Finish the batch that has just ended: set ``work`` and ``counted``."""
        begun, self._begun = self._begun, False
        if batch is None:  # Lightning skipped it
            self.work, self.counted = None, False
        elif self.declared:
            self.work, self.counted = self._declared_work(batch), False
        elif self.settled:
            self.counted = False
            self._look_up(batch)
        elif not begun:
            self.work, self.counted = None, False
        elif self.counter is not None:
            counts, self.counted = self.counter.counts, True
            self._stop_counting()
            if self._cache is not None:
                self._store(self._cache, counts, whole=self._backward_seen)
        elif self.work is not None:
            self._known += 1
            if self._known >= _SETTLED and not self._missed:
                # Once settled, batches are looked up when they end: steps must not change them.
                self._known, self.settled = 0, signature(batch) == self._signature
                if self.settled:
                    self._steps.restore()

    def _store(self, cache: FlopCache, counts: Counts, whole: bool) -> None:
        self.untracked |= counts.untracked_names.keys()
        # A skipped step has no backward: count the next batch instead.
        skipped = self._stage == "train" and self._module.automatic_optimization and not whole
        if counts.model_flops and not skipped:
            self._missed.discard(self._signature)
            self.work = self.peaks.cost_of(cache.count(self._signature, counts))
            cache.store(self._signature, self.work)
        elif self._signature not in cache.counts:
            cache.tries -= 1
            if not cache.tries and self._stage == "train":
                warn(f"no FLOPs were found in the first batches: mfu is not reported. {_DEFINE}")

    @property
    def unchanged(self) -> bool:
        """Whether the module declares the same number as for the last batch that was examined."""
        try:
            return bool(self._module.flops_per_batch == self._declared_flops)
        except Exception:  # reported when the batch is examined
            return False

    def _declared_work(self, batch: Any) -> BatchCost | None:
        try:
            value: Any = self._module.flops_per_batch
            if callable(value):
                value = value(batch)
            if type(value) in (int, float) and value == self._declared_flops:
                return self._declared_cost
            flops = float(value)
            if not (math.isfinite(flops) and flops > 0):
                raise ValueError(f"{flops!r} is not a positive number")
        except Exception as error:
            self.wanted = False
            warn(
                f"flops_per_batch failed ({type(error).__name__}: {error}): mfu is not reported. "
                "It must be a number, or a function of the batch that returns one: the FLOPs of "
                "this rank's batch, forward and backward."
            )
            return None
        each = {self.peaks.dtype: round(flops / self.sharing)}
        self._declared_flops = flops
        self._declared_cost = self.peaks.cost_of(Counts(model=each, hardware=each))
        return self._declared_cost


class _Step(MethodPatch):
    """Announces a batch to the meter and runs the step, under the counter if there is one.

    A Lightning hook would announce the batch too, but takes several times as long to call.
    """

    def __init__(self, original: Callable[..., Any], stage: str, meter: FlopMeter) -> None:
        super().__init__(original)
        self._stage, self._meter = stage, meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meter = self._meter
        meter.on_step(self._stage, args[0] if args else None)
        if meter.counter is None:
            return self.original(*args, **kwargs)
        with meter.counter:
            return self.original(*args, **kwargs)


class _Update(MethodPatch):
    """Excludes the operators of an optimizer, such as Muon's products, but not its closure.

    With manual optimization it runs within the step, under the counter.
    """

    def __init__(self, original: Callable[..., Any], counter: FlopCounter) -> None:
        super().__init__(original)
        self._counter = counter

    def __call__(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        def counted() -> Any:
            with self._counter.paused(False):
                return closure()

        with self._counter.paused():
            return self.original(optimizer, counted, *args, **kwargs)
