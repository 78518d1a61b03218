"""A training small enough to run hundreds of times, and loggers that keep their input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import PerfWarning
from lightning_perf.run.callback import PerfCallback

WIDTH, HIDDEN, SAMPLES = 8, 16, 64
#: Options of a trainer with two processes. Both are forked: what a callback or logger keeps in
#: memory does not reach the test, so read it from files, such as those of CSVLogger.
RANKS: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": True}


class Small(L.LightningModule):
    """Two linear layers on fixed data; only the weights are random."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        x = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class TwoOptimizers(Small):
    """Manual optimization: two steps per batch, each for one of the layers."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = (self.net[0], self.net[2])
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]


#: Model FLOPs of one sample: two products forward, of which backward repeats the first for the
#: weights alone, since no gradient flows to the data.
FLOPS_PER_SAMPLE = 2 * (WIDTH * HIDDEN * 2 + HIDDEN * 1 * 3)


class Records(Logger):
    """Keeps every metric with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.params: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def of(self, key: str) -> list[tuple[int | None, float]]:
        """All points of one metric."""
        return [(step, row[key]) for step, row in self.rows if key in row]

    @property
    def keys(self) -> set[str]:
        """The names of all metrics."""
        return {key for _, row in self.rows for key in row}


class Dump(PerfCallback):
    """Writes the metrics reported on rank 0, and the training counts, to a file."""

    def __init__(self, path: Path, watched: list[Any]) -> None:
        super().__init__()
        self.path, self.watched = path, watched

    def close(self, context: Any, reason: str) -> None:
        if context.ranks.global_rank == 0:
            found = {key: value for each in self.watched for key, value in each.metrics.items()}
            now = context.progress.timestamp("train")
            self.path.write_text(json.dumps(found | {"batch": now.batch, "sample": now.sample}))


def samples_per_batch(found: dict[str, float]) -> float:
    """The samples per batch counted by `SpeedMonitor`, over all ranks."""
    return found["throughput/samples_per_sec"] / found["throughput/batches_per_sec"]


def ours(caught: Any) -> list[str]:
    """The messages of our own warnings among those caught."""
    return [str(w.message) for w in caught if issubclass(w.category, PerfWarning)]


OURS = {".run", "summary.json"}


def left_in(folder: Path) -> list[Path]:
    """The files of recorders in a folder, without the summary of the run."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in OURS)
    return sorted(path for path in found if path.parent.name != "attempts")


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU that writes below a folder."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "max_epochs": 1,
        "limit_val_batches": 0,
    }
    return L.Trainer(**defaults | options)


def launch(script: Path, ranks: int = 2) -> None:
    """Run a script as several processes under torchrun, with the caller's import path."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), str(script),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[:3000]
