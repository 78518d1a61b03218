"""memray captures of windows of batches: allocations of host memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from typing_extensions import override

from lightning_perf.checks import flag, needs
from lightning_perf.errors import ConfigError, RecorderBusy
from lightning_perf.files import is_at_limit
from lightning_perf.profilers import tools
from lightning_perf.profilers.base import Names, Recorded, Recording
from lightning_perf.profilers.processes import Children, Files, RecordsChildren
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Further arguments of memray.Tracker; it is written in C and has no signature.
_OPTIONS = {
    "file_format": None,
    "memory_interval_ms": 10,
    "trace_python_allocators": False,
    "track_object_lifetimes": False,
}
_FORMATS = ("all_allocations", "aggregated_allocations")
#: The first release whose pages work without a network.
_PAGES_SINCE = Version("1.19.1")
#: Captures of child processes that are kept per window.
_MOST_CHILDREN = 64
#: The tracker that records.
_recording: Any = None


def new_tracker(path: Path, options: Mapping[str, Any]) -> Any:
    """A ``memray.Tracker``. Its file has only the program's name: arguments may contain secrets."""
    from memray import Tracker

    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        return Tracker(path, **options)
    finally:
        sys.argv = arguments


def start(tracker: Any) -> None:
    """Start a ``memray.Tracker``; RecorderBusy if another one records, OSError on a full disk."""
    global _recording
    # On a thread with an empty stack: memray notes the depth of the stack where it is entered, and
    # its readers cut as many frames off every stack of the main thread.
    with tools.no_collection(), ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(tracker.__enter__).result()
        except RuntimeError as error:
            if "more than one" in str(error):
                raise RecorderBusy("Memray", "another memray tracker", tools.REMOVE_ONE) from error
            stop(tracker)  # memray leaves its hooks behind, with which it can never start again
            raise OSError(str(error)) from error
    _recording = tracker


def stop(tracker: Any) -> None:
    """Stop, which completes the file."""
    global _recording
    _recording = None
    tracker.__exit__(None, None, None)


