"""Measures what each callback adds to a step, compared with Lightning's own callbacks.

    python benchmarks/overhead.py [rounds]

The model is tiny, so that the overhead is visible. Each round runs all rows once, in random order.
Small machines slow down by half for seconds at a time, so each row is represented by its fast
steps: the 3rd percentile over all rounds. The overhead is relative to a training without callbacks,
and is compared with that of Lightning's ThroughputMonitor. The ranges come from 500 bootstrap
samples of the rounds. Work that a callback does only once in fifty steps, such as reporting, is not
included.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import Flops, PyTorch, SpeedMonitor, Suite, SystemMetrics, Timings


def always_on() -> list[L.Callback]:
    """The callbacks that can stay on a Trainer permanently."""
    return [Suite([SpeedMonitor(), Flops(schedule="every 50ba"), Timings(), SystemMetrics()])]


STEPS, WARM = 400, 50
#: The percentile of a row's steps that represents it.
FAST = 3
REFERENCE = "Lightning's ThroughputMonitor"
SIMPLE = 'Trainer(profiler="simple")'
MLFLOW = "the always-on set, with MLflow"
ROWS: dict[str, Callable[[], list[L.Callback]]] = {
    "nothing": list,
    "an empty callback": lambda: [L.Callback()],
    REFERENCE: lambda: [ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0])],
    "Lightning's DeviceStatsMonitor": lambda: [DeviceStatsMonitor(cpu_stats=False)],
    "DeviceStatsMonitor(cpu_stats=True)": lambda: [DeviceStatsMonitor(cpu_stats=True)],
    "SpeedMonitor": lambda: [SpeedMonitor()],
    "Flops": lambda: [Flops()],
    "SystemMetrics": lambda: [SystemMetrics()],
    'PyTorch(schedule="never")': lambda: [PyTorch(schedule="never")],
    'PyTorch(schedule="100000ba")': lambda: [PyTorch(schedule="100000ba")],
    "SpeedMonitor and Flops": lambda: [SpeedMonitor(), Flops()],
    "Suite of both": lambda: [Suite([SpeedMonitor(), Flops()])],
    "Timings": lambda: [Timings()],
    "the always-on set": always_on,
    MLFLOW: always_on,
    SIMPLE: list,
}


class Tiny(L.LightningModule):
    """One small layer; records when each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A minimal step."""
        self.began.append(time.perf_counter())
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def steps(row: str, folder: str) -> list[float]:
    """Microseconds of each step of a training with the callbacks of a row."""
    store = f"sqlite:///{folder}/mlflow.db"
    logger = MLFlowLogger("overhead", tracking_uri=store) if row == MLFLOW else CSVLogger(folder)
    model = Tiny()
    data = DataLoader(TensorDataset(torch.zeros(8 * STEPS, 16)), batch_size=8)
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=ROWS[row](),
        profiler="simple" if row == SIMPLE else None,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(model, data)
    return [1e6 * (b - a) for a, b in pairwise(model.began[WARM:])]


def added(times: np.ndarray) -> np.ndarray:
    """The overhead of each row per step, from an array of rows, rounds and steps."""
    fast = np.percentile(times, FAST, axis=(1, 2))
    return fast - fast[list(ROWS).index("nothing")]


def main(rounds: int) -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows, reference = list(ROWS), list(ROWS).index(REFERENCE)
    times = np.zeros((len(rows), rounds, STEPS - WARM - 1))
    with tempfile.TemporaryDirectory() as folder:
        for turn in track(range(rounds), "training", transient=True):
            for row in random.sample(range(len(rows)), len(rows)):
                times[row, turn] = steps(rows[row], folder)
    again = np.random.default_rng(0).integers(rounds, size=(500, rounds))
    spread = np.array([added(times[:, chosen]) for chosen in again])
    table = Table(
        "callback", "us per step", "added us", "10 % to 90 %", "ratio to TM", "10 % to 90 %"
    )
    for row, mine in enumerate(added(times)):
        ratios = spread[:, row] / spread[:, reference]
        table.add_row(
            rows[row],
            f"{np.percentile(times[row], FAST):.0f}",
            f"{mine:+.1f}",
            "{:+.1f} to {:+.1f}".format(*np.percentile(spread[:, row], [10, 90])),
            f"{mine / added(times)[reference]:.2f}",
            "{:.2f} to {:.2f}".format(*np.percentile(ratios, [10, 90])),
        )
    Console(width=120).print(table, "TM is Lightning's ThroughputMonitor.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
