"""Timelines of Python's calls by VizTracer."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_perf.checks import flag, whole
from lightning_perf.errors import ConfigError
from lightning_perf.profilers import processes
from lightning_perf.profilers.base import Profiler
from lightning_perf.profilers.other_torch import refuse_lightnings, refuse_torch_profiler
from lightning_perf.profilers.tools import (
    blaming,
    check_options,
    check_whole,
    defaults,
    given,
    installed,
    python_profiler,
    refuse_python_profiler,
    require,
    run_python,
)
from lightning_perf.profilers.window_runner import Recorded, Recording
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext


#: Each rank's processes have ids of their own: 10001 is the first child of rank 0.
_CHILDREN = 10_000

_recording: Any = None


def ready_tracer(rank: int, entries: int, options: Mapping[str, Any], child: int = 0) -> Any:
    """A VizTracer that is ready to start and leaves nothing behind but its file.

    One tracer per process and buffer size serves all windows: each tracer that is made takes a
    pthread key, of which a process has 1,024, and never frees it.

    Args:
        rank: Global rank.
        entries: The most calls that it remembers.
        options: Further arguments of VizTracer.
        child: The number of the child process that this is, or 0.
    """
    tracer = _tracer(os.getpid(), entries)
    name = f"rank {rank} {multiprocessing.current_process().name}" if child else f"rank {rank}"
    with _unhooked():
        tracer.__init__(
            entries,
            process_name=name,
            dump_raw=True,
            register_global=False,
            verbose=0,
            **options,
        )
    tracer.clear()
    # Processes of several nodes may share an id, and to VizTracer 0 is no id.
    tracer.setpid((rank + 1) * _CHILDREN + child % _CHILDREN if child else rank + 1)
    return tracer


@cache
def _tracer(pid: int, entries: int) -> Any:
    """The tracer of a process for one buffer size; a forked child makes its own."""
    kind = _reusable()
    return kind.__new__(kind, entries)


@cache
def _reusable() -> Any:
    from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]
    from viztracer.snaptrace import Tracer as Core  # type: ignore[import-untyped]

    class Once(Core):  # type: ignore[misc]
        """Takes the buffer and the pthread key at the first initialization only."""

        def __init__(self, entries: int) -> None:
            if "taken" not in self.__dict__:
                super().__init__(entries)
                self.taken = True

    class Reusable(Tracer, Once):  # type: ignore[misc]
        """Initialized again for each window, with the options of its profiler."""

    return Reusable


def start(tracer: Any) -> None:
    """Record; processes that are forked meanwhile do not go on with it."""
    global _recording
    _recording = tracer
    try:
        with _unhooked():
            if sys.version_info < (3, 12):  # from then on VizTracer sees all threads by itself
                threading.setprofile(tracer.threadtracefunc)
            tracer.start()
    except BaseException:
        _recording = None
        with suppress(Exception):
            tracer.stop()
        raise


def stop(tracer: Any, path: Path) -> None:
    """Stop, and save to a file of any name."""
    global _recording
    _recording = None
    tracer.stop()
    # Or threads that start later would call it in vain.
    if getattr(threading.getprofile(), "__self__", None) is tracer:
        threading.setprofile(None)
    # VizTracer chooses the format by the suffix.
    raw = path.with_name(f"{path.name}.json")
    try:
        tracer.save(str(raw), verbose=0)
    except ValueError as error:  # its word for a file that cannot be opened
        raise OSError(str(error)) from error
    finally:
        _let_go(tracer)
    raw.replace(path)


def _let_go(tracer: Any) -> None:
    """Free what the window held: the tracer itself is kept."""
    tracer.clear()
    tracer.data, tracer.torch_profile = {}, None
    tracer.log_gc = False  # or the list of the collector's callbacks would grow


def record_child(
    rank: int, entries: int, options: Mapping[str, Any], path: Path, number: int
) -> Generator[None, None, None]:
    """Record a child process, as ``children`` asks for it."""
    if python_profiler() is not None:
        return  # somebody else's
    tracer = ready_tracer(rank, entries, options, number)
    start(tracer)
    yield
    stop(tracer, path)
    yield
    if sys.getprofile() is tracer:  # the hook of a thread is its own
        sys.setprofile(None)


@contextmanager
def _unhooked() -> Iterator[None]:
    """Free the hook for Python's calls where VizTracer, which takes it first, fails."""
    try:
        yield
    except BaseException:
        sys.setprofile(None)
        threading.setprofile(None)
        raise


def _forget() -> None:
    global _recording
    if _recording is not None:
        _recording.stop()
        _recording = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


#: What tells where the trace goes and whose it is; and sparse tracing, which needs the user's code.
_OURS = {
    "dump_raw", "log_sparse", "output_file", "pid_suffix", "process_name", "register_global",
    "trace_self", "verbose",
}  # fmt: skip
_REPORT = "lightning_perf.profilers.viztracer_report"


class VizTracer(Profiler):
    """Records every call of Python and when it happened, for Perfetto or ``vizviewer``.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``. Traces of several ranks can be merged: each rank is a process of its own in them.

    Args:
        compress: Whether files have VizTracer's own compressed form ``.cvf``, which
            ``viztracer --decompress`` reads, instead of ``.json.gz``, which Perfetto opens.
        tracer_entries: The most calls that a file holds of one process; of more, the last ones.
        patch: Whether child processes that multiprocessing starts during the run, such as data
            loader workers, are recorded in each window too, in the same file. Each of them has a
            thread of ours, which looks fifty times a second whether a window is open. Programs
            that ``subprocess`` starts are not followed.
        html: Whether a page lies beside each file, which opens without a network: a flame graph of
            each thread, of calls of the same path made one.
        **kwargs: Further arguments of ``viztracer.VizTracer``, such as ``log_torch`` or
            ``ignore_c_function``.

    Raises:
        ConfigError: A value that cannot work, or an argument that VizTracer does not know.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import VizTracer
        >>> profiler = VizTracer(schedule="every 1000ba for 2ba", ignore_c_function=True)
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    how_to_open: ClassVar[str] = """\
- `.json.gz`: drop it on <https://ui.perfetto.dev>, which keeps it in the browser, or
  `gunzip FILE.json.gz`, then `vizviewer FILE.json` (pip install viztracer), which needs no network.
