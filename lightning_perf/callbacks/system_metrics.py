"""What the hardware does while it trains: use, throughput and memory of every node and GPU."""

from __future__ import annotations

import os
import re
from math import ceil, isfinite, nan
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from lightning_perf.core.reduce import Rows
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError, describe, warn
from lightning_perf.run.callback import PerfCallback, Report
from lightning_perf.run.hardware import CUDA_MEMORY, cuda_memory, gigabytes
from lightning_perf.system import pack, unpack

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext
    from lightning_perf.system import Sampler

_SHORTEST = 0.1
#: Parts of a second, which a `Time` does not have: how many make one.
_FINE = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|sec)", re.ASCII | re.IGNORECASE)
_PER_SECOND = {"ms": 1000, "s": 1, "sec": 1}
#: Seconds that the end of a short run waits for a sample.
_PATIENCE = 0.5

#: Nodes that report at one time: more of them take turns, so that a report stays small for rank 0
#: and for the loggers, whose number of metrics it is.
_AT_ONCE = 8

# What a rank sends: its node, its process, its memory, and, where it samples, the node's figures.
_HOST_MEMORY = ("rss", "peak_rss")
_MEMORY = (*_HOST_MEMORY, *CUDA_MEMORY)
_FIGURES = 2 + len(_MEMORY)


class SystemMetrics(PerfCallback):
    """Logs what each node and its GPUs do, averaged since the last report.

    ``system/node_{n}/...`` has Determined's metrics of a machine, and more of CPU, swap and the
    training's own processes; ``system/node_{n}/gpu_{i}/...`` use, memory, power, temperature,
    clocks and throttling of each GPU that the training sees, under nvidia-smi's number. Units are
    bytes, bytes a second, percent, watts, degrees Celsius and hertz; ``docs/system_metrics.md``
    has them all. One thread of one process a node samples, without touching CUDA. A sensor that
    fails is left out, with one warning.

    ``memory/...`` has, in gigabytes, what CUDA's allocator holds on rank 0, as Composer names it
    (with several ranks also the largest of all, ``memory/max_over_ranks/...``), and ``memory/rss``
    and ``memory/peak_rss`` of the training's processes on rank 0's node.

    It reports every ``Trainer(log_every_n_steps)``, in all stages under the same keys; what was
    not sampled since the last report is left out, and a run too short to be sampled reports at
    its end. More than eight nodes take turns.

    Args:
        interval: Time between samples: seconds, or a string such as ``"10s"``, ``"1m"``,
            ``"0.5s"`` or ``"500ms"``.

    Raises:
        ConfigError: An interval that is no time, or below 0.1 s.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import SystemMetrics
        >>> trainer = L.Trainer(callbacks=[SystemMetrics(interval="5s")], logger=False)
    """

    reports = True

    def __init__(self, interval: float | str = "1s") -> None:
        super().__init__()
        self.interval = interval
        self._seconds = _seconds(interval)
        #: What was reported last, by key; on rank 0.
        self.metrics: dict[str, float] = {}
        self._told = False
        self._step = -1
        self._allocator = True
        self._reports, self._turns = 0, 1

    @override
    def prepare(self, context: RunContext) -> None:
        self._step, self._allocator, self._reports = -1, True, 0
        nodes = context.ranks.world_size // max(context.ranks.local_world_size, 1)
        self._turns = ceil(nodes / _AT_ONCE) or 1
        if context.sampler is not None:
            context.sampler.subscribe(self.state_key, self._seconds)

    @override
    def close(self, context: RunContext, reason: str) -> None:
        if context.sampler is not None:
            context.sampler.unsubscribe(self.state_key)

    @override
    def on_start(self, context: RunContext) -> None:
        if not context.nested:
            self._told = False

    @override
    def due(self, context: RunContext, at_end: bool) -> bool:
        return not context.nested and (at_end or context.report_due)

    @override
    def collect(self, context: RunContext, at_end: bool) -> Report:
        turn = at_end or self._reports % self._turns == context.ranks.node_rank % self._turns
        sampler = context.sampler if turn else None
        figures = self._take(sampler, at_end) if sampler is not None else {}
        self._reports += 1
        memory = self._memory(context)
        held = (memory.get(name, nan) for name in _MEMORY)
        values = [context.ranks.node_rank, os.getpid(), *held, *pack(figures)]
        again = context.step == self._step
        # A report before the first sample has not told all of it.
        self._step = context.step if "rss" in memory else -1
        return Report(values, context.stage, context.step, at_end, {"again": again})

    @override
    def publish(self, context: RunContext, report: Report, rows: Rows) -> None:
        if context.sampler is not None:
            here = context.ranks.node_rank
            context.sampler.processes.update(int(pid) for pid in rows[rows[:, 0] == here, 1])
        if context.ranks.global_rank != 0:
            return
        # An end right after a report has the same memory at the same step.
        found = {} if report.own["again"] else _over_ranks(rows[:, 2:_FIGURES])
        figures = rows[:, _FIGURES:]
        for row in rows[np.isfinite(figures).any(1)].tolist() if figures.size else ():
            node = f"system/node_{row[0]:.0f}"
            found |= {f"{node}/{name}": value for name, value in unpack(row[_FIGURES:]).items()}
        if found:
            self.metrics = found
            context.log(found, report.step)

    def _take(self, sampler: Sampler, at_end: bool) -> dict[str, float]:
        if at_end and not self._told:
            sampler.refresh(_PATIENCE)
        figures = sampler.take(self.state_key)
        self._told = self._told or bool(figures)
        return figures

    def _memory(self, context: RunContext) -> dict[str, float]:
        """What this rank's allocator holds and, where it samples, the processes of its node."""
        latest = context.sampler.latest if context.sampler is not None else {}
        found = {name: latest.get(f"process_{name}") for name in _HOST_MEMORY}
        host = {name: gigabytes(each) for name, each in found.items() if each is not None}
        try:
            return host | (
                cuda_memory(context.trainer.strategy.root_device) if self._allocator else {}
            )
        except RuntimeError as error:  # an allocator of the user's that keeps no statistics
            self._allocator = False
            warn(f"CUDA's allocator is not measured ({describe(error)}).")
            return host


