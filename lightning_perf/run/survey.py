"""What a diagnosis reads of a Trainer and its process."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from lightning_perf.diagnosis.signals import COMPILE, Loader, Setup
from lightning_perf.flops import is_compiled
from lightning_perf.run import compat
from lightning_perf.system.cgroup import Cgroup
from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import Trainer

    from lightning_perf.run.context import RunContext

#: How torch names the time of one compilation.
_COMPILED = "_compile.compile_inner"


def survey(context: RunContext) -> Setup:
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
        first_batch_in_epoch=context.timestamp.batch_in_epoch,
        loader=_loader(trainer),
        ours=frozenset(
            type(each).__name__ for member in context.members for each in member.with_parts
        ),
    )


def usable_cpus() -> int:
    """CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = Cgroup().quota()
    return count if quota is None else max(min(count, round(quota[0])), 1)


def compilations() -> Mapping[Action, Cost]:
    """Seconds and number of torch.compile's compilations in this process so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    times = getattr(utils, "compilation_time_metrics", {}).get(_COMPILED)
    if not times:
        return {}
    return {Action(COMPILE, "forward", "torch.compile"): Cost(sum(times), len(times))}


def _loader(trainer: Trainer) -> Loader | None:
    """The training's DataLoader, the first one of several."""
    loaders: Any = getattr(getattr(trainer, "fit_loop", None), "_combined_loader", None)
    loader: Any = next(iter(getattr(loaders, "flattened", None) or ()), None)
    if not hasattr(loader, "num_workers"):
        return None
    owners = loader, getattr(loader, "batch_sampler", None)
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return Loader(
        num_workers=int(loader.num_workers),
        batch_size=next((size for size in sizes if isinstance(size, int)), None),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
    )
