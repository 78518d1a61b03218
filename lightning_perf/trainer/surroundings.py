"""What a Trainer says of the run before it starts: ranks, limits, devices, and who counts what."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lightning_perf.flops import device_name
from lightning_perf.moment import Limits, Ranks
from lightning_perf.trainer import compat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning.pytorch import LightningModule, Trainer


def ranks_of(trainer: Trainer) -> Ranks:
    """Where this process stands among the processes of the run."""
    return Ranks(
        trainer.global_rank,
        trainer.local_rank,
        trainer.node_rank,
        trainer.world_size,
        trainer.world_size // max(trainer.num_nodes, 1),
    )


def limits_of(trainer: Trainer, owners: Iterable[object] = ()) -> Limits:
    """What ends the training.

    Args:
        trainer: The run's.
        owners: Where ``num_samples``, the samples of an epoch on all ranks, is looked for.
    """
    given = (getattr(owner, "num_samples", None) for owner in owners)
    samples = next((value for value in given if isinstance(value, int) and value > 0), None)
    return Limits(
        _positive(trainer.max_steps),
        _positive(trainer.max_epochs),
        compat.max_seconds(trainer),
        _positive(trainer.num_training_batches),
        samples // trainer.world_size if samples else None,
        trainer.accumulate_grad_batches,
    )


#: How often a cluster has started this job again, as SLURM and torchrun say.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def resumes(trainer: Trainer) -> bool:
    """Whether the run continues an earlier one, of which files may lie ahead.

    A job that was preempted before its first checkpoint starts anew, and is the same run still.
    """
    counts = (os.environ.get(name, "") for name in _RESTARTS)
    return trainer.ckpt_path is not None or any(count not in ("", "0") for count in counts)


def owners_of(trainer: Trainer, module: LightningModule, members: Iterable[object]) -> list[object]:
    """Whose counters count, the first that has one: module, datamodule, our callbacks."""
    return [module, getattr(trainer, "datamodule", None), *members]


def setup_of(trainer: Trainer) -> dict[str, object]:
    """What was trained on, for the run's params."""
    return {
        "version": _version(),
        "device": device_name(trainer.strategy.root_device),
        "world_size": trainer.world_size,
        "precision": compat.precision(trainer),
        "strategy": type(trainer.strategy).__name__,
    }


def _version() -> str:
    try:
        return version("lightning_perf")
    except PackageNotFoundError:  # run from its sources, which nobody installed
        return "unknown"


def _positive(value: float | None) -> int | None:
    return int(value) if value is not None and 0 < value < float("inf") else None
