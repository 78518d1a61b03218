"""Code for all parts: rows of the table, and trainings that are timed by their own clock."""

from __future__ import annotations

import gzip
import json
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from helpers.small import Records, ours, trainer

from lightning_perf import always_on


@dataclass
class Row:
    """One line of the table.

    Args:
        what: What is compared.
        ours: Our value.
        reference: The value to compare with; None if there is none.
        low: The least ratio of both that passes; None if the line only informs.
        high: The largest.
        note: A remark.
    """

    what: str
    ours: Any
    reference: Any = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Our value divided by the reference, if both are numbers."""
        numbers = (self.ours, self.reference)
        if all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            return self.ours / self.reference if self.reference else None
        return None

    @property
    def outcome(self) -> str:
        """``ok``, ``FAILED``, or ``-`` for a line that only informs."""
        if isinstance(self.ours, bool):
            return "ok" if self.ours else "FAILED"
        if self.low is None or self.high is None:
            return "-"
        ratio = self.ratio
        return "ok" if ratio is not None and self.low <= ratio <= self.high else "FAILED"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": self.what, "ours": self.ours, "reference": self.reference,
            "ratio": self.ratio, "outcome": self.outcome, "note": self.note,
        }  # fmt: skip


class Edges(L.Callback):
    """Times batches independently: by CUDA events at their starts; on a CPU, by the host's clock.

    Args:
        warm: Batches to leave out.
    """

    def __init__(self, warm: int = 5) -> None:
        self.warm, self._edges = warm, list[Any]()

    def _mark(self) -> None:
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._edges.append(event)
        else:
            self._edges.append(time.perf_counter())

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch starts."""
        self._mark()

    def on_train_end(self, *_: Any) -> None:
        """No batch starts any more; the last one is left out, because the run ends after it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def seconds(self) -> list[float]:
        """Of each batch after the warm-up."""
        edges = self._edges[self.warm :]
        pairs = pairwise(edges)
        if torch.cuda.is_available():
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in pairs]

    @property
    def mean(self) -> float:
        """Of the batches after the warm-up."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def median(self) -> float:
        """Of the batches after the warm-up."""
        return median(self.seconds)


class Bench:
    """The device, a folder, and how to train.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        folder: For the files of trainings.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.cuda = device == "cuda"
        self.runs = 0
        #: Warnings of lightning_perf.
        self.warnings: list[str] = []

    def fit(self, model: L.LightningModule, *callbacks: L.Callback, **options: Any) -> L.Trainer:
        """Train with a logger that keeps metrics in memory."""
        self.runs += 1
        settings: dict[str, Any] = {
            "accelerator": "gpu" if self.cuda else "cpu",
            "logger": Records(),
            "log_every_n_steps": 10,
            **options,
        }
        run = trainer(self.folder / f"run{self.runs}", *callbacks, **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run.fit(model)
            finally:
                self.warnings += ours(caught)
        return run

    def always_on(self) -> list[L.Callback]:
        """The set under test."""
        return [always_on(show_summary=False)]


def traced(folder: Path) -> list[dict[str, Any]]:
    """The events of the last trace below a folder."""
    path = max(folder.rglob("*.pt.trace.json.gz"), key=lambda each: each.stat().st_mtime)
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def spins(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a `Spinner`, in order."""
    kinds = {"kernel", "user_annotation"}
    found = [e for e in events if e.get("cat") in kinds and "spin_kernel" in e.get("name", "")]
    return sorted(found, key=lambda event: float(event["ts"]))
