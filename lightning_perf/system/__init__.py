"""Samples the hardware of a node during training. Uses neither torch nor Lightning."""

from lightning_perf.system.figures import GPU, HOST, MOST_GPUS, pack, unpack
from lightning_perf.system.sampler import Sampler
from lightning_perf.system.sensors import node_sensors

__all__ = ["GPU", "HOST", "MOST_GPUS", "Sampler", "node_sensors", "pack", "unpack"]
