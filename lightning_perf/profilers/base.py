"""The base class of profilers: windows of batches, each recorded into one file."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from typing_extensions import override

from lightning_perf.checks import flag, rank_list, whole
from lightning_perf.errors import ConfigError, RecorderBusy, describe, warn
from lightning_perf.profilers import tools
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.compat import evaluation_ends, resumes, validates_next
from lightning_perf.run.termination import signals_held
from lightning_perf.schedule import (
    FOREVER,
    Cyclic,
    GlobalRank,
    HasTag,
    LocalRank,
    OnSignal,
    Schedule,
    as_schedule,
    walk,
)
from lightning_perf.traces.names import file_format, folder_format, remote_format
from lightning_perf.traces.writer import TraceOptions, TraceWriter
from lightning_perf.tracking.tracker import check_store
from lightning_perf.units import counted

if TYPE_CHECKING:
    from lightning_perf.core.progress import Moment, Timestamp
    from lightning_perf.run.run import Run

Tick = Callable[[], None]


class Recorded:
    """The work that remains after a recorder has stopped; it runs on a worker thread.

    It must not need the training thread, because the next window may already be open.

    Args:
        finish: Completes the file: the path that ``record`` was given. Called once, before all
            others, and again if it failed.
        further: Writes further files, by their name in ``Profiler.further_files``.
        whole: Whether the file is complete, as far as the recorder knows.
    """

    def __init__(
        self,
        finish: Callable[[], object] = lambda: None,
        further: Mapping[str, Callable[[Path], object]] | None = None,
        whole: bool = True,
    ) -> None:
        self.further, self.whole = further or {}, whole
        self._finish = cache(finish)
        # At the end of a run the training thread runs the remaining jobs of the worker. It must
        # not move the recording while the worker still reads it.
        self._turn = RLock()

    def make(self, name: str, target: Path) -> None:
        """Write one of the further files."""
        with self._turn:
            self._finish()
            self.further[name](target)

    def complete(self) -> None:
        """Complete the recording, once no further file is being made from it."""
        with self._turn:
            self._finish()


#: Starts a recorder; yields a function to call after each batch, or None; stops the recorder.
Recording = Generator[Tick | None, None, Recorded | None]


@dataclass(eq=False)
class OpenRecording:
    """A recording in progress, started by its construction; a process has one at a time.

    Raises:
        RecorderBusy: Another recording is in progress.
    """

    profiler: Profiler
    recording: Recording
    path: Path
    stage: str
    window: Hashable
    #: Number of batches before the window begins.
    warmup: int
    #: Batches of the window so far.
    batches: int = 0
    #: The open recording of this process.
    current: ClassVar[OpenRecording | None] = None
    #: The recordings that this process has begun.
    opened: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if (current := OpenRecording.current) is not None:
            own, other = (type(each.profiler).__name__ for each in (self, current))
            raise RecorderBusy(own, f"another {other}" if other == own else other)
        OpenRecording.current = self
        OpenRecording.opened += 1
        try:
            if not hasattr(self.recording, "__next__"):
                raise TypeError("record() is not a generator: yield between start and stop")
            self.tick = next(self.recording)
        except BaseException:
            OpenRecording.current = None
            raise

    def count(self) -> None:
        """Count a batch that has ended."""
        if self.warmup:
            self.warmup -= 1
        else:
            self.batches += 1

    def includes(self, window: Hashable | None, most: int) -> bool:
        """Whether the next batch, which is in this window, belongs to this recording."""
        if self.warmup:  # a window that comes earlier than predicted is recorded without
            return window is None
        return self.window == window and self.batches < most

    def stop(self) -> Recorded:
        """Stop the recorder."""
        try:
            next(self.recording)
        except StopIteration as stopped:
            return stopped.value if isinstance(stopped.value, Recorded) else Recorded()
        finally:
            OpenRecording.current = None
        raise RuntimeError("record() yielded twice: yield once, a function to call per batch")


@dataclass(eq=False)
class Session:
    """The state of one run, on a rank that records."""

    writer: TraceWriter
    #: The writers of files that are made of a recording, by their name in `further_files`.
    further: dict[str, TraceWriter]
    recording: OpenRecording | None = None
    #: Whether there was a window, recorded or not.
    opened: bool = False
    #: Whether the next batch comes after validation inside of fit.
    reopens: bool = False
    #: No window begins before this batch.
    asleep_until: float = math.inf
    #: Stage and number of the last batch that was counted.
    counted: tuple[str, int] = ("", 0)
    #: Kinds of errors that were reported.
    warned: set[str] = field(default_factory=set)
    #: The end of training.
    ended: Moment | None = None


#: Files that are made of a recording, which exists without them.
_OPTIONAL = (".html", ".txt", ".svg")
#: What makes a name different on each rank, or on each rank of a node.
_RANK = re.compile(r"\{(local_)?rank[:}]")
#: Maximum number of warm-up batches.
_MOST_WARMUP = 100


class Names(NamedTuple):
    """Format strings of the names of a file, here and at the upload targets."""

    local: str
    #: None disables the upload.
    remote: str | None
    #: Whether the file is gzipped.
    compress: bool = False


class Profiler(PerfCallback):
    """Records the batches of each window of a schedule; subclasses implement ``record``.

    A recording opens at the end of the batch before its window, so that it contains the fetch and
    the transfer of the first batch. It ends with its window, after ``batches_per_trace`` batches
    (the rest of the window goes into further files), when the stage changes or ends, and on an
    exception. The file is compressed and uploaded on a worker thread.

    Args:
        schedule: The batches to record; by default ``Cyclic()``: batches 1 to 4 of each stage.
        ranks: Global ranks that record, one or more; None for all.
        output_path_prefix: The parent folder of ``folder``; by default the trainer's
            ``default_root_dir``.
        folder: Format string of the folder: ``{run_name} {rank} {local_rank} {world_size}
            {local_world_size} {node_rank}``. Stages other than train have a subfolder.
        filename: Format string of the file, which may also have ``{stage} {epoch} {batch}
            {batch_in_epoch} {sample} {sample_in_epoch} {token} {token_in_epoch} {step} {total_wct}
            {epoch_wct} {batch_wct}``.
        remote_file_name: Format string of the artifact in MLflow, or a URL of a store that fsspec
            supports, such as ``s3://bucket/{run_name}/rank{rank}.{batch}.json``; None disables the
            upload.
        overwrite: Whether files of an earlier run may be replaced.
        compress: Whether the file is gzipped; a file whose name ends in ``.gz`` always is.
        num_traces_to_keep: Number of local files to keep once they are uploaded; -1 keeps all.
        batches_per_trace: Maximum number of batches per file.
        **kwargs: Options of the tool, if a subclass has such: see ``tool_options``.

    Raises:
        ConfigError: An invalid value, or an argument that the profiler does not have.

    Example:
        >>> from time import perf_counter
        >>> class Stopwatch(Profiler):
        ...     def record(self, path, context, warmup):
        ...         begun = perf_counter()
        ...         yield None
        ...         path.write_text(f"{perf_counter() - begun} s")
        >>> profiler = Stopwatch("every 100ba for 3ba", filename="rank{rank}.{batch}.txt")
    """

    keeps_progress = False
    #: Whether the recorder needs warm-up batches before its window.
    warms_up: ClassVar[bool] = False

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        *,
        output_path_prefix: str | None = None,
        folder: str = "{run_name}/traces",
        filename: str = "rank{rank}.{batch}",
        remote_file_name: str | None = None,
        overwrite: bool = False,
        compress: bool = False,
        num_traces_to_keep: int = -1,
        batches_per_trace: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._session: Session | None = None
        self.options = tools.check_options(type(self), kwargs, self.tool_options())
        self.schedule = as_schedule(schedule, default=Cyclic())
        self.ranks = None if ranks is None else rank_list("ranks", ranks)
        folder, output_path_prefix = _text(folder), _text(output_path_prefix)
        self.output_path_prefix = output_path_prefix
        self.folder, self.filename, self.remote_file_name = folder, filename, remote_file_name
        if not isinstance(output_path_prefix, str | None):
            problem = "is not a string"
            raise ConfigError("output_path_prefix", output_path_prefix, problem, '"profiles"')
        folder_format(folder)
        file_format(filename)
        if remote_file_name is not None:
            remote_format(remote_file_name)
        check_store(remote_file_name)
        check_store(output_path_prefix, "output_path_prefix", "'s3://bucket/runs'")
        self.overwrite, self.compress = flag("overwrite", overwrite), flag("compress", compress)
        self.num_traces_to_keep = whole("num_traces_to_keep", num_traces_to_keep, -1, "5")
        self.batches_per_trace = whole("batches_per_trace", batches_per_trace, 1, "20")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = tools.signature_of(cls)  # type: ignore[attr-defined]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_session": None}

    # -- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def record(self, path: Path, context: Run, warmup: int) -> Recording:
        """Start the recorder, yield, and stop it, which leaves one file.

        It yields once: a function to call after each batch, or None. It may return ``Recorded``,
        work to do later on a worker thread; any other value is ignored.

        Args:
            path: The file to write, hidden until it is complete. Compression and upload follow.
            context: The run, for metadata.
            warmup: Number of batches before the window; 0 unless ``warms_up``.

        Raises:
            RecorderBusy: Another recorder is active; the window is skipped.
        """

    def tool_options(self) -> Mapping[str, Any]:
        """The arguments of the tool that the constructor passes on, with their defaults."""
        return {}

    @property
    def further_files(self) -> Mapping[str, Names]:
        """The names of files made of a recording, such as pages.

        The keys are those of ``Recorded.further``. For names like those of the recording, see
        ``beside``.
        """
        return {}

    def beside(self, suffix: str) -> Names:
        """The names of a recording, with another suffix, such as ``.html``."""
        remote = self.remote_file_name
        return Names(_with_suffix(self.filename, suffix), remote and _with_suffix(remote, suffix))

    @cached_property
    @override
    def state_key(self) -> str:
        # Lightning requires unique keys. A profiler has no state to restore.
        return f"lightning_perf.{type(self).__name__}.{self.folder}.{self.filename}.{id(self)}"

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """The time of each trace, and its path at the index of the rank that wrote it.

        At most ``num_traces_to_keep`` of all runs of this profiler, the latest last.
        """
        return [] if self._session is None else self._session.writer.saved_traces

    @property
    def saved_in_run(self) -> list[Path]:
        """The paths of this rank's traces of the current or last run."""
        return [] if self._session is None else self._session.writer.saved_in_run

    # -- lifecycle --------------------------------------------------------------------------------

    @override
    def prepare(self, context: Run) -> None:
        earlier, self._session = self._session, None
        self._check(context)
        self.schedule.setup(context.schedule_context)
        if self.ranks is not None:
            GlobalRank(self.ranks).setup(context.schedule_context)  # warns of unknown ranks
            if context.ranks.global_rank not in self.ranks:
                return
        # Closed before the writer of recordings, which moves the source of these files.
        further = {
            key: self.new_writer(context, names) for key, names in self.further_files.items()
        }
        names = self.filename, self.remote_file_name
        # A file whose name ends in .gz must be gzipped.
        compress = self.compress or any(name and name.endswith(".gz") for name in names)
        writer = self.new_writer(context, Names(*names, compress))
        self._session = Session(writer, further)
        if earlier is not None:
            writer.follow(earlier.writer)

    @override
    def on_start(self, context: Run) -> None:
        if (session := self._session) is None:
            return
        self._stop(context)  # validation inside of fit ends the training window
        if not context.nested:
            inside = ["validate"] if context.stage == "train" else []
            now = {stage: context.progress.timestamp(stage) for stage in [context.stage, *inside]}
            session.writer.check(now, resumes(context.trainer))
        self.schedule.observe(context.moment)
        self._turn(context)

    @override
    def on_epoch(self, context: Run) -> None:
        if (session := self._session) is None:
            return
        moment, running, most = context.moment, session.recording, self.batches_per_trace
        if context.counters.cut_short:  # the schedule has not seen the end of the last epoch
            self.schedule.observe(moment)
        continues = running is not None and running.includes(self.schedule.window(moment), most)
        if not (continues or session.reopens):
            self._turn(context)

    @override
    def before_batch(self, context: Run, batch: Any) -> None:
        if (session := self._session) is not None and session.reopens:
            session.reopens = False
            self.schedule.observe(context.moment)
            self._turn(context)

    @override
    def after_batch(self, context: Run, batch: Any) -> None:
        session = self._session
        if session is not None and context.counters.batch >= session.asleep_until:
            self._end_batch(context)

    @override
    def on_end(self, context: Run) -> None:
        if (session := self._session) is not None:
            self._stop(context)
            if context.stage == "train":
                session.ended = context.moment
            # After validation inside of fit, the training window continues with the next batch.
            session.reopens = context.nested

    @override
    def close(self, context: Run, reason: str) -> None:
        try:
            self._stop(context, cut_short=reason == "exception")
            if reason == "teardown" and (session := self._session) is not None:
                if not session.opened:
                    self._warn_of_no_window(context, session.ended)
                self._warn_of_late_signal()
        finally:  # a schedule may have replaced a signal handler
            self.schedule.close()

    # -- windows ----------------------------------------------------------------------------------

    def _end_batch(self, context: Run) -> None:
        """Count a batch, once, and decide about the next one."""
        session, counted = self._open_session, (context.stage, context.counters.batch)
        if session.counted == counted:
            return
        session.counted = counted
        if session.recording is not None:
            session.recording.count()
        self.schedule.observe(context.moment)
        self._turn(context)

    def _turn(self, context: Run) -> None:
        """Open, continue or close a recording, as the schedule says about the next batch."""
        moment, session = context.moment, self._open_session
        session.asleep_until, running = 0, session.recording
        stage, nested = context.stage, context.nested
        trained = stage == "train" and moment.fraction == 1.0
        evaluated = stage != "train" and evaluation_ends(context.trainer, stage, nested)
        window = None if trained else self.schedule.window(moment)
        if running is not None:
            if running.includes(window, self.batches_per_trace):
                # What follows the last batch before another stage belongs to its step.
                if running.tick is not None and not (
                    evaluated or (stage == "train" and validates_next(context.trainer))
                ):
                    running.tick()
                return
            self._stop(context)
        if trained or evaluated:
            return
        if window is not None:
            self._start(context, window)
        else:
            self._look_ahead(context, moment)

    def _look_ahead(self, context: Run, moment: Moment) -> None:
        """Start the warm-up for a predicted window, or set the batch before which none can open."""
        lead = min(self.schedule.lead, _MOST_WARMUP) if self.warms_up else 0
        quiet_until = self.schedule.quiet_until(moment)
        if quiet_until - lead <= moment.timestamp.batch:
            for batches in range(1, lead + 1):
                moment = moment.ahead(1)
                if (window := self.schedule.window(moment)) is not None:
                    self._start(context, window, warmup=batches)
                    return
        if not self.schedule.watches:
            self._open_session.asleep_until = quiet_until - lead

    @signals_held()  # Ctrl-C between two lines would lose a recording
    def _start(self, context: Run, window: Hashable, warmup: int = 0) -> None:
        session, stage = self._open_session, context.stage
        session.opened = session.opened or not warmup
        if (other := OpenRecording.current) is not None:
            other.profiler.give_way(context, warmup)
        with context.exclude_from_batch_time():
            try:
                path = session.writer.spool(stage)
                recording = self.record(path, context, warmup)
                session.recording = OpenRecording(self, recording, path, stage, window, warmup)
            except (RecorderBusy, OSError) as error:
                # A window that finds no time to warm up opens without.
                if not (warmup and isinstance(error, RecorderBusy)):
                    self._skip(error)

    def give_way(self, context: Run, warmup: int) -> None:
        """Another profiler starts a recording: close one of this profiler that ends here.

        Lightning calls that profiler first at the end of a batch. Its window, but not its
        ``warmup``, also ends a warm-up of this one.
        """
        session = self._session
        if session is None or session.recording is None or self._context is not context:
            return
        if session.recording.stage == context.stage:
            self.call(self._end_batch, context)
        running = session.recording
        if running is not None and (
            running.stage != context.stage or (running.warmup and not warmup)
        ):
            self._stop(context)

    @signals_held()
    def _stop(self, context: Run, cut_short: bool = False) -> None:
        """Close the open recording and save it, including the part of an interrupted batch."""
        session = self._session
        if session is None or (running := session.recording) is None:
            return
        session.recording = None
        with context.exclude_from_batch_time():
            try:
                recorded = running.stop()
            except OSError as error:
                session.writer.discard(running.path)
                self._skip(error)
                return
        if running.warmup or not (running.batches or cut_short):
            session.writer.discard(running.path)
            return
        session.opened = True
        stage = running.stage
        self.save(running.path, context.progress.timestamp(stage), stage, recorded)

    def _skip(self, error: RecorderBusy | OSError) -> None:
        """Warn, once per kind of error, that batches are not recorded."""
        name, warned = type(self).__name__, self._open_session.warned
        if isinstance(error, RecorderBusy):
            missing = f"Batches that both would record are missing from the traces of {name}."
            kind, message = "busy", f"{error} {missing}"
        else:
            kind = "disk"
            message = f"{name} cannot write ({describe(error)}): windows are left out until it can."
        if kind not in warned:
            warned.add(kind)
            warn(message)

    @property
    def _open_session(self) -> Session:
        """The session, on a rank that records."""
        assert self._session is not None  # otherwise no window is searched
        return self._session

    # -- files ------------------------------------------------------------------------------------

    def new_writer(self, context: Run, names: Names) -> TraceWriter:
        """The writer of recordings, or of files that are made of them."""
        options = TraceOptions(
            folder=self.folder,
            filename=names.local,
            remote_file_name=names.remote,
            compress=names.compress,
            overwrite=self.overwrite,
            num_traces_to_keep=self.num_traces_to_keep,
            optional=names.local.endswith(_OPTIONAL),
        )
        return context.new_writer(options, self.output_path_prefix)

    def save(self, path: Path, timestamp: Timestamp, stage: str, recorded: Recorded) -> None:
        """Hand a recording, and the files that are made of it, to their writers."""
        session = self._open_session
        # Further files first: the worker runs jobs in order, and the last one moves the recording.
        for name in recorded.further:
            if (writer := session.further.get(name)) is None:
                raise KeyError(f"{name} is in Recorded.further, but not in further_files")
            try:
                target = writer.spool(stage)
            except OSError as error:  # the recording itself is complete
                self._skip(error)
                continue
            writer.write(target, timestamp, stage, partial(recorded.make, name, target))
        session.writer.write(path, timestamp, stage, recorded.complete, recorded.whole)

    # -- checks and messages ----------------------------------------------------------------------

    def _check(self, context: Run) -> None:
        """Refuse two profilers of a kind that write to the same files."""
        if context.ranks.global_rank == 0:
            self._warn_of_ranks(context.ranks.world_size)
        for other in context.members:
            if type(other) is type(self) and other is not self and _place(other) == _place(self):
                problem = (
                    f"is also that of another {type(self).__name__} of this Trainer: give one of "
                    "them another `filename` or `folder`"
                )
                raise ConfigError("filename", self.filename, problem, f'"second.{self.filename}"')

    def _warn_of_ranks(self, world: int) -> None:
        """Warn of names that several ranks share."""
        kind, ranks = type(self).__name__, self.ranks or range(world)
        by_rank = any(isinstance(part, GlobalRank | LocalRank) for part in walk(self.schedule))
        if by_rank or sum(rank < world for rank in ranks) < 2:
            return
        local = f"{self.folder}/{self.filename}"
        names = {"filename": local, "remote_file_name": self.remote_file_name}
        for argument, name in names.items():
            if name is not None and not _RANK.search(name):
                warn(
                    f"{kind}({argument}={getattr(self, argument)!r}) is the same on several ranks, "
                    "whose files replace one another: add {rank} to it."
                )

    def _warn_of_no_window(self, context: Run, ended: Moment | None) -> None:
        """Warn, on one rank, that training ended before the first window."""
        is_first = context.ranks.global_rank == min(self.ranks or [0])
        is_trial = context.trainer.fast_dev_run  # type: ignore[attr-defined]
        if ended is None or not ended.timestamp.batch or not is_first or is_trial:
            return
        # This is normal with a schedule that waits for an event, or for another stage.
        waits = any(part.fires or isinstance(part, HasTag) for part in walk(self.schedule))
        quiet_until, batches = self.schedule.quiet_until(ended), ended.timestamp.batch
        if not waits and quiet_until != FOREVER:
            known = quiet_until > batches + 1
            warn(
                f"{type(self).__name__} recorded nothing: training ended after "
                f"{counted(batches, 'batch')}, and no window of {self.schedule!r} opened"
                f"{f', nor does one before batch {quiet_until}' if known else ''}."
            )

    def _warn_of_late_signal(self) -> None:
        """Warn if whoever sent a signal waits for a file in vain."""
        if any(isinstance(part, OnSignal) and part.pending for part in walk(self.schedule)):
            warn(
                f"{type(self).__name__} recorded nothing for a signal, which came after the last "
                "batch that could be recorded."
            )


def _text(folder: Any) -> Any:
    """A path as a string; other values unchanged."""
    return str(folder) if isinstance(folder, Path) else folder


_place = attrgetter("output_path_prefix", "folder", "filename")


def _with_suffix(name: str, suffix: str) -> str:
    """A file name with another suffix; a variable in the place of the suffix is kept.

    Example:
        >>> _with_suffix("{run_name}/rank{rank}.{batch}.bin.gz", ".html")
        '{run_name}/rank{rank}.{batch}.html'
    """
    folder, slash, file = name.removesuffix(".gz").rpartition("/")
    stem, _, old = file.rpartition(".")
    return f"{folder}{slash}{file if '}' in old or not stem else stem}{suffix}"
