"""The part of NVML that is used, for machines without an NVIDIA GPU."""

# ruff: noqa: N802, N815  (the names are NVML's)

from __future__ import annotations

import sys
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """The base of NVML's errors."""


class FakeGpu:
    """One GPU; an unsupported value raises the error that NVML would."""

    def __init__(self, uuid: str, **values: Any) -> None:
        self.uuid = uuid
        self.values: dict[str, Any] = {
            "memory": (3e10, 5e10),
            "util": 40,
            "power": 250_000,
            "temperature": 61,
            "clocks": (1980, 2619),
            "reasons": 0,
            # Percent of the time that SMs, tensor cores and memory are busy; not before Hopper.
            "activity": None,
            **values,
        }
        #: Number of reads.
        self.readings = 0

    def read(self, what: str) -> Any:
        self.readings += what == "util"
        value = self.values[what]
        if isinstance(value, Exception):
            raise value
        return value


class FakeNvml:
    """The module pynvml, over some GPUs."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    nvmlMemory_v2 = 0x02000028
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

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        free, used = gpu.read("memory")
        if version is None:  # the driver's own part is used, too
            used += 6e8
        elif "old" in gpu.values:
            raise self.NVMLError_FunctionNotFound
        return SimpleNamespace(free=free, used=used)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(gpu=gpu.read("util"))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return gpu.read("power")

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, kind: int) -> int:
        return gpu.read("temperature")

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return gpu.read("clocks")[kind - 1]

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return (1980, 2619)[kind - 1]

    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 2, 5
    NVML_GPM_METRIC_DRAM_BW_UTIL, NVML_GPM_METRICS_GET_VERSION = 10, 1
    #: Samples that were allocated and not freed.
    samples = 0

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(isSupportedDevice=int(gpu.values["activity"] is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> None:
        sample.time, sample.activity = monotonic(), gpu.read("activity")

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(16)])

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        """The activity between two samples, of which the second is later."""
        assert request.sample1.time < request.sample2.time
        places = (
            self.NVML_GPM_METRIC_SM_UTIL,
            self.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            self.NVML_GPM_METRIC_DRAM_BW_UTIL,
        )
        for metric in request.metrics[: request.numMetrics]:
            metric.value = request.sample2.activity[places.index(metric.metricId)]
            metric.nvmlReturn = 0
        return request

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.read("reasons")


def install(patch: pytest.MonkeyPatch, *gpus: FakeGpu, fault: Exception | None = None) -> FakeNvml:
    """Install it as pynvml."""
    nvml = FakeNvml(*gpus, fault=fault)
    patch.setitem(sys.modules, "pynvml", nvml)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml
