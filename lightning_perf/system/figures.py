"""The names of what is measured of a node and its GPUs."""

from __future__ import annotations

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


def gpu_number(name: str) -> float:
    """A GPU's key as one number.

    Example:
        >>> gpu_key(gpu_number("gpu_3_mig_0"))
        'gpu_3_mig_0'
    """
    _, index, *instance = name.partition("/")[0].split("_")
    return _MIG * int(index) + (int(instance[1]) + 1 if instance else 0)


def gpu_key(number: float) -> str:
    """The key of a GPU by the number that `gpu_number` returned."""
    index, instance = divmod(int(number), _MIG)
    return gpu_name(index, instance - 1 if instance else None)
