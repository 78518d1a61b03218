"""What torch knows of a run's hardware: which GPUs it sees, and what its allocator holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_perf.system import Sampler, node_sensors

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_perf.core.progress import Ranks

#: Keys of torch.cuda.memory_stats_as_nested_dict by Composer's names.
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
    """Return the sampler of this node on its first rank, None on the others."""
    if ranks.local_rank != 0:
        return None
    # torch calls AMD devices "cuda" too, but NVML does not support them.
    on_gpu = trainer.strategy.root_device.type == "cuda" and torch.version.hip is None
    return Sampler(
        partial(
            node_sensors,
            visible=_visible() if on_gpu else None,
            ranks=ranks.local_world_size if on_gpu else 0,
        )
    )


def _visible() -> list[str] | None:
    """Return the UUIDs of the GPUs that torch sees, after CUDA_VISIBLE_DEVICES."""
    try:
        return [
            str(torch.cuda.get_device_properties(number).uuid)
            for number in range(torch.cuda.device_count())
        ]
    except AttributeError:  # an older torch
        return None


def cuda_memory(device: torch.device) -> dict[str, float]:
    """Return the state of CUDA's caching allocator; empty for other devices.

    Args:
        device: The device of this rank.

    Returns:
        Gigabytes to five significant digits, and the number of retries, by Composer's names.
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
    """Convert bytes to gigabytes (1e9), to five significant digits.

    Example:
        >>> gigabytes(12345678901)
        12.346
    """
    return float(f"{number / 1e9:.5g}")
