"""What each callback adds to a step, beside Lightning's own callbacks, in one paired run.

    python benchmarks/overhead.py [rounds]

A tiny model, so that what is added shows. All rows take turns in every round; a row's figure is the
median over rounds of the difference between its typical step and that of no callback at all in the
same round, and its ratio to Lightning's ThroughputMonitor in that round.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import lightning as L
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import Flops, PyTorch, SpeedMonitor, Suite, SystemMetrics, Timings

STEPS, WARM = 400, 50
REFERENCE = "Lightning's ThroughputMonitor"
SIMPLE = 'Trainer(profiler="simple")'
ROWS: dict[str, Callable[[], list[L.Callback]]] = {
    "nothing": list,
    "an empty callback": lambda: [L.Callback()],
    REFERENCE: lambda: [ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0])],
    "Lightning's DeviceStatsMonitor": lambda: [DeviceStatsMonitor(cpu_stats=False)],
    "DeviceStatsMonitor of the CPU": lambda: [DeviceStatsMonitor(cpu_stats=True)],
    "SpeedMonitor": lambda: [SpeedMonitor()],
    "Flops": lambda: [Flops()],
    "SystemMetrics": lambda: [SystemMetrics()],
    'PyTorch(schedule="never")': lambda: [PyTorch(schedule="never")],
    'PyTorch(schedule="100000ba")': lambda: [PyTorch(schedule="100000ba")],
    "SpeedMonitor and Flops": lambda: [SpeedMonitor(), Flops()],
    "Suite of both": lambda: [Suite([SpeedMonitor(), Flops()])],
    "Timings": lambda: [Timings()],
    "the always-on set": lambda: [
        Suite([SpeedMonitor(), Flops(schedule="every 50ba"), Timings(), SystemMetrics()])
    ],
    SIMPLE: list,
}


class Tiny(L.LightningModule):
    """One small layer; notes when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A step of no weight."""
        self.began.append(time.perf_counter())
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def typical_step(callbacks: list[L.Callback], profiler: str | None, folder: str) -> float:
    """Microseconds of the median step of a training with these callbacks."""
    model = Tiny()
    data = DataLoader(TensorDataset(torch.zeros(8 * STEPS, 16)), batch_size=8)
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=callbacks,
        profiler=profiler,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(model, data)
    return 1e6 * statistics.median(b - a for a, b in pairwise(model.began[WARM:]))


def main(rounds: int) -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    steps: dict[str, list[float]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in track(range(rounds), "training", transient=True):
            for name, make in ROWS.items():
                profiler = "simple" if name == SIMPLE else None
                steps[name].append(typical_step(make(), profiler, folder))
    added = {
        name: [mine - bare for mine, bare in zip(times, steps["nothing"], strict=True)]
        for name, times in steps.items()
    }
    table = Table("callback", "step us", "added us", "10 % to 90 %", "x ThroughputMonitor")
    for name, times in added.items():
        low, *_, high = statistics.quantiles(times, n=10)
        ratio = statistics.median(a / b for a, b in zip(times, added[REFERENCE], strict=True))
        table.add_row(
            name,
            f"{statistics.median(steps[name]):.0f}",
            f"{statistics.median(times):+.1f}",
            f"{low:+.1f} to {high:+.1f}",
            f"{ratio:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
