"""Host memory by memray: who allocated what."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.errors import RecorderBusy
from lightning_perf.profilers.profiler import Profiler
from lightning_perf.profilers.recording import Recorded, Recording
from lightning_perf.profilers.tools import check_options, given, refuse_python_profiler, require
from lightning_perf.schedule import Schedule

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

#: What memray.Tracker takes besides; it is written in C and cannot be asked.
_OPTIONS = (
    "file_format",
    "memory_interval_ms",
    "trace_python_allocators",
    "track_object_lifetimes",
)
#: Seconds that the making of one page may take.
_PATIENCE = 300.0


class Memray(Profiler):
    """Records every allocation of host memory in the windows of a schedule.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``. ``memray stats``, ``tree`` and ``flamegraph`` read the files.

    Args:
        compress: Whether the file is gzipped; ``gunzip`` it before memray reads it.
        flamegraph: Whether a flame graph of the peak lies beside each file, as an HTML page that
            opens without a network.
        native_traces: Whether to record frames of C and C++ too, which costs more.
        **kwargs: Further arguments of ``memray.Tracker``: ``trace_python_allocators``,
            ``memory_interval_ms``, ``file_format``, ``track_object_lifetimes``.

    Raises:
        ConfigError: A value that cannot work, or an argument that memray does not know.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Memray
        >>> profiler = Memray(schedule="at 0.5dur for 5ba", flamegraph=True)
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        output_path_prefix: str | None = None,
        folder: str = "{run_name}/memray",
        filename: str = "rank{rank}.{batch}.bin",
        remote_file_name: str | None = "{run_name}/memray/rank{rank}.{batch}.bin",
        overwrite: bool = False,
        compress: bool = False,
        flamegraph: bool = False,
        native_traces: bool = False,
        num_traces_to_keep: int = -1,
        batches_per_trace: int = 20,
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
        check_options(Memray, kwargs, _OPTIONS, "memray")
        self.flamegraph, self.native_traces, self.options = flamegraph, native_traces, kwargs

    @property
    @override
    def further_files(self) -> Mapping[str, tuple[str, str | None]]:
        return {"flamegraph": self.beside(".html")} if self.flamegraph else {}

    @override
    def prepare(self, driver: Driver) -> None:
        require(self, "memray")
        super().prepare(driver)

    @override
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        from memray import Tracker

        refuse_python_profiler(self)
        tracker = Tracker(path, native_traces=self.native_traces, **given(self.options))
        try:
            tracker.__enter__()
        except RuntimeError as error:  # a tracker that is not ours
            path.unlink(missing_ok=True)
            remedy = "remove one of the two"
            raise RecorderBusy("Memray", "a memray that is not ours", remedy) from error
        yield None
        tracker.__exit__(None, None, None)
        return Recorded(further=dict.fromkeys(self.further_files, partial(_flamegraph, path)))


def _flamegraph(source: Path, page: Path) -> None:
    # Another process, since memray would hold this one's interpreter lock all the while.
    command = [sys.executable, "-P", "-m", "memray", "flamegraph", "--no-web", "--force"]
    done = subprocess.run(  # noqa: S603
        [*command, "--output", str(page), str(source)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        raise OSError(f"memray flamegraph: {(done.stderr or done.stdout).strip()[-200:]}")
