"""What the hardware of a node does, sampled by a thread. No torch, no Lightning."""

from lightning_perf.system.gpus import GPU, MOST_GPUS, gpu_key, gpu_number, has_gpus
from lightning_perf.system.sampler import HOST, Sampler, node_sensors

__all__ = [
    "GPU",
    "HOST",
    "MOST_GPUS",
    "Sampler",
    "gpu_key",
    "gpu_number",
    "has_gpus",
    "node_sensors",
]
