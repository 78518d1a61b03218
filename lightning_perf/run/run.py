"""A run as its callbacks and profilers see it: its state, and the services that it offers."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_perf.background import Worker
from lightning_perf.errors import ConfigError
from lightning_perf.flops import formula_for
from lightning_perf.run import compat
from lightning_perf.run.attempts import AttemptLog
from lightning_perf.run.batches import BatchTotals
from lightning_perf.run.destination import Reporting
from lightning_perf.run.flop_meter import FlopMeter
from lightning_perf.run.mailbox import Mailbox
from lightning_perf.run.profiler import Spans
from lightning_perf.run.signals import (
    GPU_COLUMNS,
    FormulaSignal,
    MemorySignal,
    NodeSignal,
    ProgressSignal,
    SpanSignal,
    WaitSignal,
    node_gpus,
    node_sampler,
)
from lightning_perf.run.stages import Counters, Progress, StageStack
from lightning_perf.run.windows import Windows
from lightning_perf.schedule import Context
from lightning_perf.timing.cuda_events import DeviceTimer, clocked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.core.progress import Moment, Timestamp
    from lightning_perf.run.windows import Signal
    from lightning_perf.system import Sampler

#: Functions other than fit that take fewer seconds show no summary and may leave no files.
LONG = 10.0
# A trainer's progress outlives its runs, which live for one fit or test each.
_PROGRESS: WeakKeyDictionary[Trainer, Progress] = WeakKeyDictionary()


class Run:
    """A run, as its callbacks and profilers see it: its state, and the services that it offers.

    The state changes while the run continues. Methods are called on the training thread.
    ``docs/windows.md`` lists what callbacks use; only `run/` uses all other attributes.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        #: Lightning's Trainer, with its loggers, and the module.
        self.trainer, self.module = trainer, module
        #: The callbacks of lightning_perf on this trainer, in the order in which they are called.
        self.members: list[Any] = []
        #: This process among all, and the limits of the current epoch.
        self.ranks, self.limits = compat.ranks_of(trainer), compat.limits_of(trainer)
        #: The progress of all stages; it continues when a run is resumed.
        self.progress = _PROGRESS.setdefault(trainer, Progress())
        #: Whether Lightning logs at the last batch: the same on every rank.
        self.logs_now = False
        #: Codes and severities of the verdicts so far, for schedules.
        self.reached: list[str] = []
        #: One thread talks to servers, the other makes files.
        self.worker, self.file_worker = Worker("lightning_perf"), Worker("lightning_perf maker")
        self.reporting = Reporting(trainer, self.worker, self.file_worker)
        #: The run's name in files and reports, the same on every rank.
        self.run_name = self.reporting.run_name
        # The meter holds no reference to the run: the patched strategy would keep it alive.
        self.meter = FlopMeter(trainer, module)
        timer = DeviceTimer() if clocked(trainer.strategy.root_device) else None
        self.stages = StageStack(self.progress, self.ranks, self.run_name, timer)
        self.spans = Spans(trainer, module, timer)
        self.batches = BatchTotals(timer, on_change=self.meter.check)
        self.share_batches(compat.data_parallel_size(trainer))
        self.windows = Windows(trainer, self.stages, self.batches, self.spans, self.log)
        #: The processes of the other ranks on this node, by rank.
        self.processes: dict[int, int] = {}
        #: Messages to the other ranks; None without any.
        self.mail: Mailbox | None = None
        #: Identifies this run of this process; the same on every rank.
        self.serial = os.urandom(6).hex()
        self.windows.sources = self._sources()
        self.require_flops, self.require_times = self.meter.require, self.spans.require
        #: Deliver windows of some columns to a callback, and what is kept of them.
        self.subscribe, self.log_of = self.windows.subscribe, self.windows.log_of
        #: Call a function with the stage and records of batches, once their times are known.
        self.listen = self.batches.listeners.append
        #: Call a function at the end of the run, after the workers have stopped.
        self.on_close = self.reporting.closing.append
        #: Call a function with the metrics and the step of what this rank logs, on any thread.
        self.on_log = self.reporting.receivers.append
        #: Keep the metrics of some keys from the loggers.
        self.leave_out = self.reporting.left_out.update
        #: Times by category since they were first required.
        self.times = self.spans.totals
        self.exclude_from_batch_time = self.stages.exclude_from_batch_time
        self.log_from_worker, self.deliver = self.reporting.log_from_worker, self.reporting.deliver
        self.new_writer = self.reporting.new_writer
        self.check_mfu = self.meter.peaks.warn_if_above_peak
        #: The clock in hertz at which the device's peak holds, if it is known.
        self.peak_clock = self.meter.peaks.clock
        self._started = monotonic()
        now = datetime.now(UTC)  # noqa: TID251 (as people read it)
        #: The same moment in local time, ISO 8601; it distinguishes evaluations in a summary.
        self.began = now.astimezone().isoformat(timespec="milliseconds")
        #: The file of this process for later ones that resume the training.
        self.attempt = AttemptLog()

    # -- facts ------------------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """The running stage, by Lightning's name; empty between stages."""
        return self.stages.stage

    @property
    def nested(self) -> bool:
        """Whether the stage is validation inside of fit."""
        return self.stages.nested

    @property
    def counters(self) -> Counters:
        """The counts of the stage, such as ``batch``: the batches that have ended."""
        return self.stages.counters

    @property
    def timestamp(self) -> Timestamp:
        """The counts of the stage as a value."""
        return self.counters.timestamp()

    @property
    def moment(self) -> Moment:
        """The moment before the next batch, from which schedules decide."""
        return self.stages.moment

    @property
    def step(self) -> int:
        """The step at which loggers write what is reported now."""
        return self.stages.step

    @property
    def schedule_context(self) -> Context:
        """What schedules get at their set-up."""
        trainer: Any = self.trainer
        tags = self.reporting.tags
        # A trial run has no loggers.
        read_tags = tags.read if tags is not None else dict if trainer.fast_dev_run else None
        # Read from the Trainer, because callbacks join the run one after the other.
        reachable = {code for each in trainer.callbacks for code in getattr(each, "reaches", ())}
        return Context(self.ranks, self.limits, read_tags, self.reached, reachable)

    @cached_property
    def sampler(self) -> Sampler | None:
        """The sampler of this node's hardware, on its first rank; None on the others."""
        return node_sampler(self.trainer, self.ranks, {*self.processes.values()})

    @property
    def is_monitored(self) -> bool:
        """Whether a callback of Lightning monitors a metric of ours."""
        return bool(compat.monitored(self.trainer))

    @property
    def leaves_files(self) -> bool:
        """Whether this run has something to leave: files, and a description.

        Not before its first batch, so that a failed start changes nothing of an earlier run. Not
        for a short prediction or test without a logger: packages run many of them.
        """
        alone = self.trainer.state.fn != "fit" and not self.trainer.loggers
        short = alone and monotonic() - self._started < LONG
        return self.windows.ran and not short

    # -- measurements -----------------------------------------------------------------------------

    def offer(self, prefix: str, signal: Signal) -> None:
        """Offer a signal, whose columns begin with the prefix, to subscribers."""
        self.windows.sources[prefix] = lambda: signal

    def offer_formula(self, formula: object) -> Callable[[Any], None]:
        """Offer the signal ``formula``; returns what applies the formula to a batch."""
        signal = FormulaSignal(formula_for(formula, self.module), self.stages, self.batches)
        self.offer("formula", signal)
        return signal.count

    def offer_rolling(self, size: int) -> str:
        """Offer the signal of the last batches, before training starts; returns its prefix."""
        prefix = f"rolling_{size}"
        self.offer(prefix, self.batches.rolling(size))
        return prefix

    def share_batches(self, data_parallel_size: int) -> None:
        """Count samples, tokens and declared FLOPs once where several ranks train on one batch."""
        ranks = self.ranks.world_size
        if ranks % data_parallel_size:
            problem = f"does not divide the world size, {ranks}"
            raise ConfigError("data_parallel_size", data_parallel_size, problem, str(ranks))
        #: How many ranks train on one batch.
        self.sharing = self.batches.sharing = self.meter.sharing = ranks // data_parallel_size

    def training_mfu(self) -> float | None:
        """The utilization in training so far."""
        if not self.meter.wanted:
            return None
        sums = self.batches.stages["train"].edges[-1]
        seconds, ideal = sums.flops_seconds, sums.flops_ideal_seconds
        return ideal / seconds if ideal and seconds else None

    # -- outputs ----------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics to every logger of the trainer, from rank 0, and show them on every rank."""
        compat.show_metrics(self.trainer, metrics, bound=bool(self.meter.not_counted))
        self.reporting.log(metrics, step)

    def refresh_summary(self) -> None:
        """Write the summary and the page as they are now; on any thread, while training hangs."""
        raise NotImplementedError

    def note_summary(self) -> None:
        """Write the summary so far, on the thread that makes files."""
        raise NotImplementedError

    def write_files(
        self, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str, **options: Any
    ) -> None:
        """Write files of the run, if it has something to leave: `Reporting.write_files`."""
        if self.leaves_files:
            stamp = self.progress.timestamp(stage)
            self.reporting.write_files(folder, files, stage, stamp, **options)

    def setup(self) -> dict[str, object]:
        """Device, its peak if it is known, precision and strategy."""
        setup = compat.setup_of(self.trainer)
        if self.meter.wanted:
            setup |= self.meter.peaks.setup()
        if self.meter.not_counted:
            setup["flops_not_counted"] = self.meter.not_counted
        return setup

    def _sources(self) -> dict[str, Callable[[], Signal]]:
        """Functions that start the signals, called when a callback subscribes to their columns.

        With several ranks all call this together.
        """
        node, device = self.ranks.node_rank, self.trainer.strategy.root_device
        gpus: Callable[[], int] = partial(node_gpus, self.trainer, self.ranks)
        if self.ranks.world_size > 1:
            # Nodes may differ, but all ranks must have the same columns. They agree now, because a
            # callback may fail on one rank before it subscribes.
            gatherer = self.windows.gatherer
            self.mail = gatherer.mail = Mailbox(self.trainer.num_nodes)
            table = gatherer.exchange([gpus(), node, os.getpid(), *self.mail.address])
            self.mail.connect(self.ranks.global_rank, [address for _, _, _, *address in table])
            self.serial = f"{int(table[0][3]):012x}"  # a random key
            slots = max(count for count, *_ in table)
            self.processes = {
                rank: int(pid) for rank, (_, its, pid, *_) in enumerate(table) if its == node
            }
            gatherer.width += slots * GPU_COLUMNS
            gpus = partial(int, slots)

        def flops() -> BatchTotals:
            self.meter.require(None, "peak_flops")
            return self.batches.start()

        def sampler() -> Sampler | None:
            own = self.sampler
            if own is not None and not own.subscribed:
                own.subscribe("windows")
                self.on_close(partial(own.unsubscribe, "windows"))
            return own

        return {
            "batch": self.batches.start,
            "flops": flops,
            "progress": lambda: ProgressSignal(self.progress),
            "timings": lambda: SpanSignal(self.spans.require()),
            "waits": lambda: WaitSignal(self.spans.require(), node),
            "system": lambda: NodeSignal(sampler(), gpus()),
            "memory": lambda: MemorySignal(device, sampler(), node),
        }
