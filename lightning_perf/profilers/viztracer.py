"""VizTracer timelines of windows of batches: every Python call."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.checks import flag, needs, whole
from lightning_perf.files import replace_file
from lightning_perf.profilers import tools
from lightning_perf.profilers.base import Recorded, Recording
from lightning_perf.profilers.processes import Children, Files, RecordsChildren
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Process ids in traces: rank 0 is 1, its first child 10001.
_CHILDREN = 10_000
#: VizTracer allocates all entries when it starts.
_MOST_ENTRIES = 10**9


def ready_tracer(rank: int, entries: int, options: Mapping[str, Any], child: int = 0) -> Any:
    """A VizTracer that is ready to start.

    All windows of a process share one tracer per buffer size (``entries``): each new tracer takes a
    pthread key and never frees it, and a process has only 1,024. ``child`` is the number of this
    child process, or 0 in a rank's own process.
    """
    tracer = _tracer(os.getpid(), entries)
    name = f"rank {rank} {multiprocessing.current_process().name}" if child else f"rank {rank}"
    # Only with log_torch, VizTracer would read the files of all functions, on this thread.
    options = {"file_info": False, **options}
    with _unhooked():
        tracer.__init__(
            entries, process_name=name, dump_raw=True, register_global=False, verbose=0, **options
        )
    tracer.clear()
    # Process ids of several nodes may coincide, and VizTracer ignores 0.
    tracer.setpid((rank + 1) * _CHILDREN + child % _CHILDREN if child else rank + 1)
    return tracer


@cache
def _tracer(pid: int, entries: int) -> Any:
    """The tracer of a process (a forked child has its own) and a buffer size."""
    from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]
    from viztracer.snaptrace import Tracer as Core  # type: ignore[import-untyped]

    class Once(Core):  # type: ignore[misc]
        # Allocates the buffer and the pthread key at the first initialization only.
        def __init__(self, entries: int) -> None:
            if "taken" not in self.__dict__:
                super().__init__(entries)
                self.taken = True

    # Can be initialized again, with other options.
    kind: Any = type("Reusable", (Tracer, Once), {})
    tracer = kind.__new__(kind, entries)
    if hasattr(os, "register_at_fork"):  # processes forked in a window do not continue with it
        os.register_at_fork(after_in_child=tracer.stop)
    return tracer


def start(tracer: Any) -> None:
    """Start a tracer."""
    try:
        with _unhooked():
            if sys.version_info < (3, 12):  # newer versions trace all threads anyway
                threading.setprofile(tracer.threadtracefunc)
            tracer.start()
    except BaseException:
        with suppress(Exception):
            tracer.stop()
        raise


def stop(tracer: Any, path: Path) -> None:
    """Stop, and save to a file with any suffix."""
    tracer.stop()
    # Otherwise later threads would still call it.
    if getattr(threading.getprofile(), "__self__", None) is tracer:
        threading.setprofile(None)
    # VizTracer selects the format by the suffix.
    raw = path.with_name(f"{path.name}.json")
    try:
        with tools.plain_name(raw) as name:
            tracer.save(name, verbose=0)
    except ValueError as error:  # the file cannot be opened
        raise OSError(str(error)) from error
    finally:  # free the data of the window; the tracer itself is reused
        tracer.clear()
        tracer.data, tracer.torch_profile = {}, None
        tracer.log_gc = False  # removes its garbage collection callback
    replace_file(raw, path)


def record_child(
    rank: int, entries: int, options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as `ChildRecord` says."""
    if tools.has_python_profiler():
        return
    tracer = ready_tracer(rank, entries, options, number)
    start(tracer)
    yield
    stop(tracer, path)
    yield
    if sys.getprofile() is tracer:  # each thread has its own hook
        sys.setprofile(None)


@contextmanager
def _unhooked() -> Iterator[None]:
    """Release the hook for Python calls if VizTracer fails after it took it."""
    try:
        yield
    except BaseException:
        sys.setprofile(None)
        threading.setprofile(None)
        raise


#: Arguments of VizTracer that this package sets, and sparse tracing, which needs changed code.
_OURS = {
    "dump_raw", "log_sparse", "output_file", "pid_suffix", "process_name", "register_global",
    "trace_self", "tracer_entries", "verbose",
}  # fmt: skip


class VizTracer(RecordsChildren):
    """Records the time of every Python call, for Perfetto or ``vizviewer``.

    The arguments that are not described here are those of every profiler; see ``Profiler``. Traces
    of several ranks can be merged: each rank appears as a process of its own.

    Args:
        compress: Whether the trace is gzipped.
        tracer_entries: Maximum number of calls per process and file; the last ones are kept.
        patch: Whether to record child processes that multiprocessing starts during the run, such
            as data loader workers, in the same file. Each of them has a thread that checks fifty
            times per second whether a window is open. Programs that ``subprocess`` starts are not
            recorded.
        **kwargs: Further arguments of ``viztracer.VizTracer``, such as ``log_torch`` or
            ``ignore_c_function``.

    Raises:
        ConfigError: An invalid value, or an argument that VizTracer does not have.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import VizTracer
        >>> profiler = VizTracer(schedule="every 1000ba for 2ba", ignore_c_function=True)
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        *,
        folder: str = "{run_name}/viztracer",
        filename: str = "rank{rank}.{batch}.json",
        remote_file_name: str | None = "{run_name}/viztracer/rank{rank}.{batch}.json",
        compress: bool = True,
        tracer_entries: int = 500_000,
        patch: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            schedule, ranks, folder=folder, filename=filename, remote_file_name=remote_file_name,
            compress=compress, **kwargs,
        )  # fmt: skip
        self.check_supported("patch", patch)
        self.tracer_entries = whole("tracer_entries", tracer_entries, 1, "500000", _MOST_ENTRIES)
        self.patch = flag("patch", patch)

    @override
    def tool_options(self) -> Mapping[str, Any]:
        needs("VizTracer", "viztracer")
        from viztracer import VizTracer as Tracer

        return tools.defaults(Tracer, _OURS)

    @override
    def prepare(self, context: Run) -> None:
        super().prepare(context)
        if self.patch and self._session is not None:
            options = {key: value for key, value in self.options.items() if _is_plain(value)}
            options.pop("log_torch", None)
            rank = context.ranks.global_rank
            self._children = Children(partial(record_child, rank, self.tracer_entries, options))

    @override
    def record(self, path: Path, context: Run, warmup: int) -> Recording:
        tools.refuse_python_profiler(self)
        if self.options.get("log_torch"):
            tools.refuse_torch_profiler(self, context)
        with tools.blaming(self.options):
            tracer = ready_tracer(context.ranks.global_rank, self.tracer_entries, self.options)
        if self._children is not None:
            self._children.open(path)
        try:
            start(tracer)
            yield None
        finally:
            children = self.shut_children()
        stop(tracer, path)
        return Recorded(partial(_finish, path, children))


def _finish(path: Path, children: Files) -> None:
    """Add the traces of child processes, and check the file."""
    if files := children.wait().values():
        tools.run_program("merge", path, *files)
    tools.check_whole(path)


def _is_plain(value: Any) -> bool:
    """Whether an option can be sent to a spawned process."""
    parts = value if isinstance(value, list) else [value]
    return all(isinstance(part, bool | int | float | str) for part in parts)
