"""The stack of active stages, with their progress and batch times."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from operator import sub
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_perf.core.progress import STAGES, Limits, Moment, Timestamp
from lightning_perf.run import compat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Ranks
    from lightning_perf.timing.cuda_events import DeviceTimer

    #: Batches, samples, tokens and seconds.
    _Totals = tuple[int, int, int, float]


class Counters:
    """Progress of one stage, updated in place so that a batch creates no Timestamp."""

    def __init__(self, stamp: Timestamp | None = None) -> None:
        stamp = stamp or Timestamp()
        self.epoch, self.batch, self.step = stamp.epoch, stamp.batch, stamp.step
        self.sample, self.token, self.total_wct = stamp.sample, stamp.token, stamp.total_wct
        # Batches, samples, tokens and seconds at the start of the epoch.
        self._epoch_began = (
            stamp.batch - stamp.batch_in_epoch,
            stamp.sample - stamp.sample_in_epoch,
            stamp.token - stamp.token_in_epoch,
            stamp.total_wct - stamp.epoch_wct,
        )
        # The epoch of the current moment, and what `_stamp` takes, one batch earlier.
        self._moment_epoch = stamp.epoch
        self._before: tuple[int, int, _Totals, _Totals]
        self.last_seconds = 0.0
        #: Batches since the stage was entered.
        self.batches = 0
        #: Start of the current batch, in seconds of the clock.
        self.mark = 0.0
        #: Whether the last batch was the last of its epoch.
        self.epoch_ends = False
        #: Whether the last epoch ended early: not with the batch that seemed to be its last.
        self.cut_short = False

    def enter(self, now: float) -> None:
        """The stage begins."""
        self.batches, self.mark = 0, now
        self.epoch_ends = self.cut_short = False
        self._moment_epoch = self.epoch

    def add(
        self, now: float, samples: int | None, tokens: int | None, step: int, epoch_ends: bool
    ) -> float:
        """Count a batch, which ended at ``now`` on the clock, and return its seconds.

        ``step`` counts optimizer steps, including this batch; unknown samples and tokens are None.
        """
        seconds = now - self.mark
        totals = self.batch, self.sample, self.token, self.total_wct
        self._before = self._moment_epoch, self.step, totals, self._epoch_began
        self.mark = now
        self.batch += 1
        self.batches += 1
        self.sample += samples or 0
        self.token += tokens or 0
        self.total_wct += seconds
        self.step, self.last_seconds = step, seconds
        self._moment_epoch, self.epoch_ends = self.epoch + epoch_ends, epoch_ends
        return seconds

    def add_seconds(self, now: float) -> None:
        """Count the time until ``now`` for the stage, but for none of its batches."""
        self.total_wct += now - self.mark
        self.mark = now

    @property
    def begins_epoch(self) -> bool:
        """Whether the last batch was the first of its epoch."""
        return self.batch == self._epoch_began[0] + 1

    def end_epoch(self) -> None:
        """Count an epoch and reset the counts within it."""
        self.cut_short = not self.epoch_ends
        self.epoch += 1
        self._moment_epoch, self.epoch_ends = self.epoch, False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Reset the counts within the epoch."""
        self._epoch_began = self.batch, self.sample, self.token, self.total_wct

    def timestamp(self) -> Timestamp:
        """Return the counts as a value."""
        totals = self.batch, self.sample, self.token, self.total_wct
        return _stamp(self.epoch, self.step, totals, self._epoch_began, self.last_seconds)

    def previous(self) -> Timestamp:
        """Return the counts one batch earlier; the current ones before the first batch."""
        return _stamp(*self._before) if self.last_seconds else self.timestamp()


def _stamp(
    epoch: int, step: int, now: _Totals, began: _Totals, last_seconds: float = 0.0
) -> Timestamp:
    """The counts of a stage, whose epoch began with some totals."""
    batch, sample, token, seconds = now
    in_epoch: Any = map(sub, now, began)
    batches, samples, tokens, epoch_wct = in_epoch
    return Timestamp(
        epoch, batch, sample, token, step, batches, samples, tokens, seconds, epoch_wct,
        last_seconds,
    )  # fmt: skip


