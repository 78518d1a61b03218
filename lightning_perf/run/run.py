"""What a run and its callbacks see of each other; the engine behind it is `RunContext`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.background import Worker
    from lightning_perf.core.progress import Limits, Moment, Ranks, Timestamp
    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.destination import Reporting
    from lightning_perf.run.spans import SpanRecorder
    from lightning_perf.run.stages import Progress
    from lightning_perf.run.windows import Signal, Subscriber, Windows
    from lightning_perf.schedule import Context
    from lightning_perf.system import Sampler
    from lightning_perf.timing.totals import Totals
    from lightning_perf.traces.folder import TraceOptions
    from lightning_perf.traces.writer import TraceWriter


class Run(Protocol):
    """A run, as its callbacks and profilers see it: facts, and what they may ask of it.

    Facts change as the run goes on. Methods are called on the training thread.
    """

    #: Lightning's Trainer, with its loggers, and the module.
    trainer: Trainer
    module: LightningModule
    #: The callbacks of lightning_perf on this trainer.
    members: list[Any]
    #: This process among all, and the limits of the current epoch.
    ranks: Ranks
    limits: Limits
    #: The progress of all stages; it continues when a run is resumed.
    progress: Progress
    #: The thread that makes files.
    file_worker: Worker

    # -- facts --------------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        """The run's name in files and reports, the same on every rank."""

    @property
    def stage(self) -> str:
        """The running stage, by Lightning's name; empty between stages."""

    @property
    def nested(self) -> bool:
        """Whether the stage is validation inside of fit."""

    @property
    def batch(self) -> int:
        """Batches of the stage that have ended, as in ``timestamp``."""

    @property
    def begins(self) -> bool:
        """Whether the last batch was the first one since the stage started."""

    @property
    def cut_short(self) -> bool:
        """Whether the last epoch ended before its predicted length."""

    @property
    def logs_now(self) -> bool:
        """Whether Lightning logs at the last batch: the same on every rank."""

    @property
    def step(self) -> int:
        """The step at which loggers write what is reported now."""

    @property
    def timestamp(self) -> Timestamp:
        """The progress of the stage."""

    @property
    def moment(self) -> Moment:
        """The moment before the next batch, which schedules are asked about."""

    @property
    def schedule_context(self) -> Context:
        """What schedules get at their set-up."""

    @property
    def sharing(self) -> int:
        """How many ranks train on one batch."""

    @property
    def sampler(self) -> Sampler | None:
        """The sampler of this node's hardware, on its first rank; None on the others."""

    @property
    def reached(self) -> list[str]:
        """Codes and severities of the verdicts so far, for schedules."""

    # -- measurements -------------------------------------------------------------------------

    def subscribe(self, callback: Subscriber, columns: Sequence[str]) -> None:
        """Deliver windows of some columns to a callback; ConfigError for an unknown one."""

    def offer(self, prefix: str, signal: Signal) -> None:
        """Offer a signal, whose columns begin with the prefix, to subscribers."""

    def offer_rolling(self, prefix: str, batches: int) -> None:
        """Offer the totals of the last batches."""

    def listen(self, listener: Callable[[str, Sequence[BatchRecord]], None]) -> None:
        """Call a function with the stage and records of batches, once their times are known."""

    def require_flops(self, peak: float | str | None, argument: str) -> None:
        """Count FLOPs; the peak of one device, if given, comes from an argument of this name."""

    def check_mfu(self, mfu: float) -> None:
        """Warn once if a utilization is above 1."""

    def training_mfu(self) -> float | None:
        """The utilization in training so far."""

    def require_times(self) -> SpanRecorder:
        """Measure times by category from now on."""

    def times(self, *, latest: bool = False) -> Totals:
        """Times by category since they were first required, or until the latest report."""

    def exclude_from_batch_time(self) -> AbstractContextManager[None]:
        """Leave the time of a block out of the time of its batch."""

    def share_batches(self, data_parallel_size: int) -> None:
        """Count samples, tokens and declared FLOPs once where several ranks train on one batch."""

    # -- outputs ------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics to every logger of the trainer, from rank 0."""

    def log_from_worker(self, metrics: Mapping[str, float], step: int) -> None:
        """The same from another thread; loggers that are not thread-safe get them at `deliver`."""

    def deliver(self) -> None:
        """Pass metrics of `log_from_worker` on."""

    def finish_reports(self, reason: str) -> None:
        """Wait a bounded time for the last reports of all ranks; not after an exception."""

    def write_files(
        self, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str, **options: Any
    ) -> None:
        """Write files of the run, if it has something to leave, and upload them."""

    def new_writer(self, options: TraceOptions, prefix: str | None = None) -> TraceWriter:
        """A writer of recordings."""

    def on_close(self, finish: Callable[[], None]) -> None:
        """Call a function at the end of the run, after the workers have stopped."""


class Engine(Run, Protocol):
    """A run, as its summary sees it."""

    windows: Windows
    reporting: Reporting

    @property
    def leaves_files(self) -> bool:
        """Whether this run has something to leave: files, and a description."""

    def setup(self) -> dict[str, object]:
        """Device, its peak if it is known, precision and strategy."""


class Member(Protocol):
    """A callback, as its run sees it: a `PerfCallback`."""

    keeps_progress: bool
    show_summary: bool
    _disabled: bool
    units: Mapping[str, str]

    @property
    def state_key(self) -> str:
        """Its key in checkpoints."""

    def overrides(self, method: str) -> bool:
        """Whether it has a lifecycle method of its own."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of it; None if that fails."""

    def summary_sections(self) -> Mapping[str, Any]:
        """What it adds to the summary."""

    def disable(self, method: str, error: Exception) -> None:
        """Switch it off for the rest of the run."""

    def leave(self, reason: str) -> None:
        """Leave the run."""
