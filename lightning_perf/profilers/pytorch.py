"""Traces by torch.profiler."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, profile
from typing_extensions import override

from lightning_perf.errors import RecorderBusy
from lightning_perf.profilers.profiler import Profiler, Recording
from lightning_perf.profilers.tools import check_options, check_whole, given
from lightning_perf.schedule import Schedule
from lightning_perf.trainer import compat

if TYPE_CHECKING:
    from lightning_perf.trainer.driver import Driver

_OURS = {"schedule", "on_trace_ready", "execution_trace_observer"}
_REMEDY = "remove one of the two"


class PyTorch(Profiler):
    """Records torch.profiler traces, for TensorBoard, Perfetto and chrome://tracing.

    The arguments from ``schedule`` to ``batches_per_trace`` are those of every profiler; see
    ``Profiler``.

    Args:
        record_shapes: Whether to record the shapes of operator inputs.
        profile_memory: Whether to record the allocation of tensors.
        with_stack: Whether to record source lines.
        with_flops: Whether to estimate the FLOPs of operators.
        **kwargs: Further arguments of ``torch.profiler.profile``, such as ``activities``.

    Raises:
        ConfigError: A value that cannot work, or an argument that torch.profiler does not know.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import Every, PyTorch
        >>> profiler = PyTorch(schedule=Every("1000ba", lasting="3ba"), ranks=[0])
        >>> trainer = L.Trainer(callbacks=[profiler], logger=False)
    """

    warms_up = True

    def __init__(
        self,
        schedule: Schedule | str | None = None,
        ranks: list[int] | int | None = None,
        output_path_prefix: str | None = None,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        overwrite: bool = False,
        compress: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
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
        known = set(inspect.signature(profile).parameters) - _OURS
        check_options(PyTorch, kwargs, known, "torch.profiler")
        self.record_shapes, self.profile_memory = record_shapes, profile_memory
        self.with_stack, self.with_flops = with_stack, with_flops
        self.options = kwargs

    @override
    def prepare(self, driver: Driver) -> None:
        super().prepare(driver)
        other = compat.profiler_name(driver.trainer)
        if other == "PyTorchProfiler":
            raise RecorderBusy("PyTorch", f"Trainer(profiler={other}())", _REMEDY)

    @override
    def record(self, path: Path, driver: Driver, warmup: int) -> Recording:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RecorderBusy("PyTorch", "a torch.profiler that is not ours", _REMEDY)
        first = driver.timestamp.batch
        profiler = profile(
            schedule=_phases(first, warmup),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            **given(self.options),
        )
        # Steps bear the numbers of their batches, so that traces of several ranks line up.
        profiler.step_num = first
        for key, value in _metadata(driver).items():
            profiler.preset_metadata_json(key, json.dumps(value))
        profiler.start()
        yield profiler.step
        profiler.stop()
        return partial(_export, profiler, path)


def _export(profiler: profile, path: Path) -> None:
    profiler.export_chrome_trace(str(path))
    if path.exists():  # or the writer says that nothing was left
        check_whole(path)


def _phases(first: int, warmup: int) -> Callable[[int], ProfilerAction]:
    def phase(step: int) -> ProfilerAction:
        # At construction torch asks about step 0, wherever the recording begins.
        warm = max(step, first) < first + warmup
        return ProfilerAction.WARMUP if warm else ProfilerAction.RECORD

    return phase


def _metadata(driver: Driver) -> dict[str, Any]:
    ranks, stamp = driver.ranks, driver.timestamp
    return {
        "rank": ranks.global_rank,
        "local_rank": ranks.local_rank,
        "node_rank": ranks.node_rank,
        "world_size": ranks.world_size,
        "run_name": driver.run_name,
        "stage": driver.stage,
        "epoch": stamp.epoch,
        "batch": stamp.batch,
        "step": stamp.step,
    }
