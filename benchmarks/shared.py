"""Code for all benchmarks: quiet trainings, medians, and results with their date and machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
#: Options of a Trainer on one CPU that prints and keeps nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def quiet(threads: int | None = 1) -> None:
    """Hide warnings and logs, and set torch's number of threads unless it is None."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if threads is not None:
        torch.set_num_threads(threads)


def spread(values: Sequence[float]) -> str:
    """The median, and the 10 % and 90 % quantiles."""
    if len(values) < 2:
        return "failed"
    low, *_, high = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


def save(path: Path, **found: Any) -> None:
    """Write results with their date, machine and versions."""
    packages = ("torch", "lightning", "numpy")
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(),
                    "load": os.getloadavg()},
        "versions": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in packages},
        **found,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path)


def dated(name: str) -> Path:
    """``results/NAME-DATE.json``."""
    return RESULTS / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