def record_child(
    options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as `ChildRecord` says."""
    if _recording is not None:
        # Forked in a window: memray has detached the tracker from the parent's file.
        stop(_recording)
    tracker = new_tracker(path, options)
    start(tracker)
    yield
    stop(tracker)


class Memray(RecordsChildren):
    """Records every allocation of host memory in the windows of a schedule.

    The arguments that are not described here are those of every profiler; see ``Profiler``.
    ``memray stats``, ``tree`` and ``flamegraph`` read the files.

    With ``summary``, each window has these metrics. They cover host memory that was allocated
    within the window. The lowest rank that records uses these keys; those of other ranks begin
    with ``memray/rank1/`` and go to MLflow only. Stages other than train are a prefix:
    ``validate/memray/peak_memory``.

    - ``memray/peak_memory``: bytes allocated at the peak.
    - ``memray/unfreed_memory``: bytes still allocated at the end.
    - ``memray/total_memory``, ``memray/total_allocations``: bytes and number of all allocations;
      not available with the aggregated format.

    Args:
        compress: Whether the file is gzipped; memray reads it after ``gunzip``.
        flamegraph: Whether to write a flame graph of the peak beside each file, as an HTML page
            that works offline.
        native_traces: Whether to record C and C++ frames too, which costs more.
        follow_fork: Whether to capture child processes that multiprocessing starts during the run,
            such as data loader workers, forked or spawned, each into a file of its own
            (``.child1.bin``). Each of them has a thread that checks fifty times per second whether
            a window is open.
        summary: Whether to write a text beside each file, with the source lines that allocated the
            most, and to log metrics. A process of low priority makes it.
        **kwargs: Further arguments of ``memray.Tracker``: ``trace_python_allocators``,
            ``memory_interval_ms``, ``track_object_lifetimes``, ``file_format``
            (``"aggregated_allocations"`` or a ``memray.FileFormat``).

    Raises:
        ConfigError: An invalid value, or an argument that memray does not have.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Memray
        >>> profiler = Memray(schedule="at 0.5dur for 5ba")
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        *,
        folder: str = "{run_name}/memray",
        filename: str = "rank{rank}.{batch}.bin",
        remote_file_name: str | None = "{run_name}/memray/rank{rank}.{batch}.bin",
        compress: bool = False,
        flamegraph: bool = False,
        native_traces: bool = False,
        follow_fork: bool = False,
        summary: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            schedule, ranks, folder=folder, filename=filename, remote_file_name=remote_file_name,
            compress=compress, **kwargs,
        )  # fmt: skip
        form = self.options.get("file_format")
        if form is not None and getattr(form, "name", str(form)).lower() not in _FORMATS:
            problem = f"is not one of {', '.join(_FORMATS)}"
            raise ConfigError("file_format", form, problem, '"aggregated_allocations"')
        self.check_supported("follow_fork", follow_fork)
        self.flamegraph = flag("flamegraph", flamegraph)
        if self.flamegraph and Version(version("memray")) < _PAGES_SINCE:
            problem = f"needs memray {_PAGES_SINCE} or later: earlier pages need a network"
            raise ConfigError("flamegraph", flamegraph, problem, "False")
        self.native_traces = flag("native_traces", native_traces)
        self.follow_fork, self.summary = flag("follow_fork", follow_fork), flag("summary", summary)

    @override
    def tool_options(self) -> Mapping[str, Any]:
        needs("Memray", "memray")
        return _OPTIONS

    @property
    @override
    def further_files(self) -> Mapping[str, Names]:
        suffixes = {"flamegraph": ".html"} if self.flamegraph else {}
        if self.summary:
            suffixes["summary"] = ".txt"
        return {name: self.beside(suffix) for name, suffix in suffixes.items()}

    @override
    def prepare(self, context: Run) -> None:
        super().prepare(context)
        if self.follow_fork and self._session is not None:
            self._children = Children(partial(record_child, self._tracker_options()))

    @override
    def record(self, path: Path, context: Run, warmup: int) -> Recording:
        tools.refuse_python_profiler(self)
        with tools.blaming(self.options):
            tracker = new_tracker(path, self._tracker_options())
        if self._children is not None:
            self._children.open(path)
        try:
            start(tracker)
        except BaseException:
            path.unlink(missing_ok=True)
            self.shut_children()
            raise
        yield None
        # Stopping replaces the file by a smaller, compressed one. Its folder may be gone.
        whole = not (path.exists() and is_at_limit(path.stat().st_size))
        stop(tracker)
        return Recorded(further=self._further_of(path, context, whole), whole=whole)

    @override
    def after_batch(self, context: Run, batch: Any) -> None:
        context.deliver()
        super().after_batch(context, batch)

    def _tracker_options(self) -> dict[str, Any]:
        options = {"native_traces": self.native_traces, **self.options}
        if isinstance(name := options.get("file_format"), str):
            from memray import FileFormat

            options["file_format"] = FileFormat[name.upper()]
        return options

    def _further_of(
        self, path: Path, context: Run, whole: bool
    ) -> dict[str, Callable[[Path], object]]:
        further: dict[str, Callable[[Path], object]] = {}
        if self.flamegraph and whole:
            further["flamegraph"] = partial(tools.run_program, "flamegraph", path)
        if self.summary and whole:
            log = partial(context.log_from_worker, step=context.step)
            further["summary"] = partial(_summarize, path, self._prefix(context), log)
        files = self.shut_children()
        for place, number in enumerate(files.numbers[:_MOST_CHILDREN], 1):
            name = f"child{place}"
            writers = self._open_session.further
            if name not in writers:
                writers[name] = self.new_writer(context, self.beside(f".{name}.bin"))
            further[name] = partial(_take, files, number)
        return further

    def _prefix(self, context: Run) -> str:
        """The prefix of this rank's metrics."""
        stage = "" if context.stage == "train" else f"{context.stage}/"
        rank = context.ranks.global_rank
        first = min(self.ranks) if self.ranks is not None else 0
        return f"{stage}memray/" if rank == first else f"{stage}memray/rank{rank}/"


def _take(files: Files, number: int, target: Path) -> None:
    paths = files.wait()
    if number not in paths:
        raise OSError("the child process ended without leaving its file")
    shutil.move(paths[number], target)


def _summarize(
    source: Path, prefix: str, log: Callable[[Mapping[str, float]], None], text: Path
) -> None:
    output = tools.run_program("memory", source, text)
    log({f"{prefix}{key}": value for key, value in json.loads(output).items()})
