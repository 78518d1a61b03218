"""Measures the work of one rank for a report of many ranks, simulated in one process.

    python benchmarks/ranks.py

A small training runs with the always-on callbacks. Each report gets simulated values of the other
ranks. The benchmark measures the work of rank 0, which logs, from its own values to the finished
metrics. The network is not included.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import nan
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lightning_perf import Flops, SpeedMonitor, SystemMetrics, Timings
from lightning_perf.callbacks import system_metrics
from lightning_perf.core.reduce import Rows
from lightning_perf.run import windows
from lightning_perf.run.collective import Gatherer

WORLDS, LOCAL = (1, 8, 64, 1000), 8
CALLBACKS = (SpeedMonitor, Flops, Timings, SystemMetrics)


class Simulated(Gatherer):
    """Brings each rank numbers like this one's, and measures what is done with them."""

    ranks = 1
    #: Of each report, by the number of its callback.
    milliseconds: ClassVar[defaultdict[int, list[float]]] = defaultdict(list)

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(SimpleNamespace(world_size=self.ranks, strategy=self))  # type: ignore[arg-type]
        self._copying = 0.0

    def gather(
        self, tag: tuple[int, int], values: Sequence[float], then: Callable[[Rows], None]
    ) -> None:
        """Measure the exchange, less what the network would do."""
        self._copying, began = 0.0, time.perf_counter()
        super().gather(tag, values, then)
        spent = time.perf_counter() - began - self._copying
        self.milliseconds[tag[0]].append(1e3 * spent)

    def all_gather(self, message: Tensor) -> Tensor:
        """One row a rank, as a strategy would bring them."""
        began = time.perf_counter()
        table = message.repeat(self.ranks, 1)
        head, numbers = table[:, :3], table[:, 3:]
        if CALLBACKS[int(head[0, 0])] is SystemMetrics:
            # The first rank of a node has its figures, where it is the node's turn.
            numbers[:, 0] = torch.arange(self.ranks) // LOCAL
            figures = numbers[:, system_metrics._FIGURES :].clone()
            numbers[:, system_metrics._FIGURES :] = nan
            spoken = slice(None, LOCAL * system_metrics._AT_ONCE, LOCAL)
            numbers[spoken, system_metrics._FIGURES :] = figures[spoken]
        else:
            numbers *= 1 + torch.rand(self.ranks, 1) / 10
        self._copying = time.perf_counter() - began
        return table


def reports(ranks: int, folder: str) -> dict[int, list[float]]:
    """Milliseconds of each report of a training, by the number of its callback."""
    Simulated.ranks, Simulated.milliseconds = ranks, defaultdict(list)
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        limit_val_batches=0,
        log_every_n_steps=5,
        callbacks=[SpeedMonitor(window_size=4), Flops(), Timings(), SystemMetrics("200ms")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(BoringModel())
    return Simulated.milliseconds


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    windows.Gatherer = Simulated  # type: ignore[misc]
    table = Table("ranks", *(each.__name__ for each in CALLBACKS), title="ms a report, 10 to 90 %")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in track(WORLDS, "training", transient=True):
            cells = []
            for _, times in sorted(reports(ranks, folder).items()):
                low, *_, high = statistics.quantiles(times, n=10)
                cells.append(f"{statistics.median(times):.2f} ({low:.2f} to {high:.2f})")
            table.add_row(str(ranks), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
