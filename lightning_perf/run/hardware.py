"""What torch knows of a run's hardware: which GPUs it sees, and what its allocator holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_perf.system import Sampler, node_sensors

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Ranks

#: Composer's names of what the allocator tells, by its own: a state, or a peak since the start.
_MEMORY = {
    f"{moment}_{name}_mem": (kind, moment)
    for moment in ("current", "peak")
    for name, kind in {
        "allocated": "allocated_bytes",
        "active": "active_bytes",
        "inactive": "inactive_split_bytes",
        "reserved": "reserved_bytes",
    }.items()
}
#: All names of what `cuda_memory` tells.
CUDA_MEMORY = (*_MEMORY, "alloc_retries")


def node_sampler(trainer: Trainer, ranks: Ranks) -> Sampler | None:
    """The sampler of this node, on the first of its ranks; None on the others."""
    if ranks.local_rank != 0:
        return None
    # torch calls AMD's devices "cuda", too: NVML does not know them.
    on_gpu = trainer.strategy.root_device.type == "cuda" and torch.version.hip is None
    return Sampler(
        partial(
            node_sensors,
            visible=_visible() if on_gpu else None,
            ranks=ranks.local_world_size if on_gpu else 0,
        )
    )


def _visible() -> list[str] | None:
    """The UUIDs of the GPUs that torch sees, whatever mask and order made it so."""
    try:
        return [
            str(torch.cuda.get_device_properties(number).uuid)
            for number in range(torch.cuda.device_count())
        ]
    except AttributeError:  # a torch that does not tell
        return None


def cuda_memory(device: torch.device) -> dict[str, float]:
    """What CUDA's caching allocator holds of one device; empty for devices of other kinds.

    Args:
        device: The rank's.

    Returns:
        Gigabytes to five digits, and the number of retries, by Composer's names.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    found = {
        name: gigabytes(stats[kind]["all"][moment])
        for name, (kind, moment) in _MEMORY.items()
        if kind in stats
    }
    return {**found, "alloc_retries": float(stats.get("num_alloc_retries", 0))}


def gigabytes(number: float) -> float:
    """Bytes in units of 1e9, to five significant digits.

    Example:
        >>> gigabytes(12345678901)
        12.346
    """
    return float(f"{number / 1e9:.5g}")
