"""Measures the overhead of profilers that record, and of uploads while a tracking server hangs.

    python benchmarks/profilers.py [rounds]

Each row runs in its own process, because some tools never release theirs. There, trainings with and
without the profiler alternate. A figure is the median over the rounds of the ratio of steps, with
the 10 % and 90 % quantiles. Recording is measured by the 25th percentile of a training's steps,
because small machines slow down by half for seconds at a time. The figures are also written to
``results/profilers-DATE.json``. `overhead.py` has what profilers add while they wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import MLFlowLogger
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import QUIET, dated, quiet, save, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import Memray, PyTorch, SpeedMonitor, VizTracer

#: Steps of a recorded training, and steps left out.
RECORDED, WARM = 24, 4
#: Of each layer: recording an empty step says little.
WIDTH = 512

Options = dict[str, Any]


class Tiny(L.LightningModule):
    """Records when each step begins; a step takes some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A forward pass and a mean."""
        self.began.append(time.perf_counter())
        return self.layers(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def steps_of(steps: int, warm: int, options: Options) -> list[float]:
    """Microseconds of each step of a training, without the first ones."""
    model = Tiny()
    data = DataLoader(TensorDataset(torch.zeros(8 * steps, WIDTH)), batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        defaults: Options = {**QUIET, "logger": False, "default_root_dir": folder}
        L.Trainer(max_steps=steps, **defaults | options).fit(model, data)
    return [1e6 * (b - a) for a, b in pairwise(model.began[warm:])]


# -- recording -----------------------------------------------------------------------------------


class _Bare(L.Callback):
    """Records a whole training with the tool alone, without lightning_perf."""

    def __init__(
        self, start: Callable[[], tuple[Callable[[], object], Callable[[], object]]]
    ) -> None:
        self._start = start

    def on_train_start(self, *_: Any) -> None:
        """Start the tool."""
        self._tick, self._stop = self._start()

    def on_train_batch_end(self, *_: Any) -> None:
        """Notify the tool of the batch."""
        self._tick()

    def on_train_end(self, *_: Any) -> None:
        """Stop the tool."""
        self._stop()


def _bare_torch() -> Any:
    profiler = torch.profiler.profile(profile_memory=True, with_flops=True)
    profiler.start()
    return profiler.step, profiler.stop


def _bare_viztracer() -> Any:
    import viztracer

    tracer = viztracer.VizTracer(tracer_entries=500_000, verbose=0, register_global=False)
    tracer.start()
    return (lambda: None), tracer.stop


def _bare_memray() -> Any:
    import memray

    tracker = memray.Tracker(Path(tempfile.mkdtemp()) / "bare.bin")
    tracker.__enter__()
    return (lambda: None), lambda: tracker.__exit__(None, None, None)


OPEN: dict[str, tuple[Callable[..., L.Callback], Callable[[], Any]]] = {
    "PyTorch": (PyTorch, _bare_torch),
    "VizTracer": (VizTracer, _bare_viztracer),
    "Memray": (Memray, _bare_memray),
}


def recording(name: str, rounds: int) -> list[list[float]]:
    """The ratio to a plain step, for our profiler and for the bare tool."""
    ours, bare = OPEN[name]
    ratios: list[list[float]] = [[], []]
    for _ in range(rounds):
        alone = _recorded([])
        ratios[0].append(_recorded([ours(schedule="always", batches_per_trace=10**6)]) / alone)
        ratios[1].append(_recorded([_Bare(bare)]) / alone)
    return ratios


def _recorded(callbacks: list[L.Callback]) -> float:
    times = steps_of(RECORDED, WARM, {"callbacks": callbacks})
    return float(np.percentile(times, 25))


# -- a server that hangs -------------------------------------------------------------------------


@contextlib.contextmanager
def hanging_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def hanging(rounds: int) -> list[list[float]]:
    """The ratio of a step while uploads hang to a step without MLflow: median and mean."""
    ratios: list[list[float]] = [[], []]
    for _ in range(rounds):
        without = steps_of(150, 20, {"callbacks": _busy()})
        with hanging_server() as address:
            # The logger of an existing run: our uploads hang, not Lightning's constructor.
            logger = MLFlowLogger(run_id="0" * 32, tracking_uri=address)
            logger._initialized = True
            logger.finalize = lambda status: None  # type: ignore[method-assign]
            logger.log_metrics = logger.log_hyperparams = lambda *a, **k: None  # type: ignore[method-assign, assignment]
            hung = steps_of(150, 20, {"callbacks": _busy(), "logger": logger})
        ratios[0].append(statistics.median(hung) / statistics.median(without))
        ratios[1].append(statistics.fmean(hung) / statistics.fmean(without))
    return ratios


def _busy() -> list[L.Callback]:
    return [SpeedMonitor(window_size=10), PyTorch(schedule="every 25ba for 1ba")]


# -- the rows -------------------------------------------------------------------------------------


def main(rounds: int) -> None:
    """Measure, print and save."""
    table = Table("recording", "ratio to a plain step (10 % to 90 %)", "bare tool")
    found: dict[str, Any] = {}
    for name in track(OPEN, "recording", transient=True):
        ours, bare = found[name] = _child("recording", name, rounds) or ([], [])
        table.add_row(name, spread(ours), spread(bare))
    Console().print(table)
    table = Table("server hangs", "ratio to a step without MLflow (10 % to 90 %)")
    for name, ratios in zip(("typical", "mean"), _child("hanging", "", rounds), strict=False):
        found[f"server hangs, {name}"] = ratios
        table.add_row(name, spread(ratios))
    Console().print(table)
    save(dated("profilers"), rounds=rounds, ratios=found)


def _child(what: str, name: str, rounds: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, what, name, str(rounds), str(answer)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if not answer.exists():
            print(f"{name}: {done.stderr[-400:]}", file=sys.stderr)
            return []
        return json.loads(answer.read_text())


def _measure(what: str, name: str, rounds: int, answer: str) -> None:
    quiet()
    found = recording(name, rounds) if what == "recording" else hanging(rounds)
    Path(answer).write_text(json.dumps(found))
    os._exit(0)  # skips what some tools do at exit


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
