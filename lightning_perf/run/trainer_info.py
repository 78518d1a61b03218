"""What a Trainer says of its run: ranks, limits, devices and precision."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_perf.core.progress import Limits, Ranks
from lightning_perf.flops import device_name
from lightning_perf.run import compat
from lightning_perf.tracking.summary import installed_version

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


def limits_of(trainer: Trainer, owners: Iterable[object] = (), sharing: int = 1) -> Limits:
    """The limits of the training.

    Args:
        trainer: The run's.
        sharing: How many ranks train on each batch.
        owners: Objects that may define ``num_samples``, the samples of an epoch on all ranks.
    """
    given = (getattr(owner, "num_samples", None) for owner in owners)
    samples = next((value for value in given if isinstance(value, int) and value > 0), None)
    return Limits(
        _positive(trainer.max_steps),
        _positive(trainer.max_epochs),
        compat.max_seconds(trainer),
        _positive(trainer.num_training_batches),
        samples * sharing // trainer.world_size if samples else None,
        trainer.accumulate_grad_batches,
    )


#: Restart counters of SLURM and torchrun.
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def resumes(trainer: Trainer) -> bool:
    """Whether the run continues an earlier one, which may have written later files.

    A job that was preempted before its first checkpoint starts over, and is still the same run.
    """
    counts = (os.environ.get(name, "") for name in _RESTARTS)
    return trainer.ckpt_path is not None or any(count not in ("", "0") for count in counts)


def owners_of(trainer: Trainer, module: LightningModule, members: Iterable[object]) -> list[object]:
    """Objects that may count samples and tokens, by precedence: module, datamodule, callbacks."""
    return [module, getattr(trainer, "datamodule", None), *members]


def setup_of(trainer: Trainer) -> dict[str, object]:
    """Device, precision and strategy, for the run's params."""
    return {
        "version": installed_version("lightning_perf"),
        "device": device_name(trainer.strategy.root_device),
        "world_size": trainer.world_size,
        "precision": compat.precision(trainer),
        "strategy": type(trainer.strategy).__name__,
    }


def _positive(value: float | None) -> int | None:
    return int(value) if value is not None and 0 < value < float("inf") else None
