"""NVML as far as it is used, for machines without an NVIDIA GPU."""

# ruff: noqa: N802  (the names are NVML's)

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """The base of NVML's errors."""


class FakeGpu:
    """One GPU; an unsupported value raises the error that NVML would."""

    def __init__(self, uuid: str, **told: Any) -> None:
        self.uuid = uuid
        self.told: dict[str, Any] = {
            "memory": (3e10, 5e10),
            "util": 40,
            "power": 250_000,
            "temperature": 61,
            "clocks": (1980, 2619),
            "reasons": 0,
            **told,
        }
        #: How often it was read.
        self.readings = 0

    def tell(self, what: str) -> Any:
        self.readings += what == "util"
        value = self.told[what]
        if isinstance(value, Exception):
            raise value
        return value


class FakeNvml:
    """The module pynvml, over some GPUs."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVMLError = NVMLError
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})
    NVMLError_GpuIsLost = type("NVMLError_GpuIsLost", (NVMLError,), {})
    NVMLError_Unknown = type("NVMLError_Unknown", (NVMLError,), {})
    NVMLError_DriverNotLoaded = type("NVMLError_DriverNotLoaded", (NVMLError,), {})

    def __init__(self, *gpus: FakeGpu, fault: Exception | None = None) -> None:
        self.gpus, self.fault, self.open = gpus, fault, 0

    def nvmlInit(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        if "mig" not in gpu.told:
            raise self.NVMLError_NotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, number: int) -> FakeGpu:
        try:
            return gpu.told["mig"][number]
        except IndexError:
            raise NVMLError from None

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        free, used = gpu.tell("memory")
        return SimpleNamespace(free=free, used=used)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(gpu=gpu.tell("util"))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return gpu.tell("power")

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, kind: int) -> int:
        return gpu.tell("temperature")

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return gpu.tell("clocks")[kind - 1]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.tell("reasons")


def install(patch: pytest.MonkeyPatch, *gpus: FakeGpu, fault: Exception | None = None) -> FakeNvml:
    """Put it where pynvml would be."""
    nvml = FakeNvml(*gpus, fault=fault)
    patch.setitem(sys.modules, "pynvml", nvml)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml
