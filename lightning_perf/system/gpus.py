"""Sensors of NVIDIA GPUs. NVML needs no CUDA context and does not disturb the device."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: The metrics of a GPU. docs/keys.md has their meaning and units.
GPU = (
    "gpu_util", "gpu_free_memory", "gpu_used_memory", "gpu_power", "gpu_temperature",
    "gpu_sm_clock", "gpu_memory_clock",
    "gpu_throttled", "gpu_throttled_power", "gpu_throttled_thermal", "gpu_throttled_hardware",
    "sm_activity", "tensor_activity", "dram_activity", "ofu",
)  # fmt: skip
#: The maximum GPUs per node that are sampled.
_MOST_GPUS = 16

# NVML's bits for the reasons of reduced clocks. Idling and clocks set by the user are not
# throttling.
_REASONS = {
    "gpu_throttled": 0xFC,  # any of the following, or synchronized with a slower GPU
    "gpu_throttled_power": 0x04 | 0x80,  # power cap, power brake of the supply
    "gpu_throttled_thermal": 0x20 | 0x40,  # software, hardware
    "gpu_throttled_hardware": 0x08,  # clocks reduced by half or more
}


def _memory(nvml: Any, gpu: Any) -> dict[str, float]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # drivers before 510, and WSL: used includes what the driver reserves
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return {"gpu_free_memory": memory.free, "gpu_used_memory": memory.used}


def _throttled(nvml: Any, gpu: Any) -> dict[str, float]:
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except nvml.NVMLError_FunctionNotFound:  # its name in drivers before 535
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return {name: 100 * bool(reasons & bits) for name, bits in _REASONS.items()}


#: NVML's names of the shares of time in which units are busy, in percent (Hopper and newer).
_ACTIVITY = {
    "sm_activity": "NVML_GPM_METRIC_SM_UTIL",
    "tensor_activity": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_activity": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
#: Seconds between the first two samples of them; NVML needs 0.1 s.
_FIRST_INTERVAL = 0.1


class _Activity:
    """How busy the units of a GPU were since the last reading; nothing is counted in the program.

    OFU is the share of the tensor cores' peak that was used: their activity, times the present
    clock over the maximum one (arXiv 2605.20799).
    """

    def __init__(self) -> None:
        self._samples: list[Any] = []

    def __call__(self, nvml: Any, gpu: Any) -> Mapping[str, float]:
        if not self._samples:
            if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                raise nvml.NVMLError_NotSupported
            self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
            nvml.nvmlGpmSampleGet(gpu, self._samples[1])
            time.sleep(_FIRST_INTERVAL)
        self._samples.reverse()
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_ACTIVITY)
        for number, name in enumerate(_ACTIVITY.values()):
            request.metrics[number].metricId = getattr(nvml, name)
        nvml.nvmlGpmSampleGet(gpu, self._samples[1])
        request.sample1, request.sample2 = self._samples
        metrics = nvml.nvmlGpmMetricsGet(request).metrics
        found = {
            name: metrics[number].value
            for number, name in enumerate(_ACTIVITY)
            if not metrics[number].nvmlReturn
        }
        if "tensor_activity" in found:
            clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            most = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
            found["ofu"] = found["tensor_activity"] * clock / most
        return found

    def free(self, nvml: Any) -> None:
        """Free the samples."""
        for sample in self._samples:
            nvml.nvmlGpmSampleFree(sample)
        self._samples = []


#: How to read each group of figures; if one fails, the others continue.
_READINGS: dict[str, Callable[[Any, Any], Mapping[str, float]]] = {
    "memory": _memory,
    "use": lambda nvml, gpu: {"gpu_util": nvml.nvmlDeviceGetUtilizationRates(gpu).gpu},
    "power": lambda nvml, gpu: {"gpu_power": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3},
    "temperature": lambda nvml, gpu: {
        "gpu_temperature": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    },
    "clocks": lambda nvml, gpu: {
        "gpu_sm_clock": 1e6 * nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "gpu_memory_clock": 1e6 * nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    },
    "throttled": _throttled,
}


class Gpu:
    """The sensor of one GPU, by nvidia-smi's number."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._index = nvml, index
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._uuid: str = nvml.nvmlDeviceGetUUID(self._handle)
        self.name = f"gpu_{index}"
        self._activity = _Activity()
        self._readings: dict[str, Callable[[Any, Any], Mapping[str, float]]] = {
            **_READINGS,
            "activity": self._activity,
        }

    def matches(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES or a UUID from torch means this GPU."""
        if name.isdigit():
            return self._index == int(name)
        return self._uuid.startswith(name) or self._uuid.endswith(name)

    def close(self) -> None:
        """Free what the sensor holds."""
        with suppress(self._nvml.NVMLError):
            self._activity.free(self._nvml)

    def __call__(self, _now: float, /) -> dict[str, float]:
        """Return the current values. Readings that the GPU does not support are not tried again."""
        nvml = self._nvml
        found: dict[str, float] = {}
        for what, read in list(self._readings.items()):
            try:
                found |= read(nvml, self._handle)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError):
                del self._readings[what]
            except nvml.NVMLError_GpuIsLost:
                raise
            except nvml.NVMLError as error:
                del self._readings[what]
                warn(
                    f"{self.name}: reading {what} failed ({describe(error)}); it is no longer "
                    "sampled."
                )
        return {f"{self.name}/{name}": float(value) for name, value in found.items()}


@contextmanager
def open_gpus(visible: Sequence[str] | None = None, ranks: int = 0) -> Iterator[list[Gpu]]:
    """Open the sensors of the GPUs that this node's processes use; none without NVML.

    ``visible`` are the UUIDs of those that torch sees, or None to use CUDA_VISIBLE_DEVICES;
    ``ranks`` is the number of this node's ranks that train on a GPU.
    """
    with _nvml() as nvml:
        if nvml is None and ranks:
            warn("GPUs are not sampled: NVML is missing. Install the package nvidia-ml-py.")
        gpus = _chosen(nvml, visible, ranks)
        try:
            yield gpus
        finally:
            for gpu in gpus:
                gpu.close()


def count_gpus(visible: Sequence[str] | None = None, ranks: int = 0) -> int:
    """How many GPUs `open_gpus` opens for the same arguments."""
    with _nvml() as nvml:
        return len(_chosen(nvml, visible, ranks))


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver; None without NVML or the driver."""
    with _nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialized; None without the package or the driver."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _chosen(nvml: Any, visible: Sequence[str] | None, ranks: int) -> list[Gpu]:
    every = [] if nvml is None else list(_every(nvml))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    masked = None if mask is None else [name.strip() for name in mask.split(",")]
    # CUDA and NVML may number GPUs differently, so numbers in the mask are resolved by torch. UUIDs
    # are unambiguous.
    by_uuid = masked is not None and masked[0].startswith("GPU-")
    names = masked if by_uuid or visible is None else visible
    chosen = every if names is None else _named(names, every)
    # If each rank has its own mask, this rank's mask does not cover the node.
    return (every if len(chosen) < ranks else chosen)[:_MOST_GPUS]


def _named(names: Sequence[str], every: Sequence[Gpu]) -> list[Gpu]:
    chosen: dict[str, Gpu] = {}
    for name in names:
        found = next((gpu for gpu in every if name and gpu.matches(name)), None)
        if found is None:  # CUDA also ignores the rest
            break
        chosen[found.name] = found
    return list(chosen.values())


def _every(nvml: Any) -> Iterator[Gpu]:
    """Yield all GPUs in the order of nvidia-smi."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            yield Gpu(nvml, index)
        except nvml.NVMLError as error:
            warn(f"GPU {index} is not sampled ({describe(error)}).")
