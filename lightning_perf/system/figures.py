"""The names of all figures, and the row of numbers that brings them from node to node."""

from __future__ import annotations

from math import isnan, nan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Of a node. docs/system_metrics.md says what each is, and in which unit.
HOST = (
    "net_throughput_sent", "net_throughput_recv",
    "disk_iops", "disk_throughput_read", "disk_throughput_write",
    "free_memory", "swap_used",
    "cpu_util_simple", "cpu_util_max", "cpu_iowait",
    "process_rss", "process_cpu",
)  # fmt: skip
#: Of one of its GPUs.
GPU = (
    "gpu_util", "gpu_free_memory", "gpu_used_memory", "gpu_power", "gpu_temperature",
    "gpu_sm_clock", "gpu_memory_clock",
    "gpu_throttled", "gpu_throttled_power", "gpu_throttled_thermal", "gpu_throttled_hardware",
)  # fmt: skip
#: GPUs, or MIG instances, of one node that are looked at.
MOST_GPUS = 16

_MIG = 100


def gpu_name(index: int, instance: int | None = None) -> str:
    """The key of a GPU, or of one MIG instance of it.

    Args:
        index: nvidia-smi's number of the GPU.
        instance: nvidia-smi's number of the instance within.

    Example:
        >>> gpu_name(3), gpu_name(3, 0)
        ('gpu_3', 'gpu_3_mig_0')
    """
    return f"gpu_{index}" if instance is None else f"gpu_{index}_mig_{instance}"


def pack(figures: Mapping[str, float]) -> list[float]:
    """Write a node's figures as a row of numbers; NaN for what is not there.

    Args:
        figures: Numbers by name, those of GPUs as ``gpu_0/gpu_util``.

    Returns:
        Nothing for no figures, else one number for each of ``HOST``, then for each GPU its number
        and one for each of ``GPU``.

    Example:
        >>> unpack(pack({"disk_iops": 3.0, "gpu_1/gpu_util": 50.0}))
        {'disk_iops': 3.0, 'gpu_1/gpu_util': 50.0}
    """
    if not figures:
        return []
    row = [figures.get(name, nan) for name in HOST]
    for gpu in sorted({_number(name) for name in figures if "/" in name})[:MOST_GPUS]:
        prefix = _name(gpu)
        row += [gpu, *(figures.get(f"{prefix}/{name}", nan) for name in GPU)]
    return row


def unpack(row: Sequence[float]) -> dict[str, float]:
    """Read what `pack` wrote, with or without NaN after its end."""
    found = dict(zip(HOST, row, strict=False))
    for start in range(len(HOST), len(row), 1 + len(GPU)):
        if isnan(row[start]):
            break
        prefix = _name(row[start])
        values = row[start + 1 : start + 1 + len(GPU)]
        found |= {f"{prefix}/{name}": value for name, value in zip(GPU, values, strict=True)}
    return {name: value for name, value in found.items() if not isnan(value)}


def _number(name: str) -> float:
    _, index, *instance = name.partition("/")[0].split("_")
    return _MIG * int(index) + (int(instance[1]) + 1 if instance else 0)


def _name(number: float) -> str:
    index, instance = divmod(int(number), _MIG)
    return gpu_name(index, instance - 1 if instance else None)
