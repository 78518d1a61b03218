"""Timelines of Python's calls by VizTracer."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_perf.errors import ConfigError, RecorderBusy
from lightning_perf.profilers.profiler import Profiler, Recording
from lightning_perf.profilers.tools import (
    check_options,
    check_whole,
    given,
    installed,
    refuse_python_profiler,
    require,
)
from lightning_perf.schedule import Schedule
from lightning_perf.trace import TraceWriter
from lightning_perf.trainer import compat

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

#: What tells where the trace goes and whose it is; and sparse tracing, which needs the user's code.
_OURS = {
    "dump_raw", "log_sparse", "output_file", "pid_suffix", "process_name", "register_global",
    "trace_self", "verbose",
}  # fmt: skip
_REMEDY = "remove one of the two"


class VizTracer(Profiler):
    """Records every call of Python and when it happened, for Perfetto or ``vizviewer``.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``. Traces of several ranks can be merged: each rank is a process of its own in them.

    Args:
        compress: Whether files have VizTracer's own compressed form ``.cvf``, which
            ``viztracer --decompress`` reads, instead of ``.json.gz``, which Perfetto opens.
        tracer_entries: The most calls that a file holds; of more, the last ones.
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
        self.tracer_entries, self.options = tracer_entries, kwargs

    @override
    def prepare(self, driver: Driver) -> None:
        require(self, "viztracer")
        super().prepare(driver)
        if self.options.get("log_torch"):
            other = compat.profiler_name(driver.trainer)
            if other == "PyTorchProfiler":
                raise RecorderBusy("VizTracer", f"Trainer(profiler={other}())", _REMEDY)

    @override
    def new_writer(
        self, driver: Driver, filename: str, remote_file_name: str | None, compress: bool
    ) -> TraceWriter:
        if compress:
            filename = _cvf(filename)
            remote_file_name = None if remote_file_name is None else _cvf(remote_file_name)
        return super().new_writer(driver, filename, remote_file_name, not compress)

    @override
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        from viztracer import VizTracer as Tracer  # type: ignore[import-untyped]

        refuse_python_profiler(self)
        if self.options.get("log_torch") and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RecorderBusy("VizTracer", "a torch.profiler that is not ours", _REMEDY)
        rank = driver.ranks.global_rank
        tracer = Tracer(
            tracer_entries=self.tracer_entries,
            process_name=f"rank {rank}",
            dump_raw=True,
            register_global=False,
            verbose=0,
            **given(self.options),
        )
        # Processes of several nodes may share an id, and to VizTracer 0 is no id.
        tracer.setpid(rank + 1)
        tracer.start()
        yield None
        tracer.stop()
        # VizTracer chooses the format by the suffix, and the user chose the file's name.
        raw = path.with_name(f"{path.name}.json")
        try:
            tracer.save(str(raw), verbose=0)
        except ValueError as error:  # its word for a file that cannot be opened
            raise OSError(str(error)) from error
        raw.replace(path)
        return partial(_compress if self.compress else check_whole, path)


def _known() -> set[str]:
    from viztracer import VizTracer as Tracer

    return set(inspect.signature(Tracer).parameters) - _OURS - {"tracer_entries"}


def _cvf(name: str) -> str:
    return f"{name.removesuffix('.gz').removesuffix('.json').removesuffix('.cvf')}.cvf"


def _compress(path: Path) -> None:
    from viztracer.vcompressor import VCompressor  # type: ignore[import-untyped]

    packed = path.with_name(f"{path.name}.cvf")
    VCompressor().compress(json.loads(path.read_bytes()), str(packed))
    VCompressor().decompress(str(packed))  # raises: on a full disk the other one is silent
    packed.replace(path)
