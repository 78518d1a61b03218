"""Measures the overhead of profilers: waiting, recording, and while a tracking server hangs.

    python benchmarks/profilers.py [rounds]

Each row runs in its own process, because some tools never release theirs. There, trainings with and
without the profiler alternate. A figure is the median over the rounds of the difference or ratio of
steps, with the 10 % and 90 % quantiles. Waiting and recording are measured by fast steps (the 3rd
and the 25th percentile of a training), because small machines slow down by half for seconds at a
time. fkat's profilers are included if fkat can be imported. They record from construction on, also
with the schedule Never.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import Memray, PyTorch, SpeedMonitor, VizTracer

STEPS, WARM = 300, 60
#: Steps of a recorded training. Its model is larger, since recording an empty step says little.
RECORDED, RECORDED_WARM = 24, 4

Options = dict[str, Any]


class Tiny(L.LightningModule):
    """Records when each step begins; a step takes almost no time, or some milliseconds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width) for _ in range(2 if width < 99 else 8))
        )
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A forward pass and a mean."""
        self.began.append(time.perf_counter())
        return self.layers(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def steps_of(width: int, steps: int, warm: int, options: Options) -> list[float]:
    """Microseconds of each step of a training, without the first ones."""
    model = Tiny(width)
    data = DataLoader(TensorDataset(torch.zeros(8 * steps, width)), batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        defaults: Options = {"logger": False, "callbacks": [], "default_root_dir": folder}
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **defaults | options,
        )
        # Lightning's PyTorchProfiler raises at teardown if it has recorded nothing.
        with contextlib.suppress(AssertionError):
            trainer.fit(model, data)
    return [1e6 * (b - a) for a, b in pairwise(model.began[warm:])]


# -- waiting -------------------------------------------------------------------------------------


def _lightning_profiler() -> Options:
    from lightning.pytorch.profilers import PyTorchProfiler

    quiet = torch.profiler.schedule(wait=10**6, warmup=1, active=1)
    return {"profiler": PyTorchProfiler(schedule=quiet, filename="idle")}


def _fkat(name: str) -> Callable[[], Options]:
    def options() -> Options:
        kind = getattr(import_module("fkat.pytorch.callbacks.profiling"), name)
        return {"callbacks": [kind(output_path_prefix=tempfile.mkdtemp())]}

    return options


def _ours(kind: Callable[..., L.Callback], schedule: str) -> Callable[[], Options]:
    return lambda: {"callbacks": [kind(schedule=schedule)]}


IDLE: dict[str, Callable[[], Options]] = {
    "an empty callback": lambda: {"callbacks": [L.Callback()]},
    'PyTorch("never")': _ours(PyTorch, "never"),
    'PyTorch("100000ba")': _ours(PyTorch, "100000ba"),
    'VizTracer("100000ba")': _ours(VizTracer, "100000ba"),
    'Memray("100000ba")': _ours(Memray, "100000ba"),
    "Lightning's PyTorchProfiler, waiting": _lightning_profiler,
    "fkat's PyTorch(Never())": _fkat("PyTorch"),
    "fkat's VizTracer(Never())": _fkat("VizTracer"),
    "fkat's Memray(Never())": _fkat("Memray"),
}


def idle(name: str, rounds: int) -> list[float]:
    """Microseconds that a profiler adds to a step while it waits for a window."""
    added = []
    for _ in range(rounds):
        bare = float(np.percentile(steps_of(16, STEPS, WARM, {}), 3))
        with_it = steps_of(16, STEPS, WARM, IDLE[name]())
        added.append(float(np.percentile(with_it, 3)) - bare)
    return added


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
    times = steps_of(512, RECORDED, RECORDED_WARM, {"callbacks": callbacks})
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
        without = steps_of(512, 150, 20, {"callbacks": _busy()})
        with hanging_server() as address:
            # The logger of an existing run: our uploads hang, not Lightning's constructor.
            logger = MLFlowLogger(run_id="0" * 32, tracking_uri=address)
            logger._initialized = True
            logger.finalize = lambda status: None  # type: ignore[method-assign]
            logger.log_metrics = logger.log_hyperparams = lambda *a, **k: None  # type: ignore[method-assign, assignment]
            hung = steps_of(512, 150, 20, {"callbacks": _busy(), "logger": logger})
        ratios[0].append(statistics.median(hung) / statistics.median(without))
        ratios[1].append(statistics.fmean(hung) / statistics.fmean(without))
    return ratios


def _busy() -> list[L.Callback]:
    return [SpeedMonitor(window_size=10), PyTorch(schedule="every 25ba for 1ba")]


# -- the rows -------------------------------------------------------------------------------------


def main(rounds: int) -> None:
    """Measure and print."""
    console = Console()
    peers = find_spec("fkat") is not None
    names = [name for name in IDLE if peers or not name.startswith("fkat")]
    table = Table("waiting", "added us per step", "10 % to 90 %")
    for name in track(names, "waiting", transient=True):
        table.add_row(name, *_formatted(_child("idle", name, rounds), "{:+.1f}"))
    console.print(table)
    table = Table("recording", "ratio to a plain step", "10 % to 90 %", "bare tool", "10 % to 90 %")
    for name in track(OPEN, "recording", transient=True):
        ours, bare = _child("recording", name, rounds) or ([], [])
        table.add_row(name, *_formatted(ours, "{:.2f}"), *_formatted(bare, "{:.2f}"))
    console.print(table)
    table = Table("server hangs", "ratio to a step without MLflow", "10 % to 90 %")
    for name, ratios in zip(("typical", "mean"), _child("hanging", "", rounds), strict=False):
        table.add_row(name, *_formatted(ratios, "{:.2f}"))
    console.print(table)


def _formatted(figures: list[float], form: str) -> tuple[str, str]:
    if len(figures) < 2:
        return "failed", ""
    low, *_, high = statistics.quantiles(figures, n=10)
    return form.format(statistics.median(figures)), f"{form.format(low)} to {form.format(high)}"


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
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    measures = {"idle": idle, "recording": recording, "hanging": lambda _, rounds: hanging(rounds)}
    Path(answer).write_text(json.dumps(measures[what](name, rounds)))
    os._exit(0)  # skips what some tools do at exit


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
