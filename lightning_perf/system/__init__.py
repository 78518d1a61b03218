"""What the hardware of a node does, sampled by a thread. No torch, no Lightning."""

from lightning_perf.system.gpus import GPU, PER_GPU, count_gpus, gpu_key, gpu_number, nvidia_driver
from lightning_perf.system.sampler import HOST, Sampler, node_sensors

__all__ = [
    "GPU",
    "HOST",
    "PER_GPU",
    "Sampler",
    "count_gpus",
    "gpu_key",
    "gpu_number",
    "node_sensors",
    "nvidia_driver",
]