class Progress:
    """The counters of all stages. Lives as long as the trainer and survives resume."""

    def __init__(self) -> None:
        self.stages = {stage: Counters() for stage in STAGES}
        #: Seconds spent in validation inside fit.
        self.validation_seconds = 0.0
        #: Seconds of training that were checkpoints or stalls, up to the end of the last batch.
        self.paused_seconds = 0.0
        #: The folder and the job of this training, and those in the checkpoint that is resumed.
        self.job: dict[str, str] = {}
        self.saved_job: dict[str, str] = {}

    def timestamp(self, stage: str) -> Timestamp:
        """Return the progress of a stage."""
        return self.stages[stage].timestamp()

    def state_dict(self) -> dict[str, Any]:
        """Return plain ints, floats and dicts, as ``weights_only=True`` requires."""
        stages = {stage: self.timestamp(stage).state_dict() for stage in STAGES}
        state = {
            "stages": stages,
            "validation_seconds": self.validation_seconds,
            "paused_seconds": self.paused_seconds,
        }
        return state | ({"job": self.job} if self.job else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the progress in a checkpoint."""
        saved = state.get("stages", {})
        stamps = {each: Timestamp.from_state_dict(saved[each]) for each in STAGES if each in saved}
        self.validation_seconds = float(state.get("validation_seconds", 0.0))
        self.paused_seconds = float(state.get("paused_seconds", 0.0))
        self.stages |= {stage: Counters(stamp) for stage, stamp in stamps.items()}
        saved_job = state.get("job")
        self.saved_job = saved_job if isinstance(saved_job, dict) else {}

    def reconcile(self, trainer: Trainer, resumed: bool) -> None:
        """Follow Lightning after it resumed: its epoch always, its counts if we have none."""
        counters = self.stages["train"]
        total, in_epoch = compat.batches_seen(trainer)
        ours = resumed or (counters.batch > 0 and trainer.ckpt_path is None)
        if not ours and total:
            now = replace(
                counters.timestamp(),
                epoch=trainer.current_epoch,
                batch=total,
                batch_in_epoch=in_epoch,
                step=trainer.global_step,
            )
            self.stages["train"] = Counters(now)
        elif trainer.current_epoch > counters.epoch:
            # A checkpoint of an epoch's last batch: Lightning does not end that epoch again.
            counters.end_epoch()
            counters.epoch = trainer.current_epoch
        elif not (resumed or in_epoch):
            counters.begin_epoch()  # again, after a fit that failed within it


class _Stage(NamedTuple):
    """One stage on the stack. Validation inside fit is above train."""

    name: str
    limits: Limits
    counters: Counters


class StageStack:
    """The active stages, with their progress and the durations of their batches."""

    def __init__(
        self,
        progress: Progress,
        ranks: Ranks,
        run_name: str,
        device_timer: DeviceTimer | None = None,
    ) -> None:
        self.progress, self.ranks, self.run_name = progress, ranks, run_name
        self._device_timer = device_timer
        self._stages: list[_Stage] = []
        #: The current stage, by Lightning's name; empty between stages.
        self.stage = ""
        #: Its counts, or those of the last one. Plain attributes: they are read at every batch.
        self.counters = Counters()
        #: Whether it is validation inside fit.
        self.nested = False
        #: The step at which loggers write what is reported now.
        self.step = 0
        #: Whether the current stage ends when Lightning's loop returns, not after its last hook.
        self.within_loop = False
        #: Whether the last hook of the current stage was called.
        self.ended = False
        # The time up to which validation inside fit is counted.
        self._settled = 0.0
        # Progress of training at the last nested validation, and the seconds of earlier
        # validations.
        self._validated_at, self._validated_before = -1, 0.0
        self._moment: Moment | None = None
        # The counts from which `_moment` was made.
        self._moment_of: tuple[object, ...] = ()

    @property
    def moment(self) -> Moment:
        """The current moment, before the next batch: in the next epoch if this one is over.

        Made once per batch, because each schedule uses it.
        """
        name, limits, counters = self._stages[-1]
        key = name, counters.batch, counters.epoch
        if self._moment is None or key != self._moment_of:
            stamp, validated = counters.timestamp(), self.progress.validation_seconds
            since = counters.batch == self._validated_at + 1
            self._moment_of = key
            self._moment = Moment(
                name,
                stamp.to_next_epoch() if counters.epoch_ends else stamp,
                counters.previous(),
                limits,
                self.ranks,
                self.run_name,
                counters.last_seconds,
                validated,
                self._validated_before if since else validated,
            )
        return self._moment

    @property
    def since_batch(self) -> float:
        """Seconds since the last batch of the current stage, without validation inside of fit."""
        return perf_counter() - self.counters.mark

    @property
    def validating(self) -> float:
        """Seconds of the running validation inside fit that are not counted yet."""
        return perf_counter() - self._settled if self.nested else 0.0

    def enter(self, name: str, limits: Limits) -> None:
        """Begin a stage."""
        now, counters = perf_counter(), self.progress.stages[name]
        if self._stages:
            self._validated_at = self.counters.batch
            self._validated_before = self.progress.validation_seconds
        counters.enter(now)
        self._settled = now
        self._stages.append(_Stage(name, limits, counters))
        self._select()
        self._moment = None
        if self._device_timer is not None:
            self._device_timer.enter()

    def _select(self) -> None:
        """Another stage is current."""
        self.stage, self.nested, self.ended = "", len(self._stages) > 1, False
        if self._stages:
            self.stage, _, self.counters = self._stages[-1]

    def limit(self, limits: Limits) -> None:
        """Continue the current stage with other limits."""
        self._stages[-1] = self._stages[-1]._replace(limits=limits)
        self._moment = None

    def begin_batches(self) -> None:
        """The first batch of the current stage begins: what came before is the stage's alone."""
        if not self.counters.batches:
            self.counters.add_seconds(perf_counter())

    def end(self) -> None:
        """The last hook of the current stage is called; checkpoints are written after it."""
        self.ended = True
        self.settle()
        if self.stage != "train":  # another stage is one epoch
            self.counters.end_epoch()

    def settle(self) -> None:
        """Count the seconds of the current stage up to now."""
        now = perf_counter()
        self.counters.add_seconds(now)
        if self.nested:
            # The enclosing training batch excludes validation inside fit.
            seconds, self._settled = now - self._settled, now
            self.progress.validation_seconds += seconds
            self._stages[-2].counters.mark += seconds

    def exit(self) -> None:
        """End the current stage."""
        self.settle()
        self._stages.pop()
        self._select()
        self.within_loop = False
        if self._device_timer is not None:
            self._device_timer.exit()

    @contextmanager
    def exclude_from_batch_time(self) -> Iterator[None]:
        """Exclude the time of the block, which is our overhead, from the batch's duration."""
        start = perf_counter()
        if self._device_timer is not None:
            self._device_timer.pause()
        try:
            yield
        finally:
            if self._device_timer is not None:
                self._device_timer.resume()
            if self._stages:
                self.counters.mark += perf_counter() - start
