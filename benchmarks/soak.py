"""A long training with everything on: memory, handles, threads and step cost must stay flat.

    python benchmarks/soak.py [--steps 1000000] [--every 500] [--seconds 3600] [--only KIND]

The model is tiny. Windows of each profiler open every ``--every`` steps, in turn. Every ten of them
the process's memory, handles and threads and the median step are sampled. The curves are written to
``results/soak.json`` and, with matplotlib, ``results/soak.png``; the slopes of the second half are
printed with their 95 % intervals.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
from scipy import stats
from shared import RESULTS, quiet, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.small import Small, trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_perf import (
    Every,
    MemorySnapshot,
    Memray,
    PyTorch,
    VizTracer,
    always_on,
)
from lightning_perf.profilers.base import Profiler

KEYS = {"rss": "MB", "handles": "", "threads": "", "step": "us"}


class Endless(Small):
    """Repeats one small batch."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def train_dataloader(self) -> Any:
        """All steps."""
        batch = next(iter(super().train_dataloader()))
        steps = self.steps

        class Repeated:
            def __len__(self) -> int:
                return steps

            def __iter__(self) -> Any:
                return (batch for _ in range(steps))

        return Repeated()


class Samples(L.Callback):
    """Samples the process at an interval of steps, and ends the training after some seconds."""

    def __init__(self, every: int, seconds: float) -> None:
        self.every, self.process = every, psutil.Process()
        self.until = time.monotonic() + seconds
        self.rows: list[dict[str, float]] = []
        self._began, self._durations = 0.0, list[float]()

    def on_train_batch_start(self, *_: Any) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, at: int) -> None:
        """A step ends."""
        self._durations.append(time.perf_counter() - self._began)
        if (at + 1) % self.every:
            return
        trainer.should_stop = time.monotonic() > self.until
        gc.collect()
        found = {
            "at": at + 1,
            "rss": self.process.memory_info().rss / 1e6,
            "handles": self.process.num_fds(),
            "threads": threading.active_count(),
            "step": 1e6 * float(np.median(self._durations)),
        }
        self._durations.clear()
        self.rows.append(found)
        print(json.dumps(found), flush=True)


class Bounded(CSVLogger):
    """Lightning's CSVLogger keeps all metrics in memory until they are saved; this keeps none."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Drop them."""


def slopes(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The slope of each curve's second half per million steps, with its interval."""
    half = rows[len(rows) // 2 :]
    at = [row["at"] / 1e6 for row in half]
    found = {}
    for key in KEYS:
        fit = stats.theilslopes([row[key] for row in half], at)
        found[key] = {"slope": float(fit[0]), "low": float(fit[2]), "high": float(fit[3])}
    return found


def counted(kind: type[Profiler], windows: Counter[str]) -> Any:
    """A profiler's ``record`` that counts its windows, some of which are skipped."""
    record = kind.record

    def counting(self: Profiler, *args: Any) -> Any:
        windows[kind.__name__] += 1
        return record(self, *args)

    return counting


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """The curves."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(KEYS), 1, sharex=True, figsize=(9, 8), layout="constrained")
    for axis, (key, unit) in zip(axes, KEYS.items(), strict=True):
        axis.plot([row["at"] for row in rows], [row[key] for row in rows])
        axis.set_ylabel(f"{key} {unit}")
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("steps")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop after these.")
    parser.add_argument("--only", nargs="*", help="Only these profilers, such as VizTracer.")
    parser.add_argument("--without", action="store_true", help="Without our callbacks.")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak")
    given = parser.parse_args()
    quiet(threads=None)
    every, part = given.every, given.every // 4
    kinds = [kind for kind in (PyTorch, VizTracer, Memray, MemorySnapshot)
             if given.only is None or kind.__name__ in given.only]  # fmt: skip
    # Memray's summary takes a separate process, which would take most of the time.
    options = {Memray: {"summary": False}}
    profilers = [
        kind(
            schedule=Every(f"{every}ba", lasting="1ba", start=f"{number * part}ba"),
            num_traces_to_keep=2,
            **options.get(kind, {}),
        )
        for number, kind in enumerate(kinds)
    ]
    windows: Counter[str] = Counter()
    for kind in kinds:
        kind.record = counted(kind, windows)  # type: ignore[method-assign]
    samples = Samples(10 * every, given.seconds)
    ours = [] if given.without else [always_on(show_summary=False), *profilers]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = trainer(
            Path(folder), samples, *ours, logger=Bounded(folder), log_every_n_steps=50,
            max_epochs=1, limit_val_batches=0,
        )  # fmt: skip
        try:
            run.fit(Endless(given.steps))
        except SIGTERMException:
            print("ended early")
        files = sum(path.is_file() for path in Path(folder).rglob("*"))
    steps = int(samples.rows[-1]["at"])
    found = slopes(samples.rows)
    save(
        given.out.with_suffix(".json"), steps=steps, windows=windows, files=files,
        slopes_per_million_steps=found, rows=samples.rows,
    )  # fmt: skip
    draw(samples.rows, given.out.with_suffix(".png"))
    print(f"{steps} steps; windows: {windows}; files left: {files}")
    for key, unit in KEYS.items():
        each = found[key]
        print(f"{key}: {each['slope']:+.3g} {unit} per million steps "
              f"(95 %: {each['low']:+.3g} to {each['high']:+.3g})")  # fmt: skip


if __name__ == "__main__":
    main()
