"""Measures the work of one rank for a report of many ranks, simulated in one process.

    python benchmarks/ranks.py

A small training runs with the always-on callbacks. Each report gets simulated values of the other
ranks: eight ranks per node, of which the first samples a node and its eight GPUs. The benchmark
measures the work of rank 0, which logs, from its own values to the finished metrics. The network
is not included.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import QUIET, quiet, spread
from torch import Tensor

from lightning_perf import Flops, SpeedMonitor, SystemMetrics, Timings
from lightning_perf.run import context, signals, windows
from lightning_perf.run.collective import HEADER, Gatherer
from lightning_perf.run.signals import GPU_COLUMNS
from lightning_perf.system.gpus import GPU

WORLDS = (1, 8, 64, 1000, 10_000)
PER_NODE = 8
CALLBACKS = (SpeedMonitor, Flops, Timings, SystemMetrics)


class Records:
    """The costs of the reports of one training."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        #: Per report: bytes per rank, and keys of all reports.
        self.sent = 0
        self.keys: set[str] = set()


class Simulated(Gatherer):
    """Generates values of many ranks from this rank's, and measures how they are processed."""

    ranks = 1
    records: ClassVar[Records] = Records()
    #: The columns of the current report.
    columns: ClassVar[Sequence[str]] = ()

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(SimpleNamespace(world_size=self.ranks, strategy=self))  # type: ignore[arg-type]
        self.width += PER_NODE * GPU_COLUMNS
        self._copying, self._factors = 0.0, 1 + torch.rand(self.ranks, 1, dtype=torch.float64) / 10

    def gather(self, *report: Any) -> None:
        """Measure a report, without the time that the network would take."""
        self._copying, began = 0.0, time.perf_counter()
        super().gather(*report)
        spent = time.perf_counter() - began - self._copying
        self.records.milliseconds.append(1e3 * spent)

    def all_gather(self, message: Tensor) -> Tensor:
        """One row per rank, as a strategy returns them."""
        began = time.perf_counter()
        self.records.sent = 8 * len(message)
        table = message.repeat(self.ranks, 1)
        table[:, HEADER:] *= self._factors
        ranks = torch.arange(self.ranks)
        for column, name in enumerate(self.columns, HEADER):
            if name == "memory/node_rank":
                table[:, column] = ranks // PER_NODE
            elif name.startswith("system/"):
                table[ranks % PER_NODE > 0, column] = 0.0
        self._copying += time.perf_counter() - began
        return table


class Watched(windows.Windows):
    """Passes the columns of a report to the simulation."""

    def _report(self, *given: Any) -> Any:
        Simulated.columns = list(self._columns)
        return super()._report(*given)


class FakeGpus:
    """Sensors of the GPUs of one node, as its sampler would report them."""

    def __init__(self, signal: Any) -> None:
        self.names = [f"gpu_{n}/{name}" for n in range(PER_NODE) for name in GPU]
        self._totals = signal._sampler.totals
        signal._sampler.totals = self

    def __call__(self) -> dict[str, tuple[float, float]]:
        """The real sensors' sums, and values of each GPU."""
        found = self._totals()
        seconds = found["free_memory"][1] if "free_memory" in found else 0.0
        return {**found, **dict.fromkeys(self.names, (40.0 * seconds, seconds))}


class Node(signals.NodeSignal):
    """The signal of a node with GPUs."""

    def __init__(self, sampler: Any, slots: int) -> None:
        super().__init__(sampler, PER_NODE)
        FakeGpus(self)


class Keys(L.pytorch.loggers.logger.DummyLogger):
    """Keeps the names of all metrics."""

    def log_metrics(self, *args: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Called at each report."""
        Simulated.records.keys |= (metrics or args[0]).keys()


def reports(ranks: int, folder: str, kinds: Sequence[type[Callback]]) -> Records:
    """Train with some callbacks, and return the costs of their reports."""
    Simulated.ranks, Simulated.records = ranks, Records()
    callbacks = [SystemMetrics("200ms") if kind is SystemMetrics else kind() for kind in kinds]
    L.Trainer(
        **QUIET, max_epochs=6 if ranks < 10_000 else 2, limit_val_batches=0, log_every_n_steps=5,
        callbacks=callbacks, logger=Keys(), default_root_dir=folder,
    ).fit(BoringModel())  # fmt: skip
    return Simulated.records


def memory(ranks: int, folder: str) -> float:
    """The maximum megabytes that numpy and Python hold for the reports of all callbacks."""
    tracemalloc.start()
    try:
        reports(ranks, folder, CALLBACKS)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def main() -> None:
    """Measure and print."""
    quiet()
    windows.Gatherer = Simulated  # type: ignore[misc]
    context.Windows, signals.NodeSignal = Watched, Node  # type: ignore[misc]
    sets = [*((kind,) for kind in CALLBACKS), CALLBACKS]
    names = [" ".join(kind.__name__ for kind in kinds) for kinds in sets]
    table = Table("ranks", *names[:-1], "all four", title="ms per report, median (10 to 90 %)")
    sizes = Table("ranks", "KB sent per rank", "MB received per rank", "peak MB", "metrics logged")
    with tempfile.TemporaryDirectory() as folder:
        reports(1, folder, CALLBACKS)  # the first training has imports and allocations
        least = memory(1, folder)
        for ranks in track(WORLDS, "training", transient=True):
            each = [reports(ranks, folder, kinds) for kinds in sets]
            table.add_row(f"{ranks:,}", *(spread(found.milliseconds) for found in each))
            found = each[-1]
            more = memory(ranks, folder) - least
            received = found.sent * ranks / 1e6
            sizes.add_row(
                f"{ranks:,}", f"{found.sent / 1e3:.1f}", f"{received:.1f}", f"+{more:.1f}",
                str(len(found.keys)),
            )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    console.print(sizes)


if __name__ == "__main__":
    main()