def _seconds(interval: object) -> float:
    example = "'10s', '500ms', or 0.5"
    seconds = interval
    if isinstance(interval, str):
        if fine := _FINE.fullmatch(interval):
            seconds = float(fine[1]) / _PER_SECOND[fine[2].lower()]
        else:
            seconds = _clock_time(interval, example)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds):
        raise ConfigError("interval", interval, "is no number of seconds", example)
    if seconds < _SHORTEST:
        problem = f"is too short to measure anything: at least {_SHORTEST} s"
        raise ConfigError("interval", interval, problem, example)
    return float(seconds)


def _clock_time(interval: str, example: str) -> float:
    try:
        time = Time.from_timestring(interval)
    except (ValueError, TypeError):
        raise ConfigError("interval", interval, "is no time", example) from None
    if time.unit is not TimeUnit.SECOND:
        raise ConfigError("interval", interval, "is no time of a clock", example)
    return time.value


def _over_ranks(ranks: Rows) -> dict[str, float]:
    """Rank 0's memory, and the largest of what several ranks know of themselves."""
    own = dict(zip(_MEMORY, ranks[0].tolist(), strict=True))
    found = {f"memory/{name}": value for name, value in own.items() if isfinite(value)}
    if len(ranks) > 1:
        most = dict(zip(_MEMORY, np.fmax.reduce(ranks).tolist(), strict=True))
        found |= {
            f"memory/max_over_ranks/{name}": value
            for name, value in most.items()
            if isfinite(own[name]) and name not in _HOST_MEMORY
        }
    return found
