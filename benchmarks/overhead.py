"""Measures what each callback adds to a step, compared with Lightning's and other packages' own.

    python benchmarks/overhead.py [--turns 100] [--rows WORD ...]

The model is tiny, so that the overhead is visible. All trainings run in one process and take turns
of 50 steps, in random order. Each turn is compared with the adjacent turn of "nothing", so that a
slowdown of the machine for seconds affects both. "nothing, once more" shows the resolution of the
method. The median is that of a turn's steps, the mean that of ten turns, with the report that each
turn has. Both are medians over the turns, or over the tens of turns, with the 5 % to 95 % interval
of 400 bootstrap samples. Reports that wait to be delivered together do so in the time of their own
training. "background" is the CPU time of the threads that a callback starts, in the time of one
step: in the other columns, all rows share it.

Callbacks that change the whole process run apart from the others, beside "nothing": those of fkat
and TraceML, where they are installed. The table is also written to
``results/overhead-DATE.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from rich.console import Console
from rich.table import Table
from shared import QUIET, dated, quiet, save
from torch import Tensor, nn

from lightning_perf import (
    Flops,
    Memray,
    PyTorch,
    SpeedMonitor,
    SystemMetrics,
    Timings,
    VizTracer,
    always_on,
)

#: Steps per turn, each with one report; and turns before the measured ones.
STEPS, WARM = 50, 6
NOTHING, REFERENCE, MLFLOW = "nothing", "Lightning's ThroughputMonitor", ", with MLflow"
#: Ends the names of rows whose module has ``flops_per_batch``, so that nothing is counted.
DECLARED = ", declared FLOPs"
Options = dict[str, Any]


def _callbacks(*makers: Callable[[], L.Callback]) -> Callable[[], Options]:
    return lambda: {"callbacks": [make() for make in makers]}


def _throughput() -> L.Callback:
    return ThroughputMonitor(batch_size_fn=lambda batch: batch[0].shape[0], window_size=10)


def _waiting() -> Options:
    quiet = torch.profiler.schedule(wait=10**6, warmup=1, active=1)
    return {"profiler": PyTorchProfiler(schedule=quiet)}


def _peer(module: str, name: str) -> Callable[[], Options]:
    def options() -> Options:
        return {"callbacks": [getattr(import_module(module), name)()]}

    return options


ALWAYS = "the always-on set"
OURS: dict[str, Callable[[], Options]] = {
    "SpeedMonitor": _callbacks(SpeedMonitor),
    "Flops": _callbacks(lambda: Flops(schedule="every 50ba")),
    "Timings": _callbacks(Timings),
    ALWAYS: _callbacks(lambda: always_on(show_summary=False)),
}
ROWS: dict[str, Callable[[], Options]] = {
    NOTHING: dict,
    f"{NOTHING}, once more": dict,
    "an empty callback": _callbacks(L.Callback),
    REFERENCE: _callbacks(_throughput),
    "Lightning's DeviceStatsMonitor": _callbacks(lambda: DeviceStatsMonitor(cpu_stats=False)),
    "DeviceStatsMonitor(cpu_stats=True)": _callbacks(lambda: DeviceStatsMonitor(cpu_stats=True)),
    "Lightning's SimpleProfiler": lambda: {"profiler": SimpleProfiler()},
    "Lightning's PyTorchProfiler, waiting": _waiting,
    **OURS,
    "SystemMetrics": _callbacks(SystemMetrics),
    **{name + DECLARED: make for name, make in OURS.items()},
    REFERENCE + MLFLOW: _callbacks(_throughput),
    ALWAYS + MLFLOW: OURS[ALWAYS],
    'PyTorch("never")': _callbacks(lambda: PyTorch(schedule="never")),
    'PyTorch("1000000ba")': _callbacks(lambda: PyTorch(schedule="1000000ba")),
    'VizTracer("1000000ba")': _callbacks(lambda: VizTracer(schedule="1000000ba")),
    'Memray("1000000ba")': _callbacks(lambda: Memray(schedule="1000000ba")),
}
#: Each in a separate process. fkat's profilers record from construction on, with any schedule.
APART: dict[str, Callable[[], Options]] = {
    f"fkat's {name}": _peer("fkat.pytorch.callbacks.profiling", name)
    for name in ("Flops", "PyTorch", "VizTracer", "Memray")
} | {"TraceML's callback": _peer("traceml_ai.integrations.lightning", "TraceMLCallback")}


class Tiny(L.LightningModule):
    """Two small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A minimal step."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Training(threading.Thread):
    """A training that takes turns: its loader waits before each, and steps are timed."""

    def __init__(self, name: str, turns: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self.row, self.turns, self.folder = name, turns, folder
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        #: Microseconds of each step, by turn.
        self.times: list[np.ndarray] = []
        self.started: list[threading.Thread] = []

    def __len__(self) -> int:
        # Beyond the last turn, because Lightning fetches nothing after the last batch.
        return STEPS * self.turns + 1

    def __iter__(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        batches = [
            [torch.randn(8, 32, generator=generator), torch.arange(8) % (1 + number)]
            for number in range(8)
        ]
        for _ in range(self.turns):
            self.done.release()
            self.go.acquire()
            began = []
            for step in range(STEPS):
                began.append(time.perf_counter())
                yield batches[step % 8]
            self.times.append(1e6 * np.diff([*began, time.perf_counter()]))
        self.done.release()
        self.go.acquire()

    def turn(self) -> None:
        """Train for one turn."""
        self.go.release()
        self.done.acquire()

    def run(self) -> None:
        """Train; an error ends the benchmark, which would otherwise wait forever."""
        try:
            self.train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def train(self) -> None:
        """Train with the row's callbacks."""
        self.folder.mkdir()
        store = f"sqlite:///{self.folder}/mlflow.db"
        tracked = self.row.endswith(MLFLOW)
        model = Tiny()
        if self.row.endswith(DECLARED):
            model.flops_per_batch = 1_000_000
        logger = MLFlowLogger(tracking_uri=store) if tracked else CSVLogger(self.folder)
        L.Trainer(
            **QUIET, **(ROWS | APART)[self.row](), max_epochs=1, logger=logger,
            log_every_n_steps=STEPS, default_root_dir=self.folder,
        ).fit(model, self)  # fmt: skip

    def background(self, seconds: float) -> float:
        """CPU microseconds of its threads in the time of one step."""
        spent = {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
        cpu = sum(spent.get(thread.native_id or 0, 0.0) for thread in self.started)
        return float(cpu / seconds * np.median(np.concatenate(self.times)))


def _remember_threads() -> None:
    """Attribute each thread to the training whose thread started it."""
    start = threading.Thread.start

    def remembering(thread: threading.Thread) -> None:
        parent = threading.current_thread()
        owner = parent if isinstance(parent, Training) else getattr(parent, "owner", None)
        if isinstance(owner, Training):
            thread.owner = owner  # type: ignore[attr-defined]
            owner.started.append(thread)
        start(thread)

    threading.Thread.start = remembering  # type: ignore[method-assign]


def measured(names: list[str], turns: int) -> list[dict[str, Any]]:
    """What each row adds to the first one, in microseconds per step."""
    _remember_threads()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trainings = [
            Training(name, turns + WARM, Path(folder, str(number)))
            for number, name in enumerate(names)
        ]
        began = time.perf_counter()
        for each in trainings:
            each.start()
            each.done.acquire()
        for _ in range(turns + WARM):
            for each in random.sample(trainings, len(trainings)):
                each.turn()
        seconds = time.perf_counter() - began
        nothing = np.array(trainings[0].times[WARM:])
        found = []
        for each in trainings:
            steps = np.array(each.times[WARM:])
            found.append({
                "callback": each.row,
                "step": float(np.median(steps)),
                "median": _interval(np.median(steps, axis=1) - np.median(nothing, axis=1)),
                "mean": _interval(_tens(steps.mean(axis=1) - nothing.mean(axis=1))),
                "background": each.background(seconds),
            })  # fmt: skip
        return found


def _tens(differences: np.ndarray) -> np.ndarray:
    """The means of every ten turns, all of them if there are fewer."""
    size = min(10, len(differences))
    return differences[: len(differences) // size * size].reshape(-1, size).mean(axis=1)


def _interval(differences: np.ndarray) -> list[float]:
    """The median, and the 5 % and 95 % bounds."""
    chosen = np.random.default_rng(0).integers(len(differences), size=(400, len(differences)))
    medians = np.median(differences[chosen], axis=1)
    return [float(np.median(differences)), *map(float, np.percentile(medians, [5, 95]))]


def _apart(name: str, turns: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--turns", str(turns), "--child", name]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return list(json.loads(done.stdout.splitlines()[-1])[1:])
    except (IndexError, ValueError):
        print(f"{name}: {done.stderr[-400:]}", file=sys.stderr)
        return []


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rows", nargs="*", help="Only rows with one of these words.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet()
    if given.child:
        # fkat installs signal handlers, which only the main thread can; no signal is sent here.
        signal.signal = lambda *_: None  # type: ignore[assignment]
        print(json.dumps(measured([NOTHING, given.child], given.turns)), flush=True)
        os._exit(0)  # skips what some tools do at exit

    def wanted(name: str) -> bool:
        return not given.rows or any(word in name for word in given.rows)

    names = [name for name in ROWS if wanted(name) and name != NOTHING]
    rows = measured([NOTHING, *names], given.turns)
    for name in filter(wanted, APART):
        if find_spec("fkat" if name.startswith("fkat") else "traceml_ai") is not None:
            rows += _apart(name, given.turns)
    added = {row["callback"]: row["mean"][0] for row in rows}
    table = Table("callback", "us per step", "median added", "mean added", "background",
                  "mean / ThroughputMonitor's")  # fmt: skip
    for row in rows:
        cells = ("{:+.1f} ({:+.1f} to {:+.1f})".format(*row[key]) for key in ("median", "mean"))
        reference = added.get(REFERENCE + MLFLOW * row["callback"].endswith(MLFLOW))
        ratio = f"{row['mean'][0] / reference:.2f}" if reference else ""
        table.add_row(
            row["callback"], f"{row['step']:.0f}", *cells, f"{row['background']:.1f}", ratio
        )
    Console(width=130).print(table)
    save(dated("overhead"), turns=given.turns, rows=rows)
    sys.stdout.flush()
    os._exit(0)  # the trainings wait for a turn that never comes


if __name__ == "__main__":
    main()
