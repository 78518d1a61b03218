"""Snapshots of CUDA memory: each block, and the stack that allocated it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.cuda import _memory_viz
from typing_extensions import override

from lightning_perf.charts import FlameGraph, fold, read_folded
from lightning_perf.checks import flag, whole
from lightning_perf.errors import warn
from lightning_perf.files import write_text
from lightning_perf.profilers.base import Names, Profiler, Recorded, Recording
from lightning_perf.profilers.tools import run_program
from lightning_perf.schedule import Schedule
from lightning_perf.units import bytes_text

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

#: Profilers that need a snapshot when an allocation fails.
_watching: WeakSet[MemorySnapshot] = WeakSet()


@cache
def _attach() -> None:
    """Register an observer with PyTorch, once per process, since it cannot be removed."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_observe)


def _observe(device: int, size: int, allowed: int, free: int) -> None:
    """Runs inside the failing allocation, whose error an exception here would replace."""
    with suppress(Exception):
        snapshot = torch.cuda.memory._snapshot() if _watching else None
        for profiler in _watching:
            profiler._oom = snapshot


class MemorySnapshot(Profiler):
    """Records the history of CUDA memory in the windows of a schedule, and out-of-memory errors.

    The arguments that are not described here are those of every profiler; see ``Profiler``. An
    out-of-memory error that ends the run closes the open window, so that the file
    has the history of the error. Without an open window, a snapshot of that moment is saved; use
    the schedule ``"always"`` to have the history, too. Either way there are five files: the pickle,
    its page, PyTorch's plot of the allocator's segments, and flame graphs of all memory and of each
    segment. Without CUDA there is one warning and nothing is recorded.

    Args:
        compress: Whether the pickle is gzipped; viewers read it after ``gunzip``.
        html: Whether to write a page beside each pickle: memory over time by source line, and a
            flame graph of the peak. It works offline, as the flame graphs do. PyTorch's segment
            plot, the other page, loads a script from the web.
        max_entries: Maximum number of allocations and frees per window; the last ones are kept.

    Raises:
        ConfigError: An invalid value.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import MemorySnapshot
        >>> profiler = MemorySnapshot(schedule="every 1000ba for 2ba", ranks=[0])
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        *,
        folder: str = "{run_name}/memory_snapshots",
        filename: str = "rank{rank}.{batch}.pickle",
        remote_file_name: str | None = "{run_name}/memory_snapshots/rank{rank}.{batch}.pickle",
        compress: bool = False,
        html: bool = True,
        max_entries: int = 100_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            schedule, ranks, folder=folder, filename=filename, remote_file_name=remote_file_name,
            compress=compress, **kwargs,
        )  # fmt: skip
        self.html = flag("html", html)
        self.max_entries = whole("max_entries", max_entries, 1, "100000")
        #: The allocator at the last failed allocation, from ``torch.cuda.memory._snapshot()``: when
        #: the exception has ended the run, much of that memory is free again.
        self._oom: dict[str, Any] | None = None
        #: Whether the run ended because of an out-of-memory error.
        self._ran_out = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_oom": None}

    @property
    @override
    def further_files(self) -> Mapping[str, Names]:
        return {
            name: self.beside(suffix)
            for name, (suffix, _) in _FURTHER.items()
            if self.html or suffix.endswith(".svg")
        }

    @override
    def prepare(self, context: Run) -> None:
        super().prepare(context)
        self._oom, self._ran_out = None, False
        if has_cuda():
            _watching.add(self)
            _attach()
        else:
            self._session = None
            _warn_once()

    @override
    def record(self, path: Path, context: Run, warmup: int) -> Recording:
        memory = torch.cuda.memory
        # Python frames only: C++ frames take seconds to resolve when the window ends.
        memory._record_memory_history("all", stacks="python", max_entries=self.max_entries)
        yield None
        try:
            return self._dump(path)
        finally:
            memory._record_memory_history(None)

    @override
    def after_batch(self, context: Run, batch: Any) -> None:
        self._oom = None  # the failed allocation did not end the run
        super().after_batch(context, batch)

    @override
    def close(self, context: Run, reason: str) -> None:
        error = sys.exception() if reason == "exception" else None
        self._ran_out = isinstance(error, torch.OutOfMemoryError)
        try:
            # The history of an open window already ends at this moment.
            session = self._session if self._ran_out and context.stage else None
            if session is not None and session.recording is None:
                path = session.writer.spool(context.stage)
                self.save(path, context.timestamp, context.stage, self._dump(path))
        finally:  # the disk may be full
            super().close(context, reason)
            _watching.discard(self)
            self._oom = None

    def _dump(self, path: Path) -> Recorded:
        snapshot = (self._ran_out and self._oom) or torch.cuda.memory._snapshot()
        path.write_bytes(pickle.dumps(snapshot))
        names = [name for name in self.further_files if self._ran_out or name == "page"]
        return Recorded(further={name: partial(_FURTHER[name][1], path) for name in names})


def has_cuda() -> bool:
    """Whether there is a device whose memory can be recorded."""
    return torch.cuda.is_available()


@cache
def _warn_once() -> None:
    warn("MemorySnapshot records nothing: there is no CUDA device here.")


def _draw(picture_of: Callable[[Any], str], source: Path, target: Path) -> None:
    """Write a picture of a snapshot."""
    snapshot = pickle.loads(source.read_bytes())  # noqa: S301  our own file of just now
    write_text(target, picture_of(snapshot))


def _flames(title: str, stacks_of: Callable[..., str], snapshot: Any) -> str:
    """A flame graph, without the script that PyTorch's own downloads."""

    def draw(folded: str) -> str:
        return FlameGraph(fold(read_folded(folded)), title, bytes_text).svg(alone=True)

    return stacks_of(snapshot, format_flamegraph=draw)


_segments = partial(_flames, "Contents of each segment", _memory_viz.segments)
_memory = partial(_flames, "Memory in use", _memory_viz.memory)
#: Files made from a snapshot; all except the page only after an out-of-memory error.
_FURTHER: Mapping[str, tuple[str, Callable[[Path, Path], object]]] = {
    "page": (".html", partial(run_program, "history")),
    "segment_plot": ("_segment_plot.html", partial(_draw, _memory_viz.segment_plot)),
    "segment_flamegraph": ("_segment_flamegraph.svg", partial(_draw, _segments)),
    "memory_flamegraph": ("_memory_flamegraph.svg", partial(_draw, _memory)),
}
