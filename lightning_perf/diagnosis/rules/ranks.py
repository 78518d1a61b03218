"""Rules about several ranks: one that the others wait for, and communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis.rules.base import CRITICAL, LEAST, Impact
from lightning_perf.diagnosis.signals import Unknown
from lightning_perf.diagnosis.stragglers import find_straggler
from lightning_perf.diagnosis.verdicts import Verdict
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_perf.core.window import Window
    from lightning_perf.diagnosis.signals import Signals

#: Share of the time that the others wait for a straggler, for a warning.
_STRAGGLER = 0.10
#: Seconds that a thread waits for a CPU that another program holds, at most: a time slice of Linux.
_TIME_SLICE = 4e-3


def _windows(signals: Signals) -> Sequence[Window]:
    """Windows of several ranks, with their waits; none of a single rank."""
    if not signals.windows or signals.windows[0].world_size == 1:
        return ()
    if "waits/exchange" not in signals.windows[0].columns:
        raise Unknown("how long ranks wait for each other is not measured")
    return signals.windows


def _taken(signals: Signals) -> float:
    """The part of the CPUs that other programs take from ranks that compute on them."""
    return 1 - signals.cpus_left if signals.setup.device == "cpu" else 0.0


def straggler(signals: Signals) -> Iterable[Verdict]:
    """One rank, or one node, makes the others wait."""
    found = find_straggler(_windows(signals)[signals.start :])
    if found is None or found.seconds < LEAST or found.share < _STRAGGLER / 2:
        return
    who = f"node {found.node}" if found.rank is None else f"rank {found.rank}"
    evidence: dict[str, float | str] = {
        "waited_seconds": found.seconds,
        "node": float(found.node),
        "in_most_windows": str(found.chronic),
    }
    advice = (
        f"The other ranks wait {duration(found.seconds)} per batch for {who}, which is slow in "
        f"{found.phase}{' on its GPU' if found.on_gpu else ''}. Compare its machine, its share "
        "of the data and its callbacks with those of the others."
    )
    # Other programs that use the CPUs make any rank late now and then.
    certain = found.share * (1 if found.chronic else 1 - _taken(signals))
    severity = "info"
    if certain >= _STRAGGLER:
        severity = "critical" if certain >= CRITICAL else "warning"
    yield Verdict(
        "straggler", severity, found.share, culprit=who, rank=found.rank, phase=found.phase,
        evidence=evidence, advice=advice,
    )  # fmt: skip


def communication_bound(signals: Signals) -> Iterable[Impact]:
    """All ranks wait for gradients in each batch: the least wait, for which nobody is late."""
    windows = _windows(signals)
    if not windows:
        return
    seconds = np.array([window.least("waits/exchange") for window in windows])
    advice = (
        "Gradients are exchanged more slowly than computed: accumulate_grad_batches, larger "
        "batches, bf16 gradients (a DDP communication hook) or a faster network."
    )
    scheduling = _taken(signals) * _TIME_SLICE / max(signals.per_batch(seconds), 1e-12)
    yield Impact(
        seconds, phase="backward", advice=advice, on_host=False, certain=max(1 - scheduling, 0.0)
    )
