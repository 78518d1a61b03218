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
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from lightning_perf import Flops, SpeedMonitor, SystemMetrics, Timings
from lightning_perf.core.window import Rows
from lightning_perf.run import windows
from lightning_perf.run.collective import Gatherer

WORLDS = (1, 8, 64, 1000)
CALLBACKS = (SpeedMonitor, Flops, Timings, SystemMetrics)


class Simulated(Gatherer):
    """Gathers numbers like this rank's from many ranks, and measures what is done with them."""

    ranks = 1
    milliseconds: ClassVar[list[float]] = []

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(SimpleNamespace(world_size=self.ranks, strategy=self))  # type: ignore[arg-type]
        self._copying = 0.0

    def gather(
        self, tag: tuple[int, int], values: Sequence[float], then: Callable[[Rows], None]
    ) -> None:
        """Measure a report, without the time that the network would take."""
        self._copying, began = 0.0, time.perf_counter()
        super().gather(tag, values, then)
        spent = time.perf_counter() - began - self._copying
        self.milliseconds.append(1e3 * spent)

    def all_gather(self, message: Tensor) -> Tensor:
        """One row per rank, as a strategy returns them."""
        began = time.perf_counter()
        table = message.repeat(self.ranks, 1)
        table[:, 3:] *= 1 + torch.rand(self.ranks, 1) / 10
        self._copying += time.perf_counter() - began
        return table


def reports(ranks: int, folder: str, kinds: Sequence[type[Callback]]) -> list[float]:
    """Milliseconds of each report of a training."""
    Simulated.ranks, Simulated.milliseconds = ranks, []
    callbacks = [SystemMetrics("200ms") if kind is SystemMetrics else kind() for kind in kinds]
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        limit_val_batches=0,
        log_every_n_steps=5,
        callbacks=callbacks,
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
    sets = [*((kind,) for kind in CALLBACKS), CALLBACKS]
    names = [" ".join(kind.__name__ for kind in kinds) for kinds in sets]
    table = Table("ranks", *names[:-1], "all four", title="ms per report, 10 to 90 %")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in track(WORLDS, "training", transient=True):
            cells = []
            for kinds in sets:
                times = reports(ranks, folder, kinds)
                low, *_, high = statistics.quantiles(times, n=10)
                cells.append(f"{statistics.median(times):.2f} ({low:.2f} to {high:.2f})")
            table.add_row(str(ranks), *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
