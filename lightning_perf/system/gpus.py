"""Sensors of NVIDIA GPUs. NVML needs no CUDA context and does not disturb the device."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: What is measured of a GPU. docs/system_metrics.md says what each is, and in which unit.
GPU = (
    "gpu_util", "gpu_free_memory", "gpu_used_memory", "gpu_power", "gpu_temperature",
    "gpu_sm_clock", "gpu_memory_clock",
    "gpu_throttled", "gpu_throttled_power", "gpu_throttled_thermal", "gpu_throttled_hardware",
)  # fmt: skip
#: GPUs, or MIG instances, of one node that are looked at.
MOST_GPUS = 16

#: A GPU's number is nvidia-smi's times this, and one more than the instance's if it is one.
PER_GPU = 100

# NVML's bits for the reasons of reduced clocks. Idling and clocks set by the user are not
# throttling.
_REASONS = {
    "gpu_throttled": 0xFC,  # any of the following, or synchronized with a slower GPU
    "gpu_throttled_power": 0x04 | 0x80,  # power cap, power brake of the supply
    "gpu_throttled_thermal": 0x20 | 0x40,  # software, hardware
    "gpu_throttled_hardware": 0x08,  # clocks reduced by half or more
}


def gpu_name(index: int, instance: int | None = None) -> str:
    """The key of a GPU, or of one MIG instance of it, by nvidia-smi's numbers.

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
    return PER_GPU * int(index) + (int(instance[1]) + 1 if instance else 0)


def gpu_key(number: float) -> str:
    """The key of a GPU by the number that `gpu_number` returned."""
    index, instance = divmod(int(number), PER_GPU)
    return gpu_name(index, instance - 1 if instance else None)


@dataclass(frozen=True)
class _Device:
    """A GPU or a MIG instance."""

    handle: Any
    key: str
    index: int
    #: Its UUID; for an instance also that of its GPU.
    uuids: tuple[str, ...]

    def matches(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES or a UUID from torch means this device."""
        if name.isdigit():
            return self.index == int(name)
        return any(uuid.startswith(name) or uuid.endswith(name) for uuid in self.uuids)


class Gpu:
    """The sensor of one GPU or MIG instance."""

    def __init__(self, nvml: Any, device: _Device) -> None:
        self._nvml, self._device = nvml, device
        self.name = device.key
        self._readings: list[Callable[[Any], dict[str, float]]] = [
            self._memory, self._use, self._power, self._temperature, self._clocks, self._throttled,
        ]  # fmt: skip

    def __call__(self, _now: float, /) -> dict[str, float]:
        """Return the current values. Readings that the GPU does not support are not tried again."""
        nvml = self._nvml
        found: dict[str, float] = {}
        for reading in list(self._readings):
            try:
                found |= reading(self._device.handle)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError):
                self._readings.remove(reading)
            except nvml.NVMLError_GpuIsLost:
                raise
            except nvml.NVMLError as error:
                self._readings.remove(reading)
                what = reading.__name__.strip("_")
                warn(
                    f"{self.name}: reading {what} failed ({describe(error)}); it is no longer "
                    "sampled."
                )
        return {f"{self._device.key}/{name}": float(value) for name, value in found.items()}

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"gpu_free_memory": memory.free, "gpu_used_memory": memory.used}

    def _use(self, handle: Any) -> dict[str, float]:
        return {"gpu_util": self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu}

    def _power(self, handle: Any) -> dict[str, float]:
        return {"gpu_power": self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}

    def _temperature(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        return {"gpu_temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}

    def _clocks(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        return {
            "gpu_sm_clock": 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu_memory_clock": 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }

    def _throttled(self, handle: Any) -> dict[str, float]:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return {name: 100 * bool(reasons & bits) for name, bits in _REASONS.items()}


@contextmanager
def gpus(visible: Sequence[str] | None = None, ranks: int = 0) -> Iterator[list[Gpu]]:
    """Open the sensors of the GPUs that this node's processes use; none without NVML.

    Args:
        visible: UUIDs of the GPUs that torch sees; None to use CUDA_VISIBLE_DEVICES.
        ranks: Number of this node's ranks that train on a GPU.
    """
    with _nvml() as nvml:
        if nvml is None and ranks:
            warn("GPUs are not sampled: NVML is missing. Install the package nvidia-ml-py.")
        yield [Gpu(nvml, device) for device in _chosen(nvml, visible, ranks)]


def count_gpus(visible: Sequence[str] | None = None, ranks: int = 0) -> int:
    """How many GPUs `gpus` opens for the same arguments."""
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
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _chosen(nvml: Any, visible: Sequence[str] | None, ranks: int) -> list[_Device]:
    devices = [] if nvml is None else list(_devices(nvml))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    masked = None if mask is None else [name.strip() for name in mask.split(",")]
    # CUDA and NVML may number GPUs differently, so numbers in the mask are resolved by torch. UUIDs
    # are unambiguous, also those of instances.
    by_uuid = masked is not None and masked[0].startswith(("GPU-", "MIG-"))
    names = masked if by_uuid or visible is None else visible
    chosen = devices if names is None else _named(names, devices)
    # If each rank has its own mask, this rank's mask does not cover the node.
    return (devices if len(chosen) < ranks else chosen)[:MOST_GPUS]


def _named(names: Sequence[str], devices: Sequence[_Device]) -> list[_Device]:
    chosen: list[_Device] = []
    for name in names:
        found = next((device for device in devices if name and device.matches(name)), None)
        if found is None:  # CUDA ignores the rest too
            break
        if found not in chosen:
            chosen.append(found)
    return chosen


def _devices(nvml: Any) -> Iterator[_Device]:
    """Yield all GPUs in the order of nvidia-smi; MIG instances replace their GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            warn(f"GPU {index} is not sampled ({describe(error)}).")
            continue
        if not _has_mig(nvml, handle):
            yield _Device(handle, gpu_name(index), index, (uuid,))
            continue
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(nvml.NVMLError):  # no instance with this index
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                uuids = (nvml.nvmlDeviceGetUUID(instance), uuid)
                yield _Device(instance, gpu_name(index, number), index, uuids)


def _has_mig(nvml: Any, handle: Any) -> bool:
    try:
        present, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # not supported
        return False
    return bool(present)
