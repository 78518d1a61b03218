"""Device memory by PyTorch's allocator: what each block is, and who asked for it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch.cuda import _memory_viz
from typing_extensions import override

from lightning_perf.charts.flame import FlameGraph, fold, read_folded
from lightning_perf.charts.style import bytes_text
from lightning_perf.checks import flag, whole
from lightning_perf.errors import warn
from lightning_perf.profilers.base import Profiler
from lightning_perf.profilers.tools import run_python
from lightning_perf.profilers.window_runner import Recorded, Recording
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext


class OomSnapshot:
    """Keeps the allocator's state of the last failed allocation, while somebody watches.

    When the error has become an exception that ends the run, much of what filled the memory is
    free again.
    """

    def __init__(self) -> None:
        #: What ``torch.cuda.memory._snapshot()`` told then.
        self.snapshot: dict[str, Any] | None = None

    def watch(self) -> None:
        """From now on."""
        _watching.add(self)
        _attach()

    def forget(self) -> None:
        """No longer, and let the memory of the snapshot go."""
        _watching.discard(self)
        self.snapshot = None


_watching: WeakSet[OomSnapshot] = WeakSet()


@cache
def _attach() -> None:
    """Ask PyTorch to be told; once a process, since there is no way back."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(_observe)


def _observe(device: int, asked: int, allowed: int, free: int) -> None:
    """Runs within the failing allocation: what is raised here would replace its error."""
    with suppress(Exception):
        snapshot = torch.cuda.memory._snapshot() if _watching else None
        for moment in _watching:
            moment.snapshot = snapshot


#: What running out of memory leaves beside the pickle and its page.
_AT_THE_END = {
    "segment_plot": "_segment_plot.html",
    "segment_flamegraph": "_segment_flamegraph.svg",
    "memory_flamegraph": "_memory_flamegraph.svg",
}


class MemorySnapshot(Profiler):
    """Records the history of CUDA memory in the windows of a schedule, and where it runs out.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``. An out-of-memory error that ends the run ends the open window, with the history
    that led to it. Without an open window, what was allocated at that moment is saved; a schedule
    of ``"always"`` has the history there too. Either way there are five files then: beside the
    pickle and its page a plot of the allocator's segments, and two flame graphs: of what holds the
    memory, and of what holds each segment. Without CUDA, training runs with one warning.

    Args:
        compress: Whether the pickle is gzipped; ``gunzip`` it before viewing.
        html: Whether a page lies beside each pickle, with the memory over time by line of source
            and a flame graph of its peak. Pages and flame graphs open without a network.
        max_entries: The most allocations and frees that a window remembers; of more, the last ones.

    Raises:
        ConfigError: A value that cannot work.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import MemorySnapshot
        >>> profiler = MemorySnapshot(schedule="every 1000ba for 2ba", ranks=[0])
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    how_to_open: ClassVar[str] = """\
- `.pickle`: drop it on <https://pytorch.org/memory_viz>, which keeps it in the browser
  (`.pickle.gz`: `gunzip` it first). It is a pickle: only open those of runs that you trust.
- `.html`: memory over time, by line of source, and a flame graph of its peak;
  `_segment_plot.html`: what each segment of the allocator holds. Any browser, without a network.
- `_memory_flamegraph.svg`, `_segment_flamegraph.svg`, written when memory ran out: any browser,
  without a network; a click on a frame magnifies it.
- In a terminal: `python -m torch.cuda._memory_viz stats FILE.pickle`, or `trace FILE.pickle`.
"""

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        output_path_prefix: str | None = None,
        folder: str = "{run_name}/memory_snapshots",
        filename: str = "rank{rank}.{batch}.pickle",
        remote_file_name: str | None = "{run_name}/memory_snapshots/rank{rank}.{batch}.pickle",
        overwrite: bool = False,
        compress: bool = False,
        html: bool = True,
        max_entries: int = 100_000,
        num_traces_to_keep: int = -1,
        batches_per_trace: int = 20,
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
        self.html = flag("html", html)
        self.max_entries = whole("max_entries", max_entries, 1, "100000")
        self._last_moment, self._ran_out = OomSnapshot(), False

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last_moment": OomSnapshot(), "_ran_out": False}

    @property
    @override
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        suffixes = {"page": ".html"} | _AT_THE_END
        names = {name: self.beside(suffix) for name, suffix in suffixes.items()}
        return {name: file for name, file in names.items() if self.html or file[0].endswith(".svg")}

    @override
    def prepare(self, context: RunContext) -> None:
        super().prepare(context)
        self._ran_out = False
        if _has_cuda():
            self._last_moment.watch()
        else:
            self._writer = self._windows = None
            _tell_once()

    @override
    def record(self, path: Path, context: RunContext, warmup: int) -> Recording:
        memory = torch.cuda.memory
        # Frames of Python alone: those of C++ take seconds to resolve when the window ends.
        memory._record_memory_history("all", stacks="python", max_entries=self.max_entries)
        yield None
        try:
            return self._dump(path)
        finally:
            memory._record_memory_history(None)

    @override
    def after_batch(self, context: RunContext, batch: Any) -> None:
        self._last_moment.snapshot = None  # memory ran out, and training found a way
        super().after_batch(context, batch)

    @override
    def close(self, context: RunContext, reason: str) -> None:
        self._ran_out = reason == "exception" and isinstance(
            sys.exception(), torch.OutOfMemoryError
        )
        if self._ran_out:
            self._save_now(context)
        super().close(context, reason)
        self._last_moment.forget()

    def _save_now(self, context: RunContext) -> None:
        """Save what is allocated, unless a window is open: its history ends with all that."""
        if (
            self._writer is None
            or self._windows is None
            or self._windows.open is not None
            or not context.stage
        ):
            return
        path = self._writer.spool(context.stage)
        self.save(path, context.timestamp, context.stage, self._dump(path))

    def _dump(self, path: Path) -> Recorded:
        snapshot = self._last_moment.snapshot if self._ran_out else None
        path.write_bytes(pickle.dumps(snapshot or torch.cuda.memory._snapshot()))
        wanted = ("page", *_AT_THE_END) if self._ran_out else ("page",)
        names = [name for name in wanted if name in self.further_files]
        return Recorded(further={name: partial(_MAKE[name], path) for name in names})


def _has_cuda() -> bool:
    return torch.cuda.is_available()


@cache
def _tell_once() -> None:
    warn("MemorySnapshot records nothing: there is no CUDA device here.")


def _plot(kind: str, source: Path, page: Path) -> None:
    run_python("-m", "lightning_perf.charts.snapshot", kind, str(source), str(page))


def _flames(title: str, stacks_of: Callable[..., str], source: Path, picture: Path) -> None:
    def draw(folded: str) -> str:
        return FlameGraph(fold(read_folded(folded)), title, bytes_text).document()

    snapshot = pickle.loads(source.read_bytes())  # noqa: S301  our own file of just now
    # PyTorch's own drawing fetches a program from the web.
    picture.write_text(stacks_of(snapshot, format_flamegraph=draw), encoding="utf-8")


_MAKE: Mapping[str, Callable[[Path, Path], None]] = {
    "page": partial(_plot, "history"),
    "segment_plot": partial(_plot, "segments"),
    "segment_flamegraph": partial(_flames, "What each segment holds", _memory_viz.segments),
    "memory_flamegraph": partial(_flames, "What holds the memory", _memory_viz.memory),
}
