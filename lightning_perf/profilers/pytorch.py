"""torch.profiler traces of windows of batches."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.profiler import _ExperimentalConfig as ExperimentalConfig  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_perf.checks import flag
from lightning_perf.errors import ConfigError, RecorderBusy
from lightning_perf.profilers import tools
from lightning_perf.profilers.base import Names, Profiler, Recorded, Recording
from lightning_perf.schedule import Schedule
from lightning_perf.traces.names import file_format, remote_format
from lightning_perf.traces.summary import TraceSummary, summarize

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}


def torch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``torch.profiler.profile``, with names and mappings converted.

    Raises:
        ConfigError: An activity or an experimental option that torch does not have.

    Example:
        >>> torch_options({"activities": ["cpu"]})
        {'activities': [<ProfilerActivity.CPU: 0>]}
    """
    converted = dict(options)
    if (named := converted.get("activities")) is not None:
        try:
            converted["activities"] = [_activity(name) for name in named]
        except (AttributeError, KeyError, TypeError):
            problem = f"is not a list of activities: {', '.join(_ACTIVITIES)}"
            raise ConfigError("activities", named, problem, "['cpu', 'cuda']") from None
    if isinstance(config := converted.get("experimental_config"), Mapping):
        try:
            converted["experimental_config"] = ExperimentalConfig(**config)
        except TypeError:
            problem = f"has an option or a value that torch {torch.__version__} does not know"
            example = "{'verbose': True}"
            raise ConfigError("experimental_config", config, problem, example) from None
    return converted


def _activity(named: Any) -> Any:
    """An activity, or a mapping from activities to what they collect."""
    if isinstance(named, Mapping):
        return {_activity(name): types for name, types in named.items()}
    return named if isinstance(named, ProfilerActivity) else _ACTIVITIES[named.lower()]


def _export(profiler: profile, path: Path) -> None:
    """Write the trace."""
    with tools.plain_name(path) as name:
        profiler.export_chrome_trace(name)
    if path.exists():  # otherwise the writer reports it
        tools.check_whole(path)


def _draw_memory(profiler: profile, device: str, page: Path) -> None:
    """Write the page about memory over time."""
    points = page.with_name(f"{page.name}.points")
    try:
        # Unwrapped, to avoid a deprecation warning that users cannot act on.
        inspect.unwrap(profile.export_memory_timeline)(profiler, str(points), device)
        tools.run_program("timeline", points, page, device)
    finally:
        points.unlink(missing_ok=True)


_OURS = {"schedule", "on_trace_ready", "execution_trace_observer"}
#: Seconds that the end of a stage waits for files; the end of the run waits for them again.
_FILE_TIMEOUT = 60.0
#: What torch needs to classify memory.
_OF_MEMORY = ("with_stack", "record_shapes", "profile_memory")
_MEMORY_EXAMPLE = "'rank{rank}.{batch}.pt.trace.memory.html'"


def _is_moved_by_swapping(module: torch.nn.Module) -> bool:
    """Whether torch moves a module by swapping parameters, such as DTensors.

    It refuses that while there are weak references to them.
    """
    always = torch.__future__.get_swap_module_params_on_conversion()
    return always or any(map(is_traceable_wrapper_subclass, module.parameters()))


