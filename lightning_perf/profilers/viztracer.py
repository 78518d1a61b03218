"""Timelines of Python's calls by VizTracer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_perf.errors import ConfigError
from lightning_perf.profilers import calls, children
from lightning_perf.profilers.other_torch import refuse_lightnings, refuse_torch_profiler
from lightning_perf.profilers.profiler import Profiler
from lightning_perf.profilers.recording import Recorded, Recording
from lightning_perf.profilers.tools import (
    blaming,
    check_options,
    check_whole,
    defaults,
    given,
    installed,
    refuse_python_profiler,
    require,
    run_python,
)
from lightning_perf.schedule import Schedule
from lightning_perf.schedule.checks import flag, whole

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

#: What tells where the trace goes and whose it is; and sparse tracing, which needs the user's code.
_OURS = {
    "dump_raw", "log_sparse", "output_file", "pid_suffix", "process_name", "register_global",
    "trace_self", "verbose",
}  # fmt: skip
_REPORT = "lightning_perf.profilers.calls_report"


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
    _children: children.Children | None = None

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
        if patch and not children.SUPPORTED:
            raise ConfigError("patch", patch, "needs a system with POSIX signals", "False")
        self.tracer_entries = whole("tracer_entries", tracer_entries, 1, "500000")
        self.patch, self.html = flag("patch", patch), flag("html", html)
        self.options = kwargs

    @property
    @override
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        return {"page": self.beside(".html")} if self.html else {}

    @override
    def prepare(self, driver: Driver) -> None:
        require(self, "viztracer")
        super().prepare(driver)
        if self.patch and self._writer is not None:
            self._follow(driver)

    @property
    @override
    def own_file(self) -> tuple[str, str | None, bool]:
        if not self.compress:
            return self.filename, self.remote_file_name, True
        remote = self.remote_file_name
        return _cvf(self.filename), None if remote is None else _cvf(remote), False

    @override
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        refuse_python_profiler(self)
        tick = None
        if self.options.get("log_torch"):
            refuse_torch_profiler(self, driver)
            tick = partial(refuse_lightnings, self, driver)
        options = given(self.options)
        with blaming(options):
            tracer = calls.ready_tracer(driver.ranks.global_rank, self.tracer_entries, options)
        if self._children is not None:
            self._children.open(path)
        try:
            calls.start(tracer)
            yield tick
        finally:
            theirs = self._children.shut() if self._children is not None else None
        calls.stop(tracer, path)
        trace = _Trace(path, theirs)
        return Recorded(
            partial(trace.finish, compress=self.compress),
            dict.fromkeys(self.further_files, trace.draw),
        )

    @override
    def close(self, driver: Driver, reason: str) -> None:
        super().close(driver, reason)
        if self._children is not None:
            self._children.leave()
            self._children = None

    def _follow(self, driver: Driver) -> None:
        plain = {key: value for key, value in given(self.options).items() if _is_plain(value)}
        plain.pop("log_torch", None)
        record = partial(calls.record_child, driver.ranks.global_rank, self.tracer_entries, plain)
        self._children = children.Children(record)
        driver.at_end(self._children.remove)


class _Trace:
    """A trace on its way, on the worker thread."""

    def __init__(self, path: Path, theirs: children.Files | None) -> None:
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
    from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]

    ours = _OURS | {"tracer_entries"}
    return {name: value for name, value in defaults(Tracer).items() if name not in ours}


def _cvf(name: str) -> str:
    return f"{name.removesuffix('.gz').removesuffix('.json').removesuffix('.cvf')}.cvf"


def _is_plain(value: Any) -> bool:
    """Whether an option can be handed to a process that does not share this one's memory."""
    parts = value if isinstance(value, list) else [value]
    return all(isinstance(part, bool | int | float | str) for part in parts)
