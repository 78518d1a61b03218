"""Trains three times: alone, with our callbacks, and under torch's own FLOP counter."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_perf import Flops, PyTorch, SpeedMonitor, Suite, SystemMetrics, Timings

#: One metric of each of our callbacks.
EXPECTED = ("throughput/batches_per_sec", "batch_flops", "timings/backward", "memory/rss")
#: Events that torch.profiler records in every window.
RECORDED = ("Optimizer.step", "aten::")


class Train(Protocol):
    """Trains with options for the Trainer, and returns the module."""

    def __call__(self, **options: Any) -> nn.Module: ...


class TorchCounter(L.Callback):
    """Writes the FLOPs that torch's counter finds in the last batch of a training to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, *args: Any) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.file.write_text(str(self.counter.get_total_flops()))


def train_alike(
    train: Train, folder: Path, callbacks: list[Any], logger: Any = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights and the random state at the end of a seeded training."""
    L.seed_everything(7)
    module = train(
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=logger,
        default_root_dir=folder,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, torch.get_rng_state()


def logged(folder: Path) -> dict[str, float]:
    """The last value of each metric in the CSVLogger's files below a folder."""
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return {
            key: float(text) for row in csv.DictReader(lines) for key, text in row.items() if text
        }


def recorded(folder: Path) -> set[str]:
    """The names of all events in the traces below a folder."""
    traces = [json.loads(gzip.decompress(file.read_bytes())) for file in folder.rglob("*.json.gz")]
    return {str(event.get("name")) for trace in traces for event in trace["traceEvents"]}


def compare(train: Train, folder: Path) -> tuple[float, float]:
    """Train alone, with us and under torch's counter; assert that our callbacks change nothing.

    Returns:
        FLOPs of the last batch, as Flops and as torch's FlopCounterMode count them.
    """
    alone, with_us, counted = (folder / name for name in ("alone", "with_us", "counted"))
    weights, random = train_alike(train, alone, [])

    suite = Suite([SpeedMonitor(window_size=2), Flops("1ba"), Timings(), SystemMetrics("100ms")])
    profiler = PyTorch(schedule="at 3ba for 2ba")
    found, after = train_alike(train, with_us, [suite, profiler], CSVLogger(with_us))
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert torch.equal(after, random)

    metrics = logged(with_us)
    assert set(EXPECTED) <= metrics.keys()
    events = recorded(with_us)
    assert all(any(name.startswith(what) for name in events) for what in RECORDED)

    counted.mkdir()
    train_alike(train, counted, [TorchCounter(counted / "flops")])
    return metrics["batch_flops"], float((counted / "flops").read_text())
