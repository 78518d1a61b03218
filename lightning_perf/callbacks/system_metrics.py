"""Hardware metrics: utilization, throughput and memory of every node and GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_perf.checks import amount, is_number
from lightning_perf.core.window import Window
from lightning_perf.errors import ConfigError
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.system import HOST
from lightning_perf.system.gpus import GPU

if TYPE_CHECKING:
    from lightning_perf.run.run import Run

_SHORTEST = 0.1
#: Seconds that the end of a short run waits for a sample.
PATIENCE = 0.5

#: The maximum nodes that are logged one by one. For more nodes the spread is logged, so that the
#: number of keys is bounded.
_MOST_NODES = 8


class SystemMetrics(WindowCallback):
    """Logs metrics of each node and its GPUs, averaged since the last report.

    - ``system/node_{n}/...``: Determined's metrics of a machine, and more about CPU, swap and the
      training's own processes;
    - ``system/node_{n}/gpu_{i}/...``: utilization, memory, power, temperature, clocks and
      throttling of each GPU, by nvidia-smi's number;
    - ``memory/rss`` and ``memory/peak_rss``: resident memory of the training's processes on rank
      0's node;
    - ``memory/...``: memory of CUDA's allocator on rank 0, under Composer's names and in its unit,
      gigabytes (with several ranks also the largest of all, ``memory/max_over_ranks/...``).

    Other units are bytes, bytes per second, percent, watts, degrees Celsius and hertz;
    ``docs/keys.md`` lists them. One thread of one process per node samples, without
    using CUDA. A sensor that fails is left out, with one warning.

    Reports are due every ``Trainer(log_every_n_steps)``, in all stages under the same keys. A
    metric that was not sampled since the last report is left out; a run too short to be sampled
    reports at its end. Of more than eight nodes, ``system/nodes/...`` and ``system/gpus/...`` log
    each figure's ``min``, ``median`` and ``max``, and which node and GPU had the smallest and the
    largest.

    Args:
        interval: Time between samples: seconds, or a string such as ``"10s"``, ``"1m"``,
            ``"0.5s"`` or ``"500ms"``.

    Raises:
        ConfigError: The interval is not a time, or below 0.1 s.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import SystemMetrics
        >>> trainer = L.Trainer(callbacks=[SystemMetrics(interval="5s")], logger=False)
    """

    columns = ("system/*", "memory/*")
    prefixes_stage = False

    def __init__(self, interval: float | str = "1s") -> None:
        super().__init__()
        self.interval = interval
        self._seconds = _seconds(interval)
        self._sampled = False
        self._memory_step = -1

    @override
    def prepare(self, context: Run) -> None:
        self._memory_step = -1
        if context.sampler is not None:
            context.sampler.subscribe(self.state_key, self._seconds)
        super().prepare(context)

    @override
    def close(self, context: Run, reason: str) -> None:
        super().close(context, reason)
        if context.sampler is not None:
            context.sampler.unsubscribe(self.state_key)

    @override
    def on_start(self, context: Run) -> None:
        super().on_start(context)
        if not context.nested:
            self._sampled = False

    @override
    def window_due(self, context: Run, at_end: bool) -> bool:
        if context.nested:
            return False
        if at_end and not self._sampled and context.sampler is not None:
            context.sampler.refresh(PATIENCE)
        return super().window_due(context, at_end)

    @override
    def on_window(self, window: Window) -> Mapping[str, float]:
        if window.rank != 0:
            return {}
        # A report at the end of a stage would repeat the memory of an earlier report at that step.
        metrics = _memory(window) if window.step != self._memory_step else {}
        self._memory_step = window.step if "memory/rss" in metrics else -1
        sampled = _averages(window)
        self._sampled = self._sampled or bool(sampled)
        return metrics | sampled


def _seconds(interval: float | str) -> float:
    example = "'10s', '500ms', or 0.5"
    known, unit = amount(interval.strip()) if isinstance(interval, str) else (interval, "sec")
    if unit != "sec" or not is_number(known) or not isfinite(known):
        raise ConfigError("interval", interval, "is not a wall-clock time", example)
    if float(known) < _SHORTEST:
        problem = f"is too short to measure anything: at least {_SHORTEST} s"
        raise ConfigError("interval", interval, problem, example)
    return float(known)


class _Layout(NamedTuple):
    """Positions of the figures of a node, or of its GPU slots, in a row of a window."""

    names: Sequence[str]
    #: Positions: of each slot's GPU number, and of each slot's values and seconds.
    numbers: list[int]
    values: list[list[int]]
    seconds: list[list[int]]


@cache
def _layouts(columns: tuple[tuple[str, int], ...]) -> list[_Layout]:
    """The layout of the node and, if it has GPUs, of their slots."""
    at = dict(columns)
    hosts = [name for name in HOST if f"system/{name}" in at]
    values = [at[f"system/{name}"] for name in hosts]
    seconds = [at[f"system/{name}/seconds"] for name in hosts]
    layouts = [_Layout(hosts, [], [values], [seconds])]
    slots = [each for each in at if re.fullmatch(r"system/gpu_slot_\d+", each)]
    if slots:
        figures = [[at[f"{slot}/{name}"] for name in GPU] for slot in slots]
        shared = [[at[f"{slot}/seconds"]] * len(GPU) for slot in slots]
        layouts.append(_Layout(GPU, [at[slot] for slot in slots], figures, shared))
    return layouts


def _averages(window: Window) -> dict[str, float]:
    """Means of the samples over the window: of each node, or the spread over many nodes."""
    first: dict[int, int] = {}  # the first rank of each node, which samples
    for rank, number in enumerate(window["memory/node_rank"].tolist()):
        first.setdefault(int(number), rank)
    nodes, rows = [*first], window.rows_of([*first.values()])
    metrics: dict[str, float] = {}
    for layout in _layouts(tuple(window.columns.items())):
        seconds = rows[:, layout.seconds]
        if not seconds.any():  # not sampled meanwhile
            continue
        # Nodes x slots x figures; not finite if not sampled.
        with np.errstate(divide="ignore", invalid="ignore"):
            means = rows[:, layout.values] / seconds
        gpus = rows[:, layout.numbers]
        if len(nodes) > _MOST_NODES:
            metrics |= _spread(layout.names, nodes, gpus, means)
            continue
        known = np.isfinite(means)
        places, values = np.argwhere(known).tolist(), means[known].tolist()
        for (node, slot, figure), value in zip(places, values, strict=True):
            gpu = f"gpu_{gpus[node, slot]:.0f}/" if gpus.size else ""
            metrics[f"system/node_{nodes[node]}/{gpu}{layout.names[figure]}"] = value
    return metrics


def _spread(names: Sequence[str], nodes: Any, gpus: Any, means: Any) -> Iterator[tuple[str, float]]:
    """The spread of each figure over the nodes, or over the GPUs of all nodes, and where."""
    prefix, where = "system/nodes", {"node": np.repeat(nodes, means.shape[1])}
    if gpus.size:
        prefix, where["gpu"] = "system/gpus", gpus.ravel()
    values = means.reshape(-1, len(names)).T
    known = np.isfinite(values)
    order = np.where(known, values, inf).argsort(axis=1)
    for name, figures, places, count in zip(names, values, order, known.sum(axis=1), strict=True):
        if not count:
            continue
        middle = figures[places[[(count - 1) // 2, count // 2]]]
        yield f"{prefix}/{name}/median", float(middle.mean())
        for label, at in (("min", places[0]), ("max", places[count - 1])):
            yield f"{prefix}/{name}/{label}", float(figures[at])
            for kind, each in where.items():
                yield f"{prefix}/{name}/{label}_{kind}", float(each[at])


def _memory(window: Window) -> dict[str, float]:
    """Rank 0's memory, and with several ranks the maximum of all allocators."""
    metrics = {}
    for column in _memory_columns(tuple(window.columns)):
        own = window.own(column)
        if isfinite(own):
            metrics[column] = own
            if window.world_size > 1 and not column.endswith("rss"):
                name = column.replace("memory/", "memory/max_over_ranks/")
                metrics[name] = float(np.nanmax(window[column]))
    return metrics


@cache
def _memory_columns(columns: tuple[str, ...]) -> list[str]:
    none = ("memory/node_rank", "memory/pid", "memory/rss_level")
    return [each for each in columns if each.startswith("memory/") and each not in none]
