"""The base of the profilers: windows of batches, each recorded into one file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_perf.errors import ConfigError, RecorderBusy, describe, warn
from lightning_perf.profilers.claim import claim, release
from lightning_perf.schedule import FOREVER, Cyclic, Schedule, as_schedule
from lightning_perf.schedule.checks import rank_list
from lightning_perf.trace import TraceWriter, check_names, distinct_run_name
from lightning_perf.trainer.hooks import PerfCallback

if TYPE_CHECKING:
    from lightning_perf.moment import Moment
    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trainer.driver import Driver

Tick = Callable[[], None]
Finish = Callable[[], None]
#: Starts a recorder; yields what to call after each batch, or None; stops it; returns what is left
#: to do before the file is whole, for the worker thread, or None.
Recording = Generator[Tick | None, None, Finish | None]

#: Batches that a schedule's lead is searched for at most.
_MOST_LEAD = 100


@dataclass(slots=True)
class _Window:
    """A recorder at work."""

    recording: Recording
    tick: Tick | None
    path: Path
    stage: str
    window: Hashable
    #: Batches still to come before the window begins.
    warmup: int
    batches: int = 0

    def count(self) -> None:
        """One more batch has ended."""
        if self.warmup:
            self.warmup -= 1
        else:
            self.batches += 1

    def goes_on(self, window: Hashable | None, most: int) -> bool:
        """Whether the batch that comes next belongs into the same file."""
        warming = self.warmup > 0 and window is None
        return warming or (self.window == window and self.batches < most)


class Profiler(PerfCallback):
    """Records the batches of each window of a schedule; subclasses write ``record``.

    A recording opens at the end of the batch before its window, so that the window's first fetch
    and transfer are in it. It ends with its window, after ``batches_per_trace`` batches (the rest
    of the window goes into files of its own), where the stage changes or ends, and on an
    exception. The finished file is compressed and uploaded off the training thread.

    Args:
        schedule: Which batches to record; by default ``Cyclic()``: batches 1 to 4 of each stage.
        ranks: Global ranks that record, one or more; None for all.
        output_path_prefix: The folder that ``folder`` lies under; by default the trainer's
            ``default_root_dir``.
        folder: Format string of the folder: ``{run_name} {rank} {local_rank} {world_size}
            {local_world_size} {node_rank}``. Stages other than train write into a folder within
            it.
        filename: Format string of the file, with ``{stage} {epoch} {batch} {batch_in_epoch}
            {sample} {sample_in_epoch} {token} {token_in_epoch} {step} {total_wct} {epoch_wct}
            {batch_wct}`` besides.
        remote_file_name: The same for the artifact's name in MLflow; None uploads nothing.
        overwrite: Whether files of an earlier run may be replaced.
        compress: Whether the file is gzipped.
        num_traces_to_keep: How many files stay here once they are uploaded; -1 keeps all.
        batches_per_trace: The most batches that one file holds.

    Raises:
        ConfigError: A value that cannot work.
    """

    keeps_progress = False
    #: Whether the recorder wants batches to warm up in before its window.
    warms_up: ClassVar[bool] = False

    def __init__(
        self,
        schedule: Schedule | str | None,
        ranks: list[int] | int | None,
        output_path_prefix: str | None,
        folder: str,
        filename: str,
        remote_file_name: str | None,
        overwrite: bool,
        compress: bool,
        num_traces_to_keep: int,
        batches_per_trace: int,
    ) -> None:
        super().__init__()
        self.schedule = as_schedule(schedule, default=Cyclic())
        self.ranks = None if ranks is None else rank_list("ranks", ranks)
        if batches_per_trace < 1:
            problem = "leaves no batch to record"
            raise ConfigError("batches_per_trace", batches_per_trace, problem, "20")
        check_names(folder, filename, remote_file_name, num_traces_to_keep)
        self.output_path_prefix = output_path_prefix
        self.folder, self.filename, self.remote_file_name = folder, filename, remote_file_name
        self.overwrite, self.compress = overwrite, compress
        self.num_traces_to_keep = num_traces_to_keep
        self.batches_per_trace = batches_per_trace
        self._writer: TraceWriter | None = None
        self._open: _Window | None = None
        self._reopen = False
        self._told: set[type] = set()
        # Batches before this one need not be looked at.
        self._asleep_until = 0

    @abstractmethod
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        """Record from the first ``next`` to the second, into one file.

        Args:
            path: Where the file belongs.
            driver: The run, for metadata.
            warmup: Batches to come before the window; 0 unless ``warms_up``.
        """

    @cached_property
    @override
    def state_key(self) -> str:
        return f"lightning_perf.{type(self).__name__}.{self.folder}.{self.filename}"

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """When each trace was saved, and its path at the index of the rank that wrote it."""
        return self._writer.saved_traces if self._writer is not None else []

    # -- the verbs --------------------------------------------------------------------------------

    @override
    def prepare(self, driver: Driver) -> None:
        self._open, self._reopen = None, False
        self._told.clear()
        self._refuse_ranks(driver)
        self.schedule.validate(driver.limits)
        self.schedule.setup(driver.context)
        if self.ranks is not None and driver.ranks.global_rank not in self.ranks:
            self._writer = None
            return
        self._writer = self.new_writer(driver, self.filename, self.remote_file_name, self.compress)

    @override
    def on_start(self, driver: Driver) -> None:
        self._asleep_until = 0 if self._writer is not None else FOREVER
        self._stop(driver)  # validation inside of fit cuts the training window
        if self._writer is None:
            return
        if not driver.nested:
            inside = ["validate"] if driver.stage == "train" else []
            now = {stage: driver.progress.timestamp(stage) for stage in [driver.stage, *inside]}
            self._writer.check(now, resumes=driver.trainer.ckpt_path is not None)
        self.schedule.observe(driver.moment)
        self._turn(driver)

    @override
    def before_batch(self, driver: Driver, batch: Any) -> None:
        if self._reopen:
            self._reopen = False
            self._turn(driver)

    @override
    def after_batch(self, driver: Driver, batch: Any) -> None:
        if driver.counters.batch < self._asleep_until:
            return
        if self._open is not None:
            self._open.count()
        self.schedule.observe(driver.moment)
        self._turn(driver)

    @override
    def on_end(self, driver: Driver) -> None:
        self._stop(driver)
        # After validation inside of fit, the training window goes on with its next batch.
        self._reopen = driver.nested and self._writer is not None

    @override
    def close(self, driver: Driver, reason: str) -> None:
        self._stop(driver, cut_short=reason == "exception")
        self.schedule.close()

    # -- files ------------------------------------------------------------------------------------

    def new_writer(
        self, driver: Driver, filename: str, remote_file_name: str | None, compress: bool
    ) -> TraceWriter:
        """A pipe into this profiler's folder, which the end of the run closes.

        Args:
            driver: The run.
            filename: As the profiler's own.
            remote_file_name: As the profiler's own.
            compress: Whether the files are gzipped.
        """
        root = Path(self.output_path_prefix or driver.trainer.default_root_dir)
        writer = TraceWriter(
            driver.worker,
            root,
            self.folder,
            filename,
            remote_file_name,
            driver.ranks,
            distinct_run_name(root, self.folder, driver.ranks, driver.run_name, driver.identity),
            compress,
            overwrite=self.overwrite,
            num_traces_to_keep=self.num_traces_to_keep,
            upload=driver.upload,
            upload_target=driver.upload_target,
        )
        # Once the worker has stopped, the writer places here what a hung server held back.
        driver.at_end(writer.close)
        return writer

    def save(self, path: Path, timestamp: Timestamp, stage: str, finish: Finish | None) -> None:
        """Hand a recording over; override it to make more files of it.

        Args:
            path: Where it was recorded.
            timestamp: When its window ended.
            stage: What was recorded.
            finish: What makes it whole.
        """
        assert self._writer is not None  # made before any window opened
        self._writer.write(path, timestamp, stage, finish)

    # -- windows ----------------------------------------------------------------------------------

    def _turn(self, driver: Driver) -> None:
        """Open, go on or close, as the batch asks that comes next."""
        moment, running = driver.moment, self._open
        over = driver.stage == "train" and moment.fraction == 1.0  # no batch comes any more
        window = None if over else self.schedule.window(moment)
        if running is not None:
            if running.goes_on(window, self.batches_per_trace):
                if running.tick is not None:
                    running.tick()
                return
            self._stop(driver)
        if window is not None:
            self._start(driver, window, warmup=0)
        elif not over:
            self._look_ahead(driver, moment)

    def _look_ahead(self, driver: Driver, moment: Moment) -> None:
        """Start ahead of a window that can be foreseen, or sleep until one may be."""
        lead = min(self.schedule.lead, _MOST_LEAD) if self.warms_up else 0
        quiet_until, ahead = self.schedule.quiet_until(moment), moment
        near = quiet_until - lead <= moment.timestamp.batch
        for batches in range(1, lead + 1 if near else 1):
            ahead = ahead.ahead(1)
            window = self.schedule.window(ahead)
            if window is not None:
                self._start(driver, window, warmup=batches)
                return
        if not self.schedule.watches:
            self._asleep_until = quiet_until - lead

    def _start(self, driver: Driver, window: Hashable, warmup: int) -> None:
        assert self._writer is not None
        with driver.aside():
            try:
                path = self._writer.spool(driver.stage)
                recording = self.record(path, driver, warmup)
                claim(self)
                tick = next(recording)
            except (RecorderBusy, OSError) as error:
                release(self)
                self._leave_out(error)
                return
            except BaseException:
                release(self)
                raise
        self._open = _Window(recording, tick, path, driver.stage, window, warmup)

    def _leave_out(self, error: RecorderBusy | OSError) -> None:
        """One window less; the next one is tried again, and what is wrong is said once."""
        kind = RecorderBusy if isinstance(error, RecorderBusy) else OSError
        if kind in self._told:
            return
        self._told.add(kind)
        name = type(self).__name__
        if kind is RecorderBusy:
            warn(f"{error} Windows of {name} that fall into it are left out.")
        else:
            warn(f"{name} cannot write ({describe(error)}): windows are left out until it can.")

    def _stop(self, driver: Driver, cut_short: bool = False) -> None:
        running, self._open = self._open, None
        if running is None:
            return
        with driver.aside():
            try:
                finish = _run_out(running.recording)
            except OSError as error:
                self._leave_out(error)
                return
            finally:
                release(self)
        if running.warmup or not (running.batches or cut_short):
            running.path.unlink(missing_ok=True)
            return
        stamp = driver.progress.timestamp(running.stage)
        self.save(running.path, stamp, running.stage, finish)

    def _refuse_ranks(self, driver: Driver) -> None:
        world = driver.ranks.world_size
        if self.ranks is not None and max(self.ranks) >= world:
            problem = f"names a rank beyond the {world} of this run"
            raise ConfigError("ranks", self.ranks, problem, "[0]")


def _run_out(recording: Recording) -> Finish | None:
    try:
        next(recording)
    except StopIteration as stopped:
        finish: Finish | None = stopped.value
        return finish
    raise RuntimeError("record() yielded twice")
