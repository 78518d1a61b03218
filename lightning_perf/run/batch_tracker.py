"""Counts each batch of the running stage as it ends, and decides whether a report may be due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_perf.core.batch import checked_count, get_num_samples, get_num_tokens
from lightning_perf.errors import warn
from lightning_perf.flops.shapes import plain_signature
from lightning_perf.run import compat

if TYPE_CHECKING:
    from lightning_perf.flops.peaks import BatchCost
    from lightning_perf.flops.shapes import Signature
    from lightning_perf.run.context import RunContext
    from lightning_perf.timing.clock import Clock
    from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceTimer

    #: Cost, samples and tokens of a batch, and whether counting its FLOPs slowed it down.
    Figures = tuple[BatchCost | None, int | None, int | None, bool]


_Counter = Callable[[Any], int]
_INFERRED: dict[str, _Counter] = {
    "get_num_samples_in_batch": get_num_samples,
    "get_num_tokens_in_batch": get_num_tokens,
}
#: The most batches that are deferred, and the most items of recorded spans that are kept until they
#: are added up: reports may be far apart.
_MOST_DEFERRED, _MOST_SPAN_ITEMS = 1000, 50_000
#: Signatures whose figures are remembered at most: every batch may have another shape.
_MOST_KNOWN = 64


class BatchTracker:
    """Counts each batch of the running stage, and decides whether a report may be due after it.

    Training batches of known shapes are deferred while no report, schedule or callback needs their
    counts, and counted together later: between training steps caches are cold, and each object that
    is accessed there takes several times as long as in the loop that counts.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        #: Counts samples and tokens, from the first stage on.
        self.counter: BatchCounter | None = None
        self._loop: compat.TrainingLoop  # read anew in each stage: modules may change it late
        self._every = 0
        # Whether callbacks have hooks for each batch.
        self._watched = True
        #: Whether the last batch is one at which Lightning logs, the same on every rank.
        self.report_due = False
        #: Whether a report may be due after the last batch.
        self.report_possible = False
        #: The step at which loggers write what is reported now.
        self.step = 0
        self._clock: Clock | None = None
        # Times batches on the device; None if it has no clock of its own.
        self._timer: DeviceTimer | None = None
        # Deferred batches, six items each, and how many of the next ones may be deferred.
        self._deferred: list[Any] = []
        self._deferrable = 0
        self._known: dict[Signature | None, Figures] = {}

    def enter(self) -> None:
        """A stage starts or continues."""
        context = self._context
        self.restart()
        self._loop = compat.TrainingLoop(context.trainer)
        self._every = compat.log_every_n_steps(context.trainer)
        self._watched = context.stage != "train" or any(
            part.overrides("before_batch") or part.overrides("after_batch")
            for part in context.parts
        )
        recorder = context.spans.recorder
        self._clock = recorder.clock if recorder is not None else None
        self._timer = context.batches.timer

    def begin(self) -> None:
        """Reports before the stage's first batch get its step."""
        if not self._context.stages.nested:
            self.step = self._loop.step + (self._context.stage != "train")

    def restart(self) -> None:
        """Frozen parameters may have changed."""
        self._deferrable = 0
        self._known.clear()

    def end(self, batch: Any) -> bool:
        """A batch has ended; return whether it was counted, not deferred."""
        context, signature = self._context, plain_signature(batch)
        figures, meter = self._known.get(signature), context.meter
        if figures is None or (meter.declared and not meter.unchanged):
            self._deferrable = 0
            figures = self._examine(batch, signature)
        timed = None if self._timer is None else self._timer.end()
        train = context.stage == "train"
        counts = self._loop.counts if train else self._other_counts()
        if self._deferrable:
            self._deferrable -= 1
            self._deferred.extend((perf_counter(), figures, timed, *counts))
            return False
        if self._deferred:
            self.count()
        self._add(perf_counter(), figures, timed, *counts)
        if self._clock is not None and len(self._clock.log) > _MOST_SPAN_ITEMS:
            self._clock.add_up()
        done, windows = context.counters.batches, context.windows
        if train:
            self.report_due = self._logs_at(self.step + 1) and not self._loop.accumulating
        else:
            self.report_due = self._logs_at(done) and not context.stages.nested
        if windows.pending:
            windows.gatherer.poll()
        self.report_possible = self.report_due or context.counters.batch >= windows.quiet_until
        if not (self._watched or self.report_possible or windows.pending):
            self._deferrable = self._deferrable_batches()
        return True

    def count(self) -> None:
        """Count the deferred batches; on the training thread, before their counts are read."""
        deferred, self._deferred = iter(self._deferred), []
        try:
            for batch in zip(*[deferred] * 6, strict=True):
                self._add(*batch)
        finally:  # after Ctrl-C the remaining batches are counted at the end of the run
            self._deferred = [*deferred]

    def _add(
        self,
        now: float,
        figures: Figures,
        timed: DeviceBatchTime | None,
        step: int,
        steps: int,
        last: bool,
    ) -> None:
        context, counters = self._context, self._context.counters
        cost, samples, tokens, slowed = figures
        seconds = counters.add(now, samples, tokens, steps, last)
        firsts = counters.batches == 1, counters.begins_epoch
        record = (seconds, samples, tokens, cost, slowed, *firsts)
        context.batches.end_batch(context.stage, record, timed)
        self.step = step

    def _examine(self, batch: Any, signature: Signature | None) -> Figures:
        """Count the samples, tokens and FLOPs of a batch."""
        assert self.counter is not None  # made when the first stage began
        meter = self._context.meter
        samples, tokens = self.counter.count(batch)
        if meter.wanted:
            meter.after_batch(batch)
            if meter.counted:
                self._context.warn_untracked()
        figures = meter.work, samples, tokens, meter.counted
        if meter.wanted and not meter.settled:
            self._known.clear()  # the meter has to see each batch
        elif (
            signature is not None
            and self.counter.inferred
            and not meter.counted
            and (meter.work is not None or not meter.wanted)
            and len(self._known) < _MOST_KNOWN
        ):
            self._known[signature] = figures
        return figures

    def _other_counts(self) -> tuple[int, int, bool]:
        """As ``TrainingLoop.counts``, of another stage than training."""
        context = self._context
        if context.stages.nested:
            return self.step, 0, False
        return self._loop.step + context.counters.batches + 1, 0, False

    def _logs_at(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _deferrable_batches(self) -> int:
        """The number of next batches whose counts neither a report nor a schedule needs."""
        quiet_until = self._context.windows.quiet_until
        ahead = min(quiet_until - self._context.counters.batch - 1, _MOST_DEFERRED)
        if self._every:  # a batch makes one step at most
            ahead = min(ahead, -(self.step + 1) % self._every - 1)
        return max(int(ahead), 0)


class BatchCounter:
    """Counts the samples and tokens of a batch, with the user's functions or by inference.

    The first of ``owners`` that defines a function takes precedence. A count that fails is None,
    with one warning for samples and one for tokens.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._samples = _find(owners, "get_num_samples_in_batch")
        self._tokens = _find(owners, "get_num_tokens_in_batch")
        #: Whether they follow from the shapes of a list or tuple of tensors.
        self.inferred = (self._samples, self._tokens) == (get_num_samples, get_num_tokens)
        self._warned: set[str] = set()

    def count(self, batch: Any) -> tuple[int | None, int | None]:
        """Return the samples and tokens of a batch; None if unknown, 0 if not tracked."""
        if self.inferred and (type(batch) is list or type(batch) is tuple):
            # The common case, tensors of one length: same result as the general rules, but faster.
            try:
                size: int = batch[0].shape[0]
                for part in batch:
                    if part.shape[0] != size:
                        break
                else:
                    return size, 0
            except (AttributeError, IndexError, TypeError, RuntimeError):  # no shape
                pass
        if batch is None:  # a batch that the data loader skips
            return 0, 0
        samples = self._try(self._samples, "samples", batch)
        return samples, self._try(self._tokens, "tokens", batch)

    def _try(self, counter: _Counter, what: str, batch: Any) -> int | None:
        try:
            return counter(batch)
        except Exception as error:
            if what not in self._warned:
                self._warned.add(what)
                warn(
                    f"cannot count the {what} of a batch ({type(error).__name__}: {error}): {what} "
                    f"per second are not reported. Define get_num_{what}_in_batch(batch) -> int on "
                    "the LightningModule or the LightningDataModule."
                )
            return None


def _find(owners: list[object], name: str) -> _Counter:
    for owner in owners:
        counter = getattr(owner, name, None)
        if callable(counter):
            return lambda batch: checked_count(counter(batch), name)
    return _INFERRED[name]
