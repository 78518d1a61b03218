"""What the hardware does while it trains: use, throughput and memory of every node and GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.core.window import Window
from lightning_perf.errors import ConfigError
from lightning_perf.run.hardware import HOST_MEMORY
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.system import gpu_key

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext

_SHORTEST = 0.1
#: Fractions of a second, which `Time` does not have, and how many make one.
_FINE = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|sec)", re.ASCII | re.IGNORECASE)
_PER_SECOND = {"ms": 1000, "s": 1, "sec": 1}
#: Seconds that the end of a short run waits for a sample.
_PATIENCE = 0.5

#: Nodes per report: more of them take turns, which bounds the number of metrics per report.
_AT_ONCE = 8


class SystemMetrics(WindowCallback):
    """Logs what each node and its GPUs do, averaged since the last report.

    - ``system/node_{n}/...``: Determined's metrics of a machine, and more about CPU, swap and the
      training's own processes;
    - ``system/node_{n}/gpu_{i}/...``: utilization, memory, power, temperature, clocks and
      throttling of each GPU, by nvidia-smi's number;
    - ``memory/...``: what CUDA's allocator holds on rank 0, in gigabytes, under Composer's names
      (with several ranks also the largest of all, ``memory/max_over_ranks/...``), and
      ``memory/rss`` and ``memory/peak_rss`` of the training's processes on rank 0's node.

    Units are bytes, bytes per second, percent, watts, degrees Celsius and hertz;
    ``docs/system_metrics.md`` lists them. One thread of one process per node samples, without
    using CUDA. A sensor that fails is left out, with one warning.

    Reports are due every ``Trainer(log_every_n_steps)``, in all stages under the same keys. What
    was not sampled since the last report is left out; a run too short to be sampled reports at its
    end. More than eight nodes take turns.

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
        self._reports, self._turns = 0, 1
        # By rank, the totals of its node at the last report that had it.
        self._before: dict[int, Sequence[float]] = {}

    @override
    def prepare(self, context: RunContext) -> None:
        self._memory_step, self._reports, self._before = -1, 0, {}
        nodes = context.ranks.world_size // max(context.ranks.local_world_size, 1)
        self._turns = ceil(nodes / _AT_ONCE) or 1
        if context.sampler is not None:
            context.sampler.subscribe(self.state_key, self._seconds)
        super().prepare(context)

    @override
    def close(self, context: RunContext, reason: str) -> None:
        super().close(context, reason)
        if context.sampler is not None:
            context.sampler.unsubscribe(self.state_key)

    @override
    def on_start(self, context: RunContext) -> None:
        super().on_start(context)
        if not context.nested:
            self._sampled = False

    @override
    def window_due(self, context: RunContext, at_end: bool) -> bool:
        if context.nested:
            return False
        if at_end and not self._sampled and context.sampler is not None:
            context.sampler.refresh(_PATIENCE)
        return super().window_due(context, at_end)

    @override
    def on_window(self, window: Window) -> Mapping[str, float]:
        nodes = window["memory/node_rank"].astype(int).tolist()
        pids = window["memory/pid"].astype(int).tolist()
        if self._context is not None and self._context.sampler is not None:
            here = nodes[window.rank]
            found = {pid for pid, node in zip(pids, nodes, strict=True) if node == here}
            self._context.sampler.processes.update(found)
        if window.rank != 0:
            return {}
        # The end of a stage right after a report has the same memory at the same step.
        metrics = _memory(window) if window.step != self._memory_step else {}
        self._memory_step = window.step if "memory/rss" in metrics else -1
        for rank, node in enumerate(nodes):
            if window.at_end or self._reports % self._turns == node % self._turns:
                means = self._means(window, rank)
                self._sampled = self._sampled or bool(means)
                metrics |= {f"system/node_{node}/{name}": mean for name, mean in means.items()}
        self._reports += 1
        return metrics

    def _means(self, window: Window, rank: int) -> dict[str, float]:
        """Means over time of one rank's sensors, since the last report that had them."""
        now = window.totals[rank]
        before = self._before.get(rank)
        self._before[rank] = now
        found: dict[str, float] = {}
        columns = window.columns
        for column, position in columns.items():
            weight = columns.get(f"{column}/seconds")
            if weight is None:
                continue
            seconds, value = now[weight], now[position]
            if before is not None:
                seconds, value = seconds - before[weight], value - before[position]
            if seconds > 0:
                name = column.removeprefix("system/")
                slot, slash, figure = name.partition("/")
                if slash:
                    name = f"{gpu_key(now[columns[f'system/{slot}']])}/{figure}"
                found[name] = float(value / seconds)
        return found


def _seconds(interval: object) -> float:
    example = "'10s', '500ms', or 0.5"
    seconds = interval
    if isinstance(interval, str):
        if fine := _FINE.fullmatch(interval):
            seconds = float(fine[1]) / _PER_SECOND[fine[2].lower()]
        else:
            seconds = _clock_time(interval, example)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds):
        raise ConfigError("interval", interval, "is not a number of seconds", example)
    if seconds < _SHORTEST:
        problem = f"is too short to measure anything: at least {_SHORTEST} s"
        raise ConfigError("interval", interval, problem, example)
    return float(seconds)


def _clock_time(interval: str, example: str) -> float:
    try:
        time = Time.from_timestring(interval)
    except (ValueError, TypeError):
        raise ConfigError("interval", interval, "is not a time", example) from None
    if time.unit is not TimeUnit.SECOND:
        raise ConfigError("interval", interval, "is not a wall-clock time", example)
    return time.value


def _memory(window: Window) -> dict[str, float]:
    """Rank 0's memory, and with several ranks the most that any allocator holds."""
    found = {}
    for column in window.columns:
        group, _, name = column.partition("/")
        if group != "memory" or name in ("node_rank", "pid"):
            continue
        own = window.own(column)
        if isfinite(own):
            found[column] = own
            if window.world_size > 1 and name not in HOST_MEMORY:
                found[f"memory/max_over_ranks/{name}"] = float(np.nanmax(window[column]))
    return found
