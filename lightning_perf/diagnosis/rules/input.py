"""Rules about batches: waiting for them, moving them, and beginning an epoch."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.diagnosis.rules.base import Impact, judge
from lightning_perf.diagnosis.signals import FETCH, Setup, Signals
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_perf.diagnosis.verdicts import Verdict

#: Percent of the CPUs in use above which loading is taken to be work, and not waiting for disks.
_BUSY = 60.0
#: Workers per CPU where loading does not need CPUs.
_WORKERS_PER_CPU = 4
#: What a worker costs per batch: passing it to the main process.
_HANDOVER = 0.5e-3
#: Advice is given if it shortens a step by this share.
_WORTHWHILE = 0.02


class InputBound:
    """Batches are not ready when training needs them."""

    code, threshold = "input-bound", 0.10

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Waits within epochs, without the stalls of single batches."""
        stalls, excess = signals.stalls
        waits = signals.waits
        if len(stalls.positions) and signals.phase_of(excess) == "dataloader_next":
            waits = np.maximum(waits - excess, 0.0)
        evidence: dict[str, float | str] = {
            "wait_seconds": signals.per_batch(waits),
            "step_seconds": signals.step_seconds,
        }
        for name, key in (("cpu_util_simple", "cpu_percent"), ("cpu_iowait", "iowait_percent")):
            value = signals.average(f"system/{name}")
            if value is not None:
                evidence[key] = value
        workers = 0
        if signals.setup.loader is not None:
            evidence["num_workers"] = workers = signals.setup.loader.num_workers
        evidence["usable_cpus"] = signals.setup.cpus
        advice, step = faster_loader(signals, evidence["wait_seconds"])
        if step is not None:
            evidence["advised_step_seconds"] = step
        impact = Impact(
            waits, culprit=FETCH, phase="dataloader_next", evidence=evidence, advice=advice,
            certain=signals.cpus_left if workers else 1.0,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)


def faster_loader(signals: Signals, wait: float | str) -> tuple[str, float | None]:
    """Settings of the DataLoader that hide the loading, and the step time that they give.

    Args:
        signals: The run's.
        wait: Seconds that a batch waits for data.
    """
    setup, loader, step = signals.setup, signals.setup.loader, signals.step_seconds
    wait = float(wait)
    busy = signals.average("system/cpu_util_simple")
    if loader is None:
        return (
            f"Each step waits {duration(wait)} for its batch. Load batches in the background: "
            "the training data does not come from a DataLoader."
        ), None
    rest = max(step - wait, 1e-6)
    fetch = wait if loader.num_workers == 0 else loader.num_workers * step
    workers, needs_cpu = workers_for(fetch, rest, setup, busy)
    batch = f"a batch of {loader.batch_size}" if loader.batch_size else "a batch"
    item = f", {duration(fetch / loader.batch_size)} per item" if loader.batch_size else ""
    measured = (
        f"Loading {batch} takes {duration(fetch)}{item}; without waiting, a step takes "
        f"{duration(rest)}"
    )
    if workers > loader.num_workers:
        faster = predicted_step(fetch, rest, workers, setup, needs_cpu=needs_cpu)
        if faster < (1 - _WORTHWHILE) * step:
            hides = "hides the loading" if faster <= 1.1 * rest + _HANDOVER else "loads faster"
            return (
                f"{measured}. num_workers={workers} {hides}: {duration(faster)} per step instead "
                f"of {duration(step)}. {setup.cpus} CPUs are usable."
            ), faster
    why = f"with num_workers={loader.num_workers} and {setup.cpus} usable CPUs"
    return (
        f"{measured} ({why}). More workers would not help: load less per batch, or prepare the "
        "data ahead of training (decoded, resized, cached)."
    ), None


def workers_for(fetch: float, rest: float, setup: Setup, busy: float | None) -> tuple[int, bool]:
    """How many workers hide the loading, and whether loading needs a CPU.

    Args:
        fetch: Seconds that one worker needs for a batch.
        rest: Seconds of a step without waiting.
        setup: The machine.
        busy: Percent of the CPUs in use; None if unknown.
    """
    needs_cpu = busy is not None and busy >= _BUSY
    most = max(setup.cpus if needs_cpu else _WORKERS_PER_CPU * setup.cpus, 1)
    # A tenth more than needed: workers do not finish in step.
    return min(max(ceil(1.1 * fetch / rest), 1), most), needs_cpu


def predicted_step(
    fetch: float, rest: float, workers: int, setup: Setup, *, needs_cpu: bool
) -> float:
    """Seconds of a step with a number of workers.

    Example:
        >>> predicted_step(0.2, 0.05, 2, Setup(cpus=8), needs_cpu=False)
        0.1
    """
    shared = (fetch + rest) / setup.cpus if needs_cpu else 0.0
    return max(rest + _HANDOVER, fetch / workers, shared)


class TransferBound:
    """Moving batches to the device takes long."""

    code, threshold = "transfer-bound", 0.10

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """Host time of the transfer, and on a GPU the device's time if it is longer."""
        seconds = signals.shared("to_device")
        device = signals.column("timings/device/to_device")
        if device is not None:
            seconds = np.maximum(seconds, device / signals.setup.world_size)
        loader, on_gpu = signals.setup.loader, signals.setup.device == "cuda"
        advice = "Transform batches in the dataset, on the workers, not while they are moved."
        if on_gpu and loader is not None and not loader.pin_memory:
            advice = "Set pin_memory=True in the DataLoader: copies then overlap with compute."
        elif on_gpu:
            advice = "Move less: smaller dtypes (uint8 images), and transforms on the device."
        hooks = [row for row in signals.rows("to_device") if signals.actions[row].seconds.sum() > 0]
        slowest = max(hooks, key=lambda row: signals.actions[row].seconds.sum(), default=None)
        evidence: dict[str, float | str] = {}
        if loader is not None:
            evidence["pin_memory"] = str(loader.pin_memory)
        culprit = slowest.name if slowest is not None else None
        impact = Impact(seconds, None, culprit, "to_device", evidence=evidence, advice=advice)
        yield from judge(self.code, self.threshold, signals, impact)


class EpochRestart:
    """Epochs begin slowly, as with workers that start anew in each."""

    code, threshold = "epoch-restart", 0.05

    def __call__(self, signals: Signals) -> Iterable[Verdict]:
        """``iter()`` and the first fetch of each epoch, beyond a usual fetch."""
        seconds, epochs = signals.restarts
        if epochs.sum() < 2:
            return
        loader = signals.setup.loader
        each = seconds.sum() / epochs.sum()
        advice = f"An epoch begins with {duration(each)} of waiting. Use longer epochs."
        if loader is not None and loader.num_workers and not loader.persistent_workers:
            advice = (
                f"An epoch begins with {duration(each)} of waiting for {loader.num_workers} new "
                "workers: set persistent_workers=True in the DataLoader."
            )
        evidence = {"epochs": float(epochs.sum()), "seconds_per_epoch": float(each)}
        impact = Impact(
            seconds, float(epochs.sum()), "iter", "dataloader_next", evidence=evidence,
            advice=advice, whole_run=True,
        )  # fmt: skip
        yield from judge(self.code, self.threshold, signals, impact)
