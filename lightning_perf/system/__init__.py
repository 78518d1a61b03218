"""What the hardware of a node does, read beside the training: no torch, no Lightning."""

from lightning_perf.system.figures import GPU, HOST, MOST_GPUS, pack, unpack
from lightning_perf.system.sampler import Sampler
from lightning_perf.system.sensors import node_sensors

__all__ = ["GPU", "HOST", "MOST_GPUS", "Sampler", "node_sensors", "pack", "unpack"]
