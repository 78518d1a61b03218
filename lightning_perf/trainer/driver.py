"""The one driver per trainer: what all of our callbacks on it share."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from lightning_perf.flops import device_name
from lightning_perf.moment import Limits, Moment, Ranks
from lightning_perf.schedule import Context
from lightning_perf.timestamp import Timestamp
from lightning_perf.trace.worker import Worker
from lightning_perf.trainer import compat
from lightning_perf.trainer.collective import Gatherer, Rows
from lightning_perf.trainer.meter import BatchWork, FlopMeter
from lightning_perf.trainer.progress import BatchCounter, Progress, counter_owners
from lightning_perf.trainer.reporting import Reporting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.tracking.artifacts import Upload

#: Seconds that the end of a run waits for other ranks' last numbers, and for uploads: what is not
#: sent by then is listed for ``lightning-perf upload``.
GATHER_TIMEOUT = 10.0
UPLOAD_TIMEOUT = {"teardown": 60.0, "exception": 10.0}


class Member(Protocol):
    """What the driver knows of the callbacks that it drives."""

    @property
    def state_key(self) -> str:
        """What tells it from others of its kind."""
        ...


@dataclass(slots=True)
class _Stage:
    """One stage on the stack: validation inside of fit lies on top of train."""

    name: str
    entered: float
    #: Where the next batch's seconds are counted from.
    mark: float
    previous: Timestamp


class Driver:
    """Counts progress, meters FLOPs, and owns the thread and the ways out.

    The first member of a trainer feeds it, the last one to leave closes it. Constructing it takes
    all ranks together.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.members: list[Member] = []
        self.ranks = _ranks(trainer)
        self.worker = Worker("lightning_perf")
        self.reporting = Reporting(trainer, self.worker)
        self.meter = FlopMeter(trainer, module)
        self.progress = _PROGRESS.setdefault(trainer, Progress())
        self.limits = _limits(trainer)
        self._gatherer = Gatherer(trainer)
        self._at_end: list[Callable[[], None]] = []
        self._counter: BatchCounter | None = None
        self._stages: list[_Stage] = []
        # Of stages that are over for now: what the last batch crossed counts when they go on.
        self._previous: dict[str, Timestamp] = {}
        self._moment: Moment | None = None
        #: The last batch: this rank's samples, tokens (0 where they cannot be told), and seconds.
        self.batch_samples = self.batch_tokens = 0
        self.batch_seconds = 0.0

    # -- who takes part ---------------------------------------------------------------------

    @classmethod
    def join(cls, trainer: Trainer, module: LightningModule, member: Member) -> Driver:
        """The trainer's driver, made for the first member that asks."""
        driver = _DRIVERS.get(trainer)
        if driver is None:
            driver = _DRIVERS[trainer] = cls(trainer, module)
        driver.members.append(member)
        return driver

    def leave(self, member: Member, reason: str) -> None:
        """Let a member go; the last one closes what is shared."""
        if member in self.members:
            self.members.remove(member)
        if self.members or _DRIVERS.get(self.trainer) is not self:
            return
        del _DRIVERS[self.trainer]
        self.meter.disarm()
        if reason != "exception":
            self._gatherer.finish(GATHER_TIMEOUT)
        self.reporting.close(UPLOAD_TIMEOUT[reason])
        for finish in self._at_end:
            finish()

    # -- where the run is ---------------------------------------------------------------------

    @property
    def stage(self) -> str | None:
        """The stage that is running, in Lightning's words."""
        return self._stages[-1].name if self._stages else None

    @property
    def timestamp(self) -> Timestamp:
        """Where the present stage stands."""
        return self.progress.timestamps[self._stages[-1].name]

    @property
    def moment(self) -> Moment:
        """The present moment: after the last batch, before the next."""
        if self._moment is None:
            self._moment = self._moment_at(self.timestamp)
        return self._moment

    @property
    def upcoming(self) -> Moment:
        """The present moment as the next batch sees it: in the next epoch, after the last batch."""
        if self.stage == "train" and self.trainer.is_last_batch and self.timestamp.batch_in_epoch:
            return self._moment_at(self.timestamp.to_next_epoch())
        return self.moment

    @property
    def nested(self) -> bool:
        """Whether the present stage is validation inside of fit."""
        return len(self._stages) > 1

    @property
    def step(self) -> int:
        """The loggers' step for what is reported now."""
        if self.stage == "train" or self.nested:
            return compat.logger_step(self.trainer)
        return self.timestamp.batch if self._stages else 0

    @property
    def report_due(self) -> bool:
        """Whether this batch is one at which Lightning logs, the same on every rank."""
        every = compat.log_every_n_steps(self.trainer)
        if not every or self.nested:
            return False
        if self.stage != "train":
            return self.timestamp.batch % every == 0
        return (self.step + 1) % every == 0 and not compat.is_accumulating(self.trainer)

    # -- what the first member tells --------------------------------------------------------------

    def enter(self, stage: str) -> None:
        """A stage begins."""
        now = time.perf_counter()
        previous = self._previous.get(stage, self.progress.timestamps[stage])
        self._stages.append(_Stage(stage, now, now, previous))
        self._moment = None
        if self._counter is None:
            owners = counter_owners(self.trainer, self.module, self.members)
            self._counter = BatchCounter(owners)
        if self.nested:
            return
        self.limits = _limits(self.trainer)
        if stage == "train":
            self._catch_up()
            self.meter.start()
            self.describe(self._setup())
        self._stages[-1].mark = time.perf_counter()

    def begin_batch(self, batch: Any) -> None:
        """A batch has arrived on the device."""
        if self.stage == "train":
            self.meter.before_batch(batch)

    def end_batch(self, batch: Any) -> None:
        """A batch has been worked on."""
        stage, counter = self._stages[-1], self._counter
        assert counter is not None  # made by enter()
        training = stage.name == "train"
        if training:
            self.meter.after_batch(batch)
        before = stage.previous = self.progress.timestamps[stage.name]
        self.batch_samples, self.batch_tokens = counter.samples(batch), counter.tokens(batch)
        now = time.perf_counter()
        self.batch_seconds, stage.mark = now - stage.mark, now
        self.progress.timestamps[stage.name] = before.to_next_batch(
            self.batch_samples,
            self.batch_tokens,
            self.batch_seconds,
            self.trainer.global_step - before.step if training else 0,
        )
        self._moment = None
        if self._gatherer.waiting:
            self._gatherer.poll()

    def end_epoch(self) -> None:
        """An epoch of the present stage is over."""
        self.progress.timestamps[self._stages[-1].name] = self.timestamp.to_next_epoch()
        self._moment = None

    def exit(self) -> None:
        """The present stage is over."""
        ended = self._stages.pop()
        self._moment = None
        self._previous[ended.name] = ended.previous
        if ended.name != "train":  # each run of it is an epoch; those of training end themselves
            stamps = self.progress.timestamps
            stamps[ended.name] = stamps[ended.name].to_next_epoch()
        if self._stages:
            # Validation inside of fit is left out of the training batch around it.
            seconds = time.perf_counter() - ended.entered
            self.progress.validation_seconds += seconds
            self._stages[-1].mark += seconds

    # -- what members may ask for -------------------------------------------------------------

    def gather(self, member: int, values: Sequence[float], then: Callable[[Rows], None]) -> None:
        """Bring numbers of all ranks together, at a cadence that all ranks share.

        Args:
            member: Which kind of report, the same on every rank.
            values: This rank's numbers.
            then: Receives one row a rank, perhaps some batches later.
        """
        self._gatherer.gather((member, self.step), values, then)

    @property
    def run_name(self) -> str:
        """The name that files and reports of this run bear, the same on every rank."""
        return self.reporting.run_name

    @property
    def upload(self) -> Upload | None:
        """Sends a file to MLflow, or None without it. For the worker thread."""
        return self.reporting.upload

    @property
    def upload_target(self) -> dict[str, str]:
        """What a later upload needs to know of the run."""
        return self.reporting.runs[0].as_dict() if self.reporting.runs else {}

    def at_end(self, finish: Callable[[], None]) -> None:
        """Call something when the worker has stopped, at the very end of the run."""
        self._at_end.append(finish)

    @property
    def context(self) -> Context:
        """What schedules may ask of the run."""
        return Context(ranks=self.ranks, limits=self.limits)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave what happens within out of the batch's seconds: it is ours, not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._stages:
                self._stages[-1].mark += time.perf_counter() - start

    @property
    def work(self) -> BatchWork | None:
        """The FLOPs of the last batch, where they are known."""
        return self.meter.work if self.stage == "train" else None

    @property
    def slowed(self) -> bool:
        """Whether the last batch took longer because its FLOPs were counted."""
        return self.meter.counted and self.stage == "train"

    def describe(self, settings: Mapping[str, object]) -> None:
        """The set-up of the run, or of one member, as params of the run."""
        self.reporting.log_params({f"lightning_perf/{k}": v for k, v in settings.items()})

    def resume(self, progress: dict[str, Any]) -> None:
        """Take up the progress of the training that is resumed."""
        if self.trainer.state.fn == "fit":
            self.progress.load_state_dict(progress)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics to every logger of the trainer, from rank 0."""
        self.reporting.log(metrics, step)

    def _moment_at(self, timestamp: Timestamp) -> Moment:
        return Moment(
            self._stages[-1].name,
            timestamp,
            self._stages[-1].previous,
            self.limits,
            self.ranks,
            self.reporting.run_name,
            self.batch_seconds,
        )

    def _setup(self) -> dict[str, object]:
        device = self.trainer.strategy.root_device
        setup: dict[str, object] = {
            "version": version("lightning_perf"),
            "device": device_name(device),
            "world_size": self.ranks.world_size,
            "precision": compat.precision(self.trainer),
            "strategy": type(self.trainer.strategy).__name__,
        }
        peak = self.meter.peak(self.meter.dtype) if self.meter.wanted else None
        if peak is not None:
            setup |= {"peak_flops": peak.value, "peak_source": peak.source}
        return setup

    def _catch_up(self) -> None:
        """Believe Lightning where it has seen more than we have: a resume without state of ours."""
        total, in_epoch = compat.batches_seen(self.trainer)
        stamp = self.timestamp
        if total > stamp.batch:
            self.progress.timestamps["train"] = Timestamp.from_state_dict(
                stamp.state_dict()
                | {
                    "epoch": self.trainer.current_epoch,
                    "batch": total,
                    "batch_in_epoch": in_epoch,
                    "step": self.trainer.global_step,
                }
            )


# A trainer's progress outlives its drivers, which live for one fit or test each.
_DRIVERS: WeakKeyDictionary[Trainer, Driver] = WeakKeyDictionary()
_PROGRESS: WeakKeyDictionary[Trainer, Progress] = WeakKeyDictionary()


def _ranks(trainer: Trainer) -> Ranks:
    return Ranks(
        trainer.global_rank,
        trainer.local_rank,
        trainer.node_rank,
        trainer.world_size,
        trainer.world_size // max(trainer.num_nodes, 1),
    )


def _limits(trainer: Trainer) -> Limits:
    def positive(value: float | None) -> int | None:
        return int(value) if value is not None and 0 < value < float("inf") else None

    return Limits(
        positive(trainer.max_steps),
        positive(trainer.max_epochs),
        compat.max_seconds(trainer),
        positive(trainer.num_training_batches),
        trainer.accumulate_grad_batches,
    )
