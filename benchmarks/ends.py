"""Measures what each callback adds to the set-up and the end of a run, in a fresh process per run.

    python benchmarks/ends.py [--runs 10] [--steps 300]

Each run of a row is paired with a run of "nothing" beside it. Figures are the medians, and 10 % and
90 % quantiles, of the differences in milliseconds: set-up until the first batch, and the end from
``on_train_end`` until ``fit`` returns, as wall time and as CPU time of all threads. No server takes
part. Later ends of a process are cheaper than this first one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from shared import QUIET, dated, quiet, save, spread

import lightning_perf as lp

NOTHING = "nothing"
ROWS: dict[str, Callable[[], list[L.Callback]]] = {
    NOTHING: list,
    "SpeedMonitor": lambda: [lp.SpeedMonitor()],
    "Timings": lambda: [lp.Timings()],
    "SystemMetrics": lambda: [lp.SystemMetrics()],
    "Diagnosis": lambda: [lp.Diagnosis()],
    "always_on(show_summary=False)": lambda: [lp.always_on(show_summary=False)],
    "always_on()": lambda: [lp.always_on()],
}


def now() -> tuple[float, float]:
    """Wall time and CPU time of the process."""
    return time.perf_counter(), time.process_time()


class Tiny(L.LightningModule):
    """One layer, on one batch that is the same at each step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.layer = steps, torch.nn.Linear(32, 8)
        self.began = self.ended = (0.0, 0.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A minimal step."""
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def batches(self) -> Iterator[torch.Tensor]:
        """The batches; notes when the first one is fetched."""
        self.began = now()
        for _ in range(self.steps):
            yield torch.ones(8, 32)


class End(L.Callback):
    """Notes when training ends: before our callbacks, as it comes first."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Training has ended."""
        pl_module.ended = now()


def measured(row: str, steps: int) -> dict[str, float]:
    """Milliseconds of set-up and end in this process."""
    quiet()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        module = Tiny(steps)
        trainer = L.Trainer(
            **QUIET, callbacks=[End(), *ROWS[row]()], logger=CSVLogger(folder), max_epochs=1,
            default_root_dir=folder, limit_train_batches=steps,
        )  # fmt: skip
        start = now()
        trainer.fit(module, module.batches())
        spans = {"setup": (start, module.began), "end": (module.ended, now())}
    return {
        f"{name} {kind}": 1e3 * (last[at] - first[at])
        for name, (first, last) in spans.items()
        for at, kind in enumerate(("wall", "cpu"))
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured(given.child, given.steps)))
        return
    command = [sys.executable, __file__, "--steps", str(given.steps), "--child"]
    added: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS if row != NOTHING}
    for _ in range(given.runs):
        for row, found in added.items():
            texts = (subprocess.check_output([*command, each]) for each in (NOTHING, row))
            base, ours = map(json.loads, texts)
            found.append({key: ours[key] - base[key] for key in base})
    for row, found in added.items():
        figures = (f"{key} {spread([each[key] for each in found])}" for key in found[0])
        print(f"{row:30}", *figures, sep="  ")
    save(dated("ends"), runs=given.runs, steps=given.steps, rows=added)


if __name__ == "__main__":
    main()
