"""Measurements of the training on rank 0 that only a diagnosis needs: steps, costs, settings."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_perf.cgroup import usable_cpus
from lightning_perf.diagnosis.signals import COMPILE, RECORDING, Loader, Setup, Signals, Step
from lightning_perf.flops import is_compiled
from lightning_perf.run import compat
from lightning_perf.timing.clock import GcTimer, run_queue
from lightning_perf.timing.totals import Action, Cost, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_perf.run.batches import BatchRecord
    from lightning_perf.run.run import Run
    from lightning_perf.run.window_log import WindowLog

#: Maximum steps whose times are kept.
_MOST_STEPS = 20_000
#: torch's name for the time of one compilation.
_COMPILED = "_compile.compile_inner"


class Collector:
    """Collects the steps and further costs of a training, in bounded memory.

    Args:
        context: The run.
        recordings: The number of recordings of this process so far, and whether one is open.
    """

    def __init__(self, context: Run, recordings: Callable[[], tuple[int, bool]]) -> None:
        self._context, self._recordings_now = context, recordings
        self._setup = Setup()
        self._log: WindowLog
        self._steps: deque[Step] = deque(maxlen=_MOST_STEPS)
        self._count = 0
        self._first: float | None = None
        # torch's list of compilations, how many of them are counted, and their cost so far by
        # category of training.
        self._compiled: Sequence[float] = ()
        self._counted, self._compilations = 0, dict[str, Cost]()
        # Windows in which a profiler recorded, and recordings of this process.
        self._recordings = self._opened = 0
        # Costs before the training.
        self._origin, self._closed = Totals({}), False
        self.gc = GcTimer(context.require_times().clock)
        self.gc.open()
        context.listen(self._add_steps)

    def begin(self, log: WindowLog) -> None:
        """Training begins, whose windows are in a log."""
        self._log = log
        self._opened, _ = self._recordings_now()
        self._origin = Totals(self._costs())
        self._setup = _setup(self._context)

    def costs(self) -> Mapping[Action, Cost]:
        """The costs of compilations, waits for a CPU, recordings and collections so far."""
        context = self._context
        self.add_compilations("validation" if context.nested else "forward")
        if context.stage == "train" and context.ranks.global_rank == 0:
            before = self._opened
            self._opened, recording = self._recordings_now()
            self._recordings += before != self._opened or recording
        return (Totals(self._costs()) - self._origin).costs

    def _costs(self) -> Mapping[Action, Cost]:
        compilations = {
            Action(COMPILE, category, "torch.compile"): cost
            for category, cost in self._compilations.items()
            if cost.calls
        }
        recordings = {RECORDING: Cost(0.0, self._recordings)}
        return {**compilations, **run_queue(), **recordings, **self.gc.costs}

    def add_compilations(self, category: str) -> None:
        """Add the compilations since the last call."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        compiled = getattr(utils, "compilation_time_metrics", {}).get(_COMPILED, ())
        # torch.compiler.reset() begins another list.
        new = compiled[self._counted if compiled is self._compiled else 0 :]
        self._compiled, self._counted = compiled, len(compiled)
        seconds, calls = self._compilations.get(category, (0.0, 0))
        self._compilations[category] = Cost(seconds + sum(new), calls + len(new))

    def _add_steps(self, stage: str, records: Sequence[BatchRecord]) -> None:
        if stage != "train" or self._closed:
            return
        if not self._steps:
            self._first = next((record.seconds for record in records if record.first), None)
        self._steps.extend(
            Step(
                nan if record.slowed else record.seconds,
                nan if record.cost is None else record.cost.total,
                record.begins_epoch,
            )
            for record in records
        )
        self._count += len(records)

    def signals(self) -> Signals:
        """The signals collected so far; safe to use on another thread."""
        context = self._context
        # Lightning creates this loader with the first validation.
        loader = _loader(compat.validation_loader(context.trainer))
        steps = np.array(self._steps, dtype=float).reshape(-1, len(Step._fields))
        times, flops, firsts = steps.T
        return Signals(
            self._log.windows(), times, flops, firsts > 0, self._count - len(steps), self._first,
            context.training_mfu(), replace(self._setup, validation_loader=loader),
        )  # fmt: skip

    def close(self) -> None:
        """Stop collecting; may be called more than once."""
        self.gc.close()
        self._closed = True


def _setup(context: Run) -> Setup:
    """The settings of a training that begins."""
    trainer, limits = context.trainer, context.limits
    return Setup(
        device=trainer.strategy.root_device.type,
        world_size=context.ranks.world_size,
        cpus=usable_cpus(),
        threads=torch.get_num_threads(),
        precision=str(trainer.precision),
        compiled=is_compiled(context.module),
        log_every_n_steps=compat.log_every_n_steps(trainer),
        batches_per_epoch=limits.batches_per_epoch,
        automatic_optimization=context.module.automatic_optimization,
        reloads=getattr(trainer, "reload_dataloaders_every_n_epochs", 0) == 1,
        loader=_loader(compat.training_loader(trainer)),
        ours=frozenset({"lightning_perf", *(type(each).__name__ for each in context.members)}),
    )


def _loader(loader: Any) -> Loader | None:
    pipeline = getattr(loader, "pipeline", None)
    if isinstance(pipeline, list) and pipeline:  # webdataset's WebLoader begins with a DataLoader
        loader = pipeline[0]
    if not hasattr(loader, "num_workers"):
        return None
    owners = loader, getattr(loader, "batch_sampler", None)
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return Loader(
        num_workers=int(loader.num_workers),
        batch_size=next((size for size in sizes if isinstance(size, int)), None),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        iterable=isinstance(getattr(loader, "dataset", None), IterableDataset),
    )