- `.cvf` (`compress=True`): `viztracer --decompress FILE.cvf -o trace.json`, then
  `vizviewer trace.json`.
- `.html` (`html=True`): any browser, without a network: flame graphs; a click on a frame
  magnifies it.
- Several ranks in one timeline: `gunzip rank*.json.gz`, then
  `viztracer --combine rank*.json -o all.json`. Rank 0 is process 1, its child processes are 10001
  and on.
"""

    _of_a_run = (*Profiler._of_a_run, "_children")
    _children: processes.Children | None = None

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        output_path_prefix: str | None = None,
        folder: str = "{run_name}/viztracer",
        filename: str = "rank{rank}.{batch}.json",
        remote_file_name: str | None = "{run_name}/viztracer/rank{rank}.{batch}.json",
        overwrite: bool = False,
        compress: bool = False,
        num_traces_to_keep: int = -1,
        batches_per_trace: int = 20,
        tracer_entries: int = 500_000,
        patch: bool = False,
        html: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            schedule,
            ranks,
            output_path_prefix,
            folder,
            filename,
            remote_file_name,
            overwrite,
            compress,
            num_traces_to_keep,
            batches_per_trace,
        )
        check_options(
            VizTracer, kwargs, _known() if installed("viztracer") else kwargs, "viztracer"
        )
        if compress and kwargs.get("log_torch"):
            problem = "cannot hold the operators that log_torch records"
            raise ConfigError("compress", compress, problem, "False")
        if patch and not processes.SUPPORTED:
            raise ConfigError("patch", patch, "needs a system with POSIX signals", "False")
        self.tracer_entries = whole("tracer_entries", tracer_entries, 1, "500000")
        self.patch, self.html = flag("patch", patch), flag("html", html)
        self.options = kwargs

    @property
    @override
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        return {"page": self.beside(".html")} if self.html else {}

    @override
    def prepare(self, context: RunContext) -> None:
        require(self, "viztracer")
        super().prepare(context)
        if self.patch and self._writer is not None:
            self._follow(context)

    @property
    @override
    def own_file(self) -> tuple[str, str | None, bool]:
        if not self.compress:
            return self.filename, self.remote_file_name, True
        remote = self.remote_file_name
        return _cvf(self.filename), None if remote is None else _cvf(remote), False

    @override
    def record(self, path: Path, context: RunContext, warmup: int) -> Recording:
        refuse_python_profiler(self)
        tick = None
        if self.options.get("log_torch"):
            refuse_torch_profiler(self, context)
            tick = partial(refuse_lightnings, self, context)
        options = given(self.options)
        with blaming(options):
            tracer = ready_tracer(context.ranks.global_rank, self.tracer_entries, options)
        if self._children is not None:
            self._children.open(path)
        try:
            start(tracer)
            yield tick
        finally:
            theirs = self._children.shut() if self._children is not None else None
        stop(tracer, path)
        trace = _Trace(path, theirs)
        return Recorded(
            partial(trace.finish, compress=self.compress),
            dict.fromkeys(self.further_files, trace.draw),
        )

    @override
    def close(self, context: RunContext, reason: str) -> None:
        super().close(context, reason)
        if self._children is not None:
            self._children.leave()
            self._children = None

    def _follow(self, context: RunContext) -> None:
        plain = {key: value for key, value in given(self.options).items() if _is_plain(value)}
        plain.pop("log_torch", None)
        record = partial(record_child, context.ranks.global_rank, self.tracer_entries, plain)
        self._children = processes.Children(record)
        context.on_close(self._children.remove)


class _Trace:
    """A trace on its way, on the worker thread."""

    def __init__(self, path: Path, theirs: processes.Files | None) -> None:
        self._path, self._theirs = path, theirs

    def finish(self, compress: bool) -> None:
        self._gather()
        check_whole(self._path)
        if compress:
            raw, packed = (self._path.with_name(f"{self._path.name}{s}") for s in (".json", ".cvf"))
            self._path.replace(raw)
            try:
                run_python("-m", "viztracer", "--quiet", "--compress", str(raw), "-o", str(packed))
                run_python("-m", _REPORT, "check", str(packed))
            finally:
                raw.replace(self._path)
            packed.replace(self._path)

    def draw(self, page: Path) -> None:
        self._gather()
        run_python("-m", _REPORT, "page", str(self._path), str(page))

    def _gather(self) -> None:
        """Put what the children recorded into the trace, once."""
        theirs, self._theirs = self._theirs, None
        files = [str(path) for path in theirs.wait().values()] if theirs is not None else []
        if files:
            run_python("-m", _REPORT, "merge", str(self._path), *files)


def _known() -> dict[str, Any]:
    from viztracer import VizTracer as Tracer

    ours = _OURS | {"tracer_entries"}
    return {name: value for name, value in defaults(Tracer).items() if name not in ours}


def _cvf(name: str) -> str:
    return f"{name.removesuffix('.gz').removesuffix('.json').removesuffix('.cvf')}.cvf"


def _is_plain(value: Any) -> bool:
    """Whether an option can be handed to a process that does not share this one's memory."""
    parts = value if isinstance(value, list) else [value]
    return all(isinstance(part, bool | int | float | str) for part in parts)
