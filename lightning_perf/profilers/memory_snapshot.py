"""Device memory by PyTorch's allocator: what each block is, and who asked for it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_perf.errors import ConfigError, warn
from lightning_perf.profilers.profiler import Profiler
from lightning_perf.profilers.recording import Recorded, Recording
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver


class MemorySnapshot(Profiler):
    """Records the history of CUDA memory in the windows of a schedule, and where it runs out.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``. An out-of-memory error ends the open window, with the history that led to it.
    Without an open window, what is allocated at that moment is saved; a schedule of ``"always"``
    has the history there too. Without CUDA, training runs with one warning.

    Args:
        compress: Whether the pickle is gzipped; ``gunzip`` it before viewing.
        html: Whether an interactive page lies beside each pickle. It holds the data, and loads its
            viewer from the web, as PyTorch's own pages do.
        max_entries: The most allocations and frees that a window remembers; of more, the last ones.

    Raises:
        ConfigError: A value that cannot work.

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
        if max_entries < 1:
            raise ConfigError("max_entries", max_entries, "leaves nothing to record", "100000")
        self.html, self.max_entries = html, max_entries

    @property
    @override
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        return {"page": self.beside(".html")} if self.html else {}

    @override
    def prepare(self, driver: Driver) -> None:
        super().prepare(driver)
        if not _has_cuda():
            self._writer = self._windows = None
            warn("MemorySnapshot records nothing: there is no CUDA device here.")

    @override
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        memory = torch.cuda.memory
        # Frames of Python alone: those of C++ take seconds to resolve when the window ends.
        memory._record_memory_history("all", stacks="python", max_entries=self.max_entries)
        yield None
        try:
            _dump(path)
        finally:
            memory._record_memory_history(None)
        return self._recorded(path)

    @override
    def close(self, driver: Driver, reason: str) -> None:
        if reason == "exception" and isinstance(sys.exception(), torch.OutOfMemoryError):
            self._save_now(driver)
        super().close(driver, reason)

    def _save_now(self, driver: Driver) -> None:
        """Save what is allocated, unless a window is open: its history ends with all that."""
        if (
            self._writer is None
            or self._windows is None
            or self._windows.open is not None
            or not driver.stage
        ):
            return
        path = self._writer.spool(driver.stage)
        _dump(path)
        self.save(path, driver.timestamp, driver.stage, self._recorded(path))

    def _recorded(self, path: Path) -> Recorded:
        return Recorded(further=dict.fromkeys(self.further_files, partial(_page, path)))


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _dump(path: Path) -> None:
    path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))


def _page(source: Path, page: Path) -> None:
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(source.read_bytes())  # noqa: S301  our own file of just now
    page.write_text(_memory_viz.trace_plot(snapshot))  # type: ignore[no-untyped-call]
