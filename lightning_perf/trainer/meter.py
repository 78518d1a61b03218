"""The FLOPs of each batch: declared by the module, or counted while it is worked on."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import warn
from lightning_perf.flops import (
    Counts,
    FlopCounter,
    ShadowError,
    Signature,
    count_on_shadow,
    is_compiled,
    signature,
)
from lightning_perf.trainer.book import MOST_COUNTED, Book
from lightning_perf.trainer.peaks import BatchWork, Peaks
from lightning_perf.trainer.steps import STEPS, Steps

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning.pytorch import LightningModule, Trainer

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
        self.peaks = Peaks(trainer)
        self.wanted = False
        #: The present batch: its work, and whether it was slowed down by being counted.
        self.work: BatchWork | None = None
        self.counted = False
        #: Operators that do work which no formula knows.
        self.untracked: set[str] = set()
        self._stage = ""
        self._declared = self._compiled = False
        #: What the module declared last, and what that costs.
        self._declared_flops: float | None = None
        self._declared_cost: BatchWork | None = None
        self._books: dict[Hashable, Book] = {}
        self._book = Book(tries=0)
        self._stale = True
        self._signature: Signature = ()
        self._lawless = False
        self._steps = Steps(trainer.strategy, self._begins)
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
            self.peaks.give(peak, name)
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
        self.peaks.of(self.peaks.dtype)

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

    def _begins(self, stage: str, batch: Any) -> None:
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
            self._book = self._books.setdefault(key, Book(_TRIES[self._stage]))
        self._signature = signature(batch)
        self.work = self._book.works.get(self._signature)
        if self.work is None:
            self._find_out(batch)

    def _find_out(self, batch: Any) -> None:
        """Shapes that are new: predict what they cost, or count them."""
        book = self._book
        predicted = book.predict(self._signature)
        if predicted is not None:
            self.work = self.peaks.priced(predicted)
            book.remember(self._signature, self.work)
        elif len(book.counts) >= MOST_COUNTED:
            self._tell_lawless()
        elif book.tries and self._compiled:
            self._count_on_shadow(batch)
        elif book.tries:
            self._steps.count(FlopCounter())

    def _tell_lawless(self) -> None:
        if not self._lawless:
            self._lawless = True
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
            self._book.tries = 0
            if not self._lawless:
                self._lawless = True
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
            self.work = self._declared_work(batch)

    def _learn(self, counts: Counts, whole: bool) -> None:
        # A step that was skipped has no FLOPs, or none of a backward: the next one is counted.
        skipped = self._stage == "train" and self._module.automatic_optimization and not whole
        if counts.model_flops and not skipped:
            self.untracked |= counts.untracked_names.keys()
            self.work = self.peaks.priced(counts)
            self._book.counts[self._signature] = counts
            self._book.remember(self._signature, self.work)
            return
        self._book.tries -= 1
        if not self._book.tries and self._stage == "train":
            warn(
                "no FLOPs were found in the first batches: no mfu. Define flops_per_batch on the "
                "LightningModule to have it."
            )

    def _declared_work(self, batch: Any) -> BatchWork | None:
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
        self._declared_cost = self.peaks.priced(Counts(model=each, hardware=each))
        return self._declared_cost
