"""Signals as if of a training, without running one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.windows import ranks_window, window_of
from lightning_perf.core.progress import Timestamp
from lightning_perf.diagnosis.signals import Signals
from lightning_perf.timing.totals import CATEGORIES, Action, Cost, Totals

#: Batches per window, and number of windows.
BATCHES, WINDOWS = 10, 12
#: Seconds per batch without a problem: 50 ms.
FINE = {"forward": 0.02, "backward": 0.025, "optimizer_step": 0.004, "other": 0.001}


def every(seconds: float, calls: int = BATCHES) -> list[tuple[float, int]]:
    """An action that takes the same time in each window."""
    return [(seconds, calls)] * WINDOWS


def sampled(windows: int = WINDOWS, **sensors: float) -> dict[str, list[float]]:
    """Columns of a GPU sampled for 1 s in each window.

    Args:
        windows: How many.
        **sensors: The mean of each sensor.
    """
    slot = "system/gpu_slot_0"
    columns = {f"{slot}/{name}": [value] * windows for name, value in sensors.items()}
    return {slot: [0.0] * windows, f"{slot}/seconds": [1.0] * windows, **columns}


def signals_of(
    per_batch: Mapping[str, float | Sequence[float]],
    windows: int = WINDOWS,
    named: Mapping[Action, Sequence[tuple[float, int]]] | None = None,
    columns: Mapping[str, Sequence[float]] | None = None,
    ended: Mapping[str, float] | None = None,
    **options: Any,
) -> Signals:
    """Windows of ten batches.

    Args:
        per_batch: Seconds per batch by category: one number, or one per window.
        windows: How many.
        named: Seconds and calls of named actions in each window.
        columns: Further columns, one number per window.
        ended: Training has ended, and took these seconds after the last batch, by category.
        **options: Of `Signals`.
    """
    seconds = {name: np.broadcast_to(per_batch.get(name, 0.0), windows) for name in CATEGORIES}
    found, before = [], Totals({})
    for number in range(windows):
        values = {
            f"timings/{name}": [float(seconds[name][number]) * BATCHES] for name in CATEGORIES
        }
        values |= {name: [each[number]] for name, each in (columns or {}).items()}
        at_end = ended is not None and number == windows - 1
        for name, took in (ended or {}).items() if at_end else ():
            values[f"timings/{name}"][0] += took
        first, last = Timestamp(batch=number * BATCHES), Timestamp(batch=(number + 1) * BATCHES)
        done = {action: each[: number + 1] for action, each in (named or {}).items()}
        after = Totals({a: Cost(*map(sum, zip(*each, strict=True))) for a, each in done.items()})
        place = {"first": first, "last": last, "step": last.batch, "at_end": at_end}
        found.append(window_of(values, spent=(before, after), **place))
        before = after
    batch = sum(each for name, each in seconds.items() if name != "validation")
    step = np.repeat(batch, BATCHES)
    given: dict[str, Any] = {"steps": step, "first_step": float(step[0])}
    given |= options
    if (steps := np.array(given["steps"], dtype=float)).size and not given.get("dropped"):
        steps[0] = np.nan  # the first batch of a run
    if len(steps) == windows * BATCHES:
        given.setdefault("phases", _phases(np.stack([*seconds.values()]), steps))
    return Signals(windows=found, **given | {"steps": steps})


def fine_batches(number: int) -> NDArray[np.float64]:
    """Seconds by category of batches without a cause of lost time, one row per batch."""
    return np.tile([FINE.get(name, 0.0) for name in CATEGORIES], (number, 1))


def signals_of_batches(phases: NDArray[np.float64], **options: Any) -> Signals:
    """Windows of ten batches, given the seconds of each batch by category; options as above."""
    given = {"steps": phases.sum(axis=1), "phases": phases, **options}
    return signals_of(per_batch_of(phases), len(phases) // BATCHES, **given)


def per_batch_of(phases: NDArray[np.float64]) -> dict[str, list[float]]:
    """Mean seconds per batch in each window by category, given those of each batch."""
    windows = phases.reshape(-1, BATCHES, len(CATEGORIES)).mean(axis=1)
    return {name: windows[:, at].tolist() for at, name in enumerate(CATEGORIES)}


def _phases(seconds: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of batches by category, from those per batch of each category in each window.

    Those beyond the least window's are in the longer batches of a window.
    """
    usual = seconds.min(axis=1, keepdims=True)
    least = np.nanmin(steps) if np.isfinite(steps).any() else 0.0
    each = np.nan_to_num(steps, nan=least).reshape(-1, BATCHES)
    longer = each - each.min(axis=1, keepdims=True) + 1e-12
    part = longer / longer.mean(axis=1, keepdims=True)
    rows = usual[:, :, None] + (seconds - usual)[:, :, None] * part
    return rows.reshape(len(seconds), -1).T


def signals_of_ranks(
    own: Mapping[str, Mapping[int, float]],
    gradients: Mapping[int, float],
    ranks: int = 4,
    exchange: Mapping[int, float] | None = None,
    **sensors: float,
) -> Signals:
    """Six windows of ten batches, in which each rank spends 1 s in each of eleven categories.

    Args:
        own: By category and rank, more seconds.
        gradients: By rank, seconds of waiting for gradients, which are part of backward.
        ranks: How many.
        exchange: The part of this that is in each batch; by default all of it.
        **sensors: The mean of each sensor of the node.
    """
    waited = exchange or gradients
    columns = {"waits/exchange": [waited.get(rank, 0.0) for rank in range(ranks)]}
    for name, value in sensors.items():
        rest = [0.0] * (ranks - 1)
        columns |= {f"system/{name}": [value, *rest], f"system/{name}/seconds": [1.0, *rest]}
    window = ranks_window(ranks, own, {"waits/backward": gradients}, **columns)
    return Signals(windows=[window] * 6)


def with_costs(signals: Signals, costs: Sequence[Mapping[Action, Cost]]) -> Signals:
    """The same signals with other named costs, those in each window."""
    windows = [
        replace(window, spent=(Totals({}), Totals(each)))
        for window, each in zip(signals.windows, costs, strict=True)
    ]
    return replace(signals, windows=windows)