class PyTorch(Profiler):
    """Records torch.profiler traces, for TensorBoard, Perfetto and chrome://tracing.

    The arguments that are not described here are those of every profiler; see ``Profiler``.

    Args:
        compress: Whether the trace is gzipped.
        memory_filename: Format string of a page about the memory of this rank's device over time,
            by category: ``rank{rank}.{batch}.pt.trace.memory.html``. It needs ``with_stack``,
            ``record_shapes`` and ``profile_memory``, and must end in ``.html``. Torch takes
            seconds per recorded batch to make it, on a worker thread.
        memory_remote_file_name: Format string of the page's artifact in MLflow; None disables the
            upload.
        use_gzip: Composer's name for ``compress``; takes precedence if not None.
        record_shapes: Whether to record the shapes of operator inputs.
        profile_memory: Whether to record the allocation of tensors.
        with_stack: Whether to record source lines.
        with_flops: Whether to estimate the FLOPs of operators.
        **kwargs: Further arguments of ``torch.profiler.profile``, such as ``activities``, which may
            be names (``["cpu", "cuda"]``), or ``experimental_config``, which may be a mapping.

    Raises:
        ConfigError: An invalid value, or an argument that torch.profiler does not have.

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
        *,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.pt.trace.json",
        remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
        memory_filename: str | None = None,
        memory_remote_file_name: str
        | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html",
        compress: bool = True,
        use_gzip: bool | None = None,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = True,
        **kwargs: Any,
    ) -> None:
        if use_gzip is not None:
            if flag("use_gzip", use_gzip) and not flag("compress", compress):
                raise ConfigError("use_gzip", use_gzip, "contradicts compress=False", "None")
            compress = use_gzip
        super().__init__(
            schedule, ranks, folder=folder, filename=filename, remote_file_name=remote_file_name,
            compress=compress, **kwargs,
        )  # fmt: skip
        self.record_shapes = flag("record_shapes", record_shapes)
        self.profile_memory = flag("profile_memory", profile_memory)
        self.with_stack = flag("with_stack", with_stack)
        self.with_flops = flag("with_flops", with_flops)
        self.memory_filename = memory_filename
        self.memory_remote_file_name = memory_remote_file_name
        torch_options(self.options)
        self._check_memory()

    @override
    def tool_options(self) -> Mapping[str, Any]:
        return tools.defaults(profile, _OURS)

    def _check_memory(self) -> None:
        checks = {"memory_filename": file_format, "memory_remote_file_name": remote_format}
        for field, check in checks.items():
            if (name := getattr(self, field)) is not None:
                check(name, field)
                if not name.endswith(".html"):
                    raise ConfigError(field, name, "does not end in .html", _MEMORY_EXAMPLE)
        missing = [f"{name}=True" for name in _OF_MEMORY if not getattr(self, name)]
        if self.memory_filename is not None and missing:
            problem = f"needs {' and '.join(missing)}"
            example = ", ".join([_MEMORY_EXAMPLE, *(f"{name}=True" for name in _OF_MEMORY)])
            raise ConfigError("memory_filename", self.memory_filename, problem, example)

    @property
    @override
    def further_files(self) -> Mapping[str, Names]:
        if self.memory_filename is None:
            return {}
        return {"memory_timeline": Names(self.memory_filename, self.memory_remote_file_name)}

    @override
    def record(self, path: Path, context: Run, warmup: int) -> Recording:
        if self.with_stack:
            tools.refuse_python_profiler(self)
        tools.refuse_torch_profiler(self, context)
        first = context.timestamp.batch
        profiler = profile(
            schedule=_phases(first, warmup),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            **torch_options(self.options),
        )
        # Step numbers are batch numbers, so that traces of several ranks match.
        profiler.step_num = first
        for key, value in self._metadata(context, warmup).items():
            profiler.preset_metadata_json(key, json.dumps(value, ensure_ascii=False))
        with tools.torch_profilers.starting(), warnings.catch_warnings():
            # A window is one cycle; torch 2.10 to 2.12 warn even so that earlier ones are lost.
            warnings.filterwarnings("ignore", ".*Profiler clears events")
            profiler.start()

        def tick() -> None:
            with tools.torch_profilers.starting():  # the step after the warm-up records
                profiler.step()

        yield tick
        with tools.no_collection():
            profiler.stop()
        profiler.action_map.clear()  # its own methods, a reference cycle
        device = str(context.trainer.strategy.root_device)
        further = dict.fromkeys(self.further_files, partial(_draw_memory, profiler, device))
        return Recorded(partial(_export, profiler, path), further)

    @override
    def prepare(self, context: Run) -> None:
        super().prepare(context)
        tools.torch_profilers.watch(self)

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        tools.torch_profilers.forget(self)

    def make_way(self) -> None:
        """Close the open recording, because another torch profiler begins to warm up or record."""
        if self._context is not None and self._session is not None and self._session.recording:
            self.call(self._stop, self._context)
            busy = RecorderBusy(type(self).__name__, "another torch.profiler", tools.REMOVE_ONE)
            self.call(self._skip, busy)

    @override
    def on_end(self, context: Run) -> None:
        super().on_end(context)
        if not context.nested and _is_moved_by_swapping(context.module):
            # Lightning moves the module next, which fails while a recording references parameters.
            context.file_worker.drain(_FILE_TIMEOUT)

    def trace_summary(self) -> TraceSummary:
        """The summary of this rank's last trace of training, which is read from its file.

        Raises:
            LookupError: No batches of training were recorded.
            TraceError: The file is damaged.
            OSError: The file cannot be read, such as one that was deleted.
        """
        path = self._session.writer.latest("train") if self._session is not None else None
        if path is None:
            raise LookupError("no batches of training were recorded on this rank")
        return summarize(path)

    def _metadata(self, context: Run, warmup: int) -> dict[str, Any]:
        ranks, stamp = context.ranks, context.moment.ahead(warmup).timestamp
        # Without what JSON escapes: torch writes slashes for all backslashes.
        run_name = re.sub(r'["\\\n\t]', lambda x: quote(x[0]), self._open_session.writer.run_name)
        placed = {name: getattr(ranks, name) for name in ("local_rank", "node_rank", "world_size")}
        counts = {name: getattr(stamp, name) for name in ("epoch", "batch", "step")}
        named = {"run_name": run_name, "stage": context.stage}
        return {"rank": ranks.global_rank, **placed, **named, **counts}


def _phases(first: int, warmup: int) -> Callable[[int], ProfilerAction]:
    def phase(step: int) -> ProfilerAction:
        # At construction torch calls it with step 0, whatever the first step is.
        warm = max(step, first) < first + warmup
        return ProfilerAction.WARMUP if warm else ProfilerAction.RECORD

    return phase
