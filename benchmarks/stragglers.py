"""Plants a delay on one of several ranks, and measures how often `Timings` names it.

    python benchmarks/stragglers.py [SEEDS] [--ranks 2 3 4] [--strategy ddp_fork] [--pairs 20]
                                    [--peer VENV/bin/traceml]

Each row trains with real processes on gloo: a delay on one rank in one phase, none, or the same on
all ranks. A straggler is found if rank and phase are right and the verdict is chronic. Then two
ranks train with and without the always-on callbacks, in pairs whose order alternates.

``--peer`` runs the same trainings under TraceML (``pip install traceml-ai lightning``, in an
environment of its own), which prints its verdict on the ranks at the end of a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import quiet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.late import PHASES, Late, Sleeps, find, fit, options
from helpers.servers import free_port
from helpers.small import Small, trainer

from lightning_perf import always_on

ROOT = Path(__file__).parents[1]
WORLDS, DELAYS = (2, 3, 4), (0.005, 0.02, 0.05)
#: TraceML's name for a straggler of a phase; it has no name for the other phases.
PEER_PHASES = {"INPUT_STRAGGLER": "input", "H2D_STRAGGLER": "input", "COMPUTE_STRAGGLER": "forward"}


def planted(world: int, phase: str, delay: float, seed: int) -> Late:
    """The model of a training: which ranks are late, and where."""
    late = {seed % world} if phase in PHASES else set(range(world)) if phase == "all" else set()
    return Late(late, phase if phase in PHASES else "forward", delay, seed)


def ours(strategy: str, folder: Path, world: int, model: Late) -> tuple[int | None, str] | None:
    """The rank and the phase named by `Timings`."""
    if strategy == "ddp":  # Lightning starts the script again for each further rank
        arguments = [*_arguments(model), str(folder), world]
        subprocess.run(
            [sys.executable, __file__, "--train", json.dumps(arguments)],
            cwd=folder, capture_output=True, check=True, timeout=300,
        )  # fmt: skip
        found = json.loads((folder / "found.json").read_text())["straggler"]
    else:
        found = find(folder, world, model, strategy=strategy)["straggler"]
    return None if found is None or not found["chronic"] else (found["rank"], found["phase"])


def peers(command: str, folder: Path, world: int, model: Late) -> tuple[int | None, str] | None:
    """The same for TraceML; the phase is empty if it names none."""
    done = subprocess.run(
        [command, "run", __file__, "--nproc-per-node", str(world), "--run-name", "run",
         "--logs-dir", str(folder), "--master-port", str(free_port()),
         "--aggregator-port", str(free_port()), "--args", "--train", json.dumps(_arguments(model))],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    summaries = [*folder.rglob("final_summary.json")]
    if not summaries:
        raise RuntimeError(f"TraceML left no summary: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    diagnosis = json.loads(summaries[0].read_text())["step_time"]["diagnosis"]
    kind = str(diagnosis["kind"])
    if "STRAGGLER" not in kind:
        return None
    rank, *_ = diagnosis.get("ranks") or [None]
    return rank, PEER_PHASES.get(kind, "")


def _arguments(model: Late) -> list[Any]:
    return [sorted(model.ranks), model.phase, model.seconds, model.seed]


def train(arguments: str) -> None:
    """One training, on the rank of this process."""
    late, phase, seconds, seed, *ours = json.loads(arguments)
    model = Late(set(late), phase, seconds, seed)
    if ours:
        folder, world = ours
        fit(Path(folder), world, model, strategy="ddp")
        return
    torch.set_num_threads(1)
    given = options(int(os.environ["WORLD_SIZE"]), strategy="ddp")
    with tempfile.TemporaryDirectory() as scratch:
        trainer(Path(scratch), Sleeps(), **given).fit(model)


class Steps(L.Callback):
    """Writes the median step of rank 0, in seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        """A step has ended."""
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the file."""
        if trainer.global_rank == 0:
            self.path.write_text(str(np.median(np.diff(self.ends[10:]))))


def step(folder: Path, callbacks: Iterable[L.Callback], model: L.LightningModule) -> float:
    """Seconds per step of two ranks."""
    given = options(2, batches=400 if isinstance(model, Tiny) else 100, every=50)
    path = folder / "step"
    trainer(folder, Sleeps(), *callbacks, Steps(path), **given).fit(model)
    return float(path.read_text())


def ratios(pairs: int, usual: bool) -> list[tuple[float, float]]:
    """Seconds per step without us, and the ratio of steps with and without us, for each pair."""
    found = []
    for number in track(range(pairs), "pairs", transient=True):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            model = Late(set(), "forward", 0.0, number) if usual else Tiny()
            with tempfile.TemporaryDirectory() as folder:
                seconds[which] = step(
                    Path(folder), [always_on(show_summary=False)] if which else [], model
                )
        found.append((seconds[0], seconds[1] / seconds[0]))
    return found


class Tiny(Small):
    """Does not sleep."""

    def wait(self, phase: str) -> None:
        """Called by `Sleeps`."""


def recall(tools: dict[str, Any], worlds: Iterable[int], seeds: int, console: Console) -> None:
    """Train, and print the verdicts of each tool."""
    cases = [*itertools.product(worlds, PHASES, DELAYS), *((w, "none", 0.0) for w in worlds)]
    cases += [(world, "all", 0.02) for world in worlds]
    heads = [f"{tool} {what}" for tool in tools for what in ("right", "rank only", "wrong", "none")]
    table = Table("ranks", "phase", "delay", *heads)
    counts = dict.fromkeys(tools, np.zeros(4, dtype=int))
    planted_runs = 0
    for world, phase, delay in track(cases, "training", transient=True):
        row = dict.fromkeys(tools, np.zeros(4, dtype=int))
        for seed in range(seeds):
            for tool, name in tools.items():
                with tempfile.TemporaryDirectory() as folder:
                    found = name(Path(folder), world, planted(world, phase, delay, seed))
                row[tool] = row[tool] + outcome(found, seed % world, phase)
        planted_runs += seeds if phase in PHASES else 0
        counts = {tool: counts[tool] + row[tool] for tool in tools}
        cells = [str(number) for each in row.values() for number in each]
        table.add_row(str(world), phase, f"{1e3 * delay:.0f} ms", *cells)
    console.print(table)
    for tool, (right, rank_only, wrong, _) in counts.items():
        precision = right / max(right + rank_only + wrong, 1)
        ranks = (right + rank_only) / max(right + rank_only + wrong, 1)
        console.print(
            f"{tool}: recall {right / planted_runs:.1%}, precision {precision:.1%}; of the rank "
            f"alone {(right + rank_only) / planted_runs:.1%} and {ranks:.1%}; {seeds} seeds"
        )


def outcome(found: tuple[int | None, str] | None, rank: int, phase: str) -> Any:
    """The column in which a verdict counts."""
    if found is None:
        return np.array([0, 0, 0, 1])
    if phase not in PHASES or found[0] != rank:
        return np.array([0, 0, 1, 0])
    return np.array([1, 0, 0, 0] if found[1] == phase else [0, 1, 0, 0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--strategy", default="ddp_fork", choices=["ddp_fork", "ddp_spawn", "ddp"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--peer", help="TraceML's command")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet(threads=None)
    if given.train:
        train(given.train)
        return
    console, began = Console(width=140), time.perf_counter()
    if given.seeds:
        tools: dict[str, Any] = {"ours": partial(ours, given.strategy)}
        if given.peer:
            tools["TraceML"] = lambda *what: peers(given.peer, *what)
        recall(tools, given.ranks, given.seeds, console)
    for usual in (True, False) if given.pairs else ():
        steps, more = zip(*ratios(given.pairs, usual), strict=True)
        low, median, high = np.quantile(more, (0.1, 0.5, 0.9))
        console.print(
            f"two ranks, a step of {1e3 * np.median(steps):.2f} ms: with always_on() "
            f"x {median:.3f} ({low:.3f} to {high:.3f}; {given.pairs} pairs)"
        )
    console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
