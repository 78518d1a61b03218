"""The base of the profilers: windows of batches, each recorded into one file."""

from __future__ import annotations

import posixpath
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_perf.checks import flag, rank_list, whole
from lightning_perf.errors import ConfigError, warn
from lightning_perf.profilers.window_runner import (
    Recorded,
    Recording,
    Windows,
    has_more,
    next_window,
)
from lightning_perf.run.artifacts import new_writer
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.context import resumes
from lightning_perf.schedule import Cyclic, Schedule, as_schedule
from lightning_perf.traces import check_names
from lightning_perf.tracking.stores import check_store

if TYPE_CHECKING:
    from lightning_perf.core.progress import Moment, Timestamp
    from lightning_perf.run.context import RunContext
    from lightning_perf.traces import TraceWriter


#: Pages, tables and pictures tell what is in a recording that is kept.
_MADE_OF_OTHERS = (".html", ".txt", ".svg")


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
        remote_file_name: The same for the artifact's name in MLflow, or a URL of any store that
            fsspec knows, as ``s3://bucket/{run_name}/rank{rank}.{batch}.json``; None uploads
            nothing.
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
    #: Markdown for those who find the files.
    how_to_open: ClassVar[str | None] = None

    #: Attributes that a copy does not take along; each has its default in the class.
    _of_a_run: ClassVar[tuple[str, ...]] = (
        "_writer",
        "_further",
        "_windows",
        "_reopen",
        "_ended",
        "state_key",
    )
    _writer: TraceWriter | None = None
    _further: Mapping[str, TraceWriter] = {}
    _windows: Windows | None = None
    _reopen = False
    #: Where training ended.
    _ended: Moment | None = None

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
        names = {
            "output_path_prefix": output_path_prefix,
            "folder": folder,
            "filename": filename,
            "remote_file_name": remote_file_name,
        }
        for field, name in names.items():
            optional = name is None and field in ("output_path_prefix", "remote_file_name")
            if not (optional or isinstance(name, str | Path)):
                raise ConfigError(field, name, "is not a text", '"profiles"')
        check_names(folder, filename, remote_file_name, num_traces_to_keep)
        check_store(remote_file_name)
        self.output_path_prefix = output_path_prefix
        self.folder, self.filename, self.remote_file_name = folder, filename, remote_file_name
        self.overwrite, self.compress = flag("overwrite", overwrite), flag("compress", compress)
        self.num_traces_to_keep = num_traces_to_keep
        self.batches_per_trace = whole("batches_per_trace", batches_per_trace, 1, "20")

    def __getstate__(self) -> dict[str, Any]:
        # A copy knows nothing of the run: files and windows are this process's own.
        own = super().__getstate__()
        return {name: value for name, value in own.items() if name not in self._of_a_run}

    @abstractmethod
    def record(self, path: Path, context: RunContext, warmup: int) -> Recording:
        """Record from the first ``next`` to the second, into one file.

        It may return what is left to do, which costs the training thread nothing.

        Args:
            path: Where the file belongs.
            context: The run, for metadata.
            warmup: Batches to come before the window; 0 unless ``warms_up``.
        """

    @property
    def own_file(self) -> tuple[str, str | None, bool]:
        """The names of a recording, here and remote, and whether it is gzipped."""
        return self.filename, self.remote_file_name, self.compress

    @property
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        """The names, here and remote, of what ``record`` may make besides, such as pages."""
        return {}

    def beside(self, suffix: str) -> tuple[str, str | None]:
        """The names of a further file: those of the recording, with a suffix of its own.

        Args:
            suffix: Such as ``.html``, which browsers know.
        """
        remote = self.remote_file_name
        return _with_suffix(self.filename, suffix), remote and _with_suffix(remote, suffix)

    @cached_property
    @override
    def state_key(self) -> str:
        # One key for each object, which Lightning demands of several: there is no state to find
        # again. Those that would write to the same place are refused at set-up.
        return f"lightning_perf.{type(self).__name__}.{self.folder}.{self.filename}.{id(self)}"

    @property
    def saved_traces(self) -> list[tuple[Timestamp, list[Path | None]]]:
        """When each trace was saved, and its path at the index of the rank that wrote it."""
        return self._writer.saved_traces if self._writer is not None else []

    # -- the verbs --------------------------------------------------------------------------------

    @override
    def prepare(self, context: RunContext) -> None:
        self._reopen, self._writer, self._windows, self._ended = False, None, None, None
        self._refuse_ranks(context)
        self._refuse_twins(context)
        self.schedule.validate(context.limits)
        self.schedule.setup(context.schedule_context)
        if self.ranks is not None and context.ranks.global_rank not in self.ranks:
            return
        # Before the recording's own, which at the end moves away what these are made of.
        self._further = {}
        for name, (filename, remote) in self.further_files.items():
            self._add_writer(context, name, filename, remote)
        self._writer = self._new_writer(context, *self.own_file, explains=True)
        self._windows = Windows(self, self._writer.spool)

    @override
    def on_start(self, context: RunContext) -> None:
        if self._windows is None or self._writer is None:
            return
        self._windows.stop(context)  # validation inside of fit cuts the training window
        if not context.nested:
            inside = ["validate"] if context.stage == "train" else []
            now = {stage: context.progress.timestamp(stage) for stage in [context.stage, *inside]}
            self._writer.check(now, resumes(context.trainer))
        self.schedule.observe(context.moment)
        self._windows.begin(context)

    @override
    def before_batch(self, context: RunContext, batch: Any) -> None:
        if self._reopen and self._windows is not None:
            self._reopen = False
            self._windows.begin(context)

    @override
    def after_batch(self, context: RunContext, batch: Any) -> None:
        windows = self._windows
        if windows is not None and context.counters.batch >= windows.asleep_until:
            windows.after_batch(context)

    @override
    def on_end(self, context: RunContext) -> None:
        if self._windows is not None:
            self._windows.stop(context)
            if context.stage == "train":
                self._ended = context.moment
            # After validation inside of fit, the training window goes on with its next batch.
            self._reopen = context.nested

    @override
    def close(self, context: RunContext, reason: str) -> None:
        if self._windows is not None:
            self._windows.stop(context, cut_short=reason == "exception")
            if reason == "teardown" and not self._windows.opened:
                self._tell_of_no_window(context)
        self.schedule.close()

    def settle(self, context: RunContext) -> None:
        """Close a window that is over by now, for a profiler that is told of things first.

        Args:
            context: That profiler's run.
        """
        if self._windows is not None and self._context is context:
            self._windows.settle(context)

    # -- files ------------------------------------------------------------------------------------

    def _add_writer(
        self, context: RunContext, name: str, filename: str, remote: str | None
    ) -> None:
        """A pipe for a further file, unless there is one."""
        if name not in self._further:
            explains = self._lies_elsewhere(remote)
            writer = self._new_writer(context, filename, remote, False, explains)
            self._further = {**self._further, name: writer}

    def _new_writer(
        self, context: RunContext, filename: str, remote: str | None, compress: bool, explains: bool
    ) -> TraceWriter:
        """A pipe into this profiler's folder, which the end of the run closes."""
        return new_writer(
            context,
            self.output_path_prefix,
            self.folder,
            filename,
            remote,
            compress,
            overwrite=self.overwrite,
            num_traces_to_keep=self.num_traces_to_keep,
            readme=self.how_to_open if explains else None,
            optional=filename.endswith(_MADE_OF_OTHERS),
        )

    def save(self, path: Path, timestamp: Timestamp, stage: str, recorded: Recorded) -> None:
        """Hand a recording over to the worker, with the further files that are made of it.

        Args:
            path: Where it was recorded.
            timestamp: When its window ended.
            stage: What was recorded.
            recorded: What is left to do.
        """
        assert self._writer is not None  # made before any window opened
        # Before the recording itself: the one worker moves that away when its turn comes.
        for name in recorded.further:
            writer = self._further[name]
            target = writer.spool(stage)
            writer.write(target, timestamp, stage, partial(recorded.make, name, target))
        self._writer.write(path, timestamp, stage, recorded.complete)

    def _lies_elsewhere(self, remote: str | None) -> bool:
        """Whether a further file is sent to another folder than the recording."""
        own = self.remote_file_name or ""
        return posixpath.dirname(remote or own) != posixpath.dirname(own)

    def _refuse_ranks(self, context: RunContext) -> None:
        world = context.ranks.world_size
        if self.ranks is not None and max(self.ranks) >= world:
            problem = f"names a rank beyond the {world} of this run"
            raise ConfigError("ranks", self.ranks, problem, "[0]")

    def _refuse_twins(self, context: RunContext) -> None:
        """Two of a kind need names of their own: nobody could tell their files apart."""
        for other in context.parts:
            if type(other) is type(self) and other is not self and _place(other) == _place(self):
                name = type(self).__name__
                problem = f"is that of another {name} of this Trainer: give one of the two another \
`filename` or `folder`"
                raise ConfigError("filename", self.filename, problem, f'"second.{self.filename}"')

    def _tell_of_no_window(self, context: RunContext) -> None:
        """Say, once and on one rank, that a schedule did not come to its first window."""
        ended, rank = self._ended, context.ranks.global_rank
        if (
            ended is None
            or ended.timestamp.batch == 0
            or rank != min(self.ranks or [0])
            or context.trainer.fast_dev_run  # type: ignore[attr-defined]
        ):
            return
        first = next_window(self.schedule, ended)
        if first is not None or has_more(self.schedule, ended):
            begins = "come later" if first is None else f"begun after batch {first}"
            warn(
                f"{type(self).__name__} recorded nothing: no window of {self.schedule!r} opened. "
                f"The first one would have {begins}; training ended after batch "
                f"{ended.timestamp.batch}."
            )


def _place(profiler: Profiler) -> tuple[str | None, str, str]:
    return profiler.output_path_prefix, profiler.folder, profiler.filename


def _with_suffix(name: str, suffix: str) -> str:
    """A file's name with another suffix, where it has one that is no variable.

    Example:
        >>> _with_suffix("{run_name}/rank{rank}.{batch}.bin.gz", ".html")
        '{run_name}/rank{rank}.{batch}.html'
    """
    folder, slash, file = name.removesuffix(".gz").rpartition("/")
    stem, _, old = file.rpartition(".")
    return f"{folder}{slash}{file if '}' in old or not stem else stem}{suffix}"
