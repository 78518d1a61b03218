"""What is made of a torch.profiler that has stopped, off the training thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile

from lightning_perf.profilers.tools import check_whole, run_python


class TorchFiles:
    """The files of one recording.

    Args:
        profiler: Which has stopped.
        path: Where its trace belongs.
        device: Whose memory is of interest.
        on_error: Hears why torch cannot tell what the memory was for.
    """

    def __init__(
        self, profiler: profile, path: Path, device: str, on_error: Callable[[Exception], None]
    ) -> None:
        self._profiler, self._path, self._device = profiler, path, device
        self._on_error = on_error
        self._exported = False

    def trace(self) -> None:
        """Write the trace, which the other files are made of, unless it is there."""
        if not self._exported:
            self._profiler.export_chrome_trace(str(self._path))
            self._exported = True
            if self._path.exists():  # or the writer says that nothing was left
                check_whole(self._path)

    def key_averages(self, target: Path) -> None:
        """Write the table of operators."""
        self.trace()
        run_python("-m", "lightning_perf.profilers.operator_table", str(self._path), str(target))

    def memory_timeline(self, target: Path) -> None:
        """Write the page about memory."""
        points = target.with_name(f"{target.name}.points")
        try:
            source = self._points(points)
            page = "lightning_perf.profilers.memory_page"
            run_python("-m", page, str(source), str(target), self._device)
        finally:
            points.unlink(missing_ok=True)

    def _points(self, path: Path) -> Path:
        try:
            # Unwrapped, since it is marked as deprecated, which users cannot act on.
            export = inspect.unwrap(profile.export_memory_timeline)
            export(self._profiler, str(path), self._device)
        except Exception as error:  # torch has taken it away, or cannot make sense of the model
            self._on_error(error)
            self.trace()
            return self._path
        return path
