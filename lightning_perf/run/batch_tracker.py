"""Counts each batch of the running stage as it ends, and decides whether a report may be due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lightning_perf.core.batch import checked_count, counter_for, get_num_samples, get_num_tokens
from lightning_perf.errors import warn
from lightning_perf.run import compat
from lightning_perf.run.batches import BatchRecord, BatchTotals

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_perf.run.flop_meter import FlopMeter
    from lightning_perf.run.profiler import Spans
    from lightning_perf.run.stages import StageStack
    from lightning_perf.run.windows import Windows
    from lightning_perf.timing.clock import Clock


_Counter = Callable[[Any], int]
_INFERRED: dict[str, _Counter] = {
    "get_num_samples_in_batch": get_num_samples,
    "get_num_tokens_in_batch": get_num_tokens,
}
#: Items of recorded spans that are kept until they are added up: reports may be far apart.
MOST_SPAN_ITEMS = 50_000


class BatchTracker:
    """Counts each batch of the running stage, and decides whether a report may be due after it."""

    def __init__(
        self,
        trainer: Trainer,
        stages: StageStack,
        spans: Spans,
        meter: FlopMeter,
        batches: BatchTotals,
        windows: Windows,
    ) -> None:
        self._trainer: Any = trainer
        self._stages, self._spans = stages, spans
        self._meter, self._batches, self._windows = meter, batches, windows
        #: Counts samples and tokens, from the first stage on.
        self.counter: BatchCounter | None = None
        self._loop: compat.TrainingLoop  # read anew in each stage: modules may change it late
        # A report is due every so many batches or steps.
        self._every: float = inf
        #: Whether the last batch is one at which Lightning logs, the same on every rank.
        self.report_due = False
        #: Whether a report may be due after the last batch.
        self.report_possible = False
        self._clock: Clock | None = None
        # Times batches on the device; None if it has no clock of its own.
        self._timer = batches.timer

    def enter(self) -> None:
        """A stage starts or continues."""
        self._loop = compat.TrainingLoop(self._trainer)
        self._every = self._trainer.log_every_n_steps or inf
        recorder = self._spans.recorder
        self._clock = recorder.clock if recorder is not None else None
        assert self.counter is not None  # made when the first stage began
        stage, nested = self._stages.stage, self._stages.nested
        self.counter.enter(stage, partial(compat.batch_size, self._trainer, stage, nested))

    def begin(self) -> None:
        """Reports before the stage's first batch get its step."""
        stages = self._stages
        if not stages.nested:
            stages.step = self._loop.step + (stages.stage != "train")

    def end_batch(self, batch: Any) -> None:
        """A batch has ended."""
        assert self.counter is not None  # made when the first stage began
        stages, meter, windows = self._stages, self._meter, self._windows
        counters = stages.counters
        samples, tokens = self.counter.count(batch)
        if meter.wanted:
            meter.after_batch(batch)
        timed = None if self._timer is None else self._timer.end()
        train = stages.stage == "train"
        if train:
            stages.step, steps, last = self._loop.counts
            number = stages.step + 1
        else:
            steps, last, number = 0, False, counters.batches + 1
            if not stages.nested:
                stages.step = self._loop.step + number
        seconds = counters.add(perf_counter(), samples, tokens, steps, last)
        firsts = counters.batches == 1, counters.begins_epoch
        record = BatchRecord(seconds, samples, tokens, meter.work, meter.counted, *firsts)
        self._batches.end_batch(stages.stage, record, timed)
        if self._clock is not None and len(self._clock.log) > MOST_SPAN_ITEMS:
            self._clock.add_up()
        self.report_due = number % self._every == 0 and not (
            self._loop.accumulating if train else stages.nested
        )
        if windows.pending:
            windows.gatherer.poll()
        self.report_possible = self.report_due or counters.batch >= windows.quiet_until


#: Batches of a stage that are compared with the batch size of its data loaders.
_TRIES = 2


class BatchCounter:
    """Counts the samples and tokens of a batch, with the user's functions or by inference.

    The first of ``owners`` that defines a function takes precedence. The batch size of the data
    loaders shows what else to count. A count that fails is None, with one warning for samples and
    one for tokens.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        owners = list(owners)
        self._samples = _find(owners, "get_num_samples_in_batch")
        self._tokens = _find(owners, "get_num_tokens_in_batch")
        self._infers = self._samples is get_num_samples
        self._use(self._samples)
        self._warned: set[str] = set()
        # By stage: what counts its samples.
        self._found: dict[str, _Counter] = {}
        self._stage = ""
        self._size: Callable[[], int | None] = lambda: None
        # Batches that are compared with the size: one may be the last of its epoch.
        self._tries = 0

    def enter(self, stage: str, size: Callable[[], int | None]) -> None:
        """Batches of a stage follow, whose data loaders have a size by the first of them."""
        if self._infers:
            self._stage, self._size = stage, size
            self._tries = 0 if stage in self._found else _TRIES
            self._use(self._found.get(stage, get_num_samples))

    def _use(self, counter: _Counter) -> None:
        self._samples = counter
        self._inferred = (counter, self._tokens) == (get_num_samples, get_num_tokens)

    def _choose(self, batch: Any) -> None:
        """Find out what counts the samples of this stage."""
        self._tries -= 1
        size = self._size()
        if size and (counter := counter_for(batch, size)) is not None:
            self._tries, self._found[self._stage] = 0, counter
            self._use(counter)

    def count(self, batch: Any) -> tuple[int | None, int | None]:
        """Return the samples and tokens of a batch; None if unknown, 0 if not tracked."""
        if self._tries:
            self._choose(batch)
        if self._inferred and (type(batch) is list or type(batch) is tuple):
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
