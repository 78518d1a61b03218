"""GPU sensors: selection of devices, readings and failures."""

from __future__ import annotations

import sys
import warnings

import pytest
from helpers.fake_nvml import FakeGpu, FakeNvml, install
from helpers.small import ours

from lightning_perf import PerfWarning
from lightning_perf.system.gpus import open_gpus

Patch = pytest.MonkeyPatch
UUIDS = ["GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222", "GPU-cccccccc-3333"]


def keys(visible: list[str] | None = None, ranks: int = 0) -> list[str]:
    with open_gpus(visible, ranks) as found:
        return [gpu.name for gpu in found]


def test_readings_are_in_si_units(monkeypatch: Patch) -> None:
    """NVML's milliwatts and megahertz become watts and hertz, and throttle reasons percent."""
    nvml = install(monkeypatch, FakeGpu(UUIDS[0], reasons=0x20 | 0x08))
    with open_gpus() as (gpu,):
        found = gpu(0.0)
    assert found == {
        "gpu_0/gpu_free_memory": 3e10,
        "gpu_0/gpu_used_memory": 5e10,
        "gpu_0/gpu_util": 40.0,
        "gpu_0/gpu_power": 250.0,
        "gpu_0/gpu_temperature": 61.0,
        "gpu_0/gpu_sm_clock": 1.98e9,
        "gpu_0/gpu_memory_clock": 2.619e9,
        "gpu_0/gpu_throttled": 100.0,
        "gpu_0/gpu_throttled_power": 0.0,
        "gpu_0/gpu_throttled_thermal": 100.0,
        "gpu_0/gpu_throttled_hardware": 100.0,
    }
    assert nvml.open == 0


@pytest.mark.parametrize("reasons", [0, 0x1, 0x2, 0x100])
def test_idling_or_a_fixed_clock_is_not_throttling(monkeypatch: Patch, reasons: int) -> None:
    """Only reasons that slow down a busy GPU count."""
    install(monkeypatch, FakeGpu(UUIDS[0], reasons=reasons))
    with open_gpus() as (gpu,):
        assert gpu(0.0)["gpu_0/gpu_throttled"] == 0


def test_an_older_driver_has_another_name_for_throttling(monkeypatch: Patch) -> None:
    """Drivers before 535 know the reasons for reduced clocks by their earlier name only."""
    nvml = install(monkeypatch, FakeGpu(UUIDS[0], reasons=FakeNvml.NVMLError_FunctionNotFound()))
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: 0x40, raising=False
    )
    with open_gpus() as (gpu,):
        assert gpu(0.0)["gpu_0/gpu_throttled_thermal"] == 100


def test_used_memory_is_that_of_nvidia_smi(monkeypatch: Patch) -> None:
    """What the driver reserves is not in use; drivers before 510 cannot tell it apart."""
    install(monkeypatch, FakeGpu(UUIDS[0]), FakeGpu(UUIDS[1], old=True))
    with open_gpus() as (new, old):
        assert new(0.0)["gpu_0/gpu_used_memory"] == 5e10
        found = old(0.0)
    assert found["gpu_1/gpu_used_memory"] == 5.06e10
    assert found["gpu_1/gpu_free_memory"] == 3e10


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, ["gpu_0", "gpu_1", "gpu_2"]),
        ("2,0", ["gpu_2", "gpu_0"]),
        ("1, 1", ["gpu_1"]),
        ("GPU-bbbb", ["gpu_1"]),
        (f"{UUIDS[2]},{UUIDS[0]}", ["gpu_2", "gpu_0"]),
        ("1,-1,2", ["gpu_1"]),
        ("7", []),
        ("", []),
    ],
)
def test_masks_select_devices_like_cuda(
    monkeypatch: Patch, mask: str | None, expected: list[str]
) -> None:
    """Numbers, UUIDs and prefixes of UUIDs; the first unknown entry ends the list."""
    install(monkeypatch, *map(FakeGpu, UUIDS))
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert keys() == expected


def test_cuda_and_nvml_may_order_devices_differently(monkeypatch: Patch) -> None:
    """Numbers in the mask follow CUDA's order, so torch's UUIDs select the devices."""
    install(monkeypatch, *map(FakeGpu, UUIDS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert keys(visible=["cccccccc-3333"]) == ["gpu_2"]


def test_with_one_mask_per_rank_the_whole_node_is_sampled(monkeypatch: Patch) -> None:
    """If a launcher binds each rank to one GPU, the first rank's mask is ignored."""
    install(monkeypatch, *map(FakeGpu, UUIDS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert keys(visible=["aaaaaaaa-1111"], ranks=3) == ["gpu_0", "gpu_1", "gpu_2"]
    assert keys(visible=["aaaaaaaa-1111"], ranks=1) == ["gpu_0"]


@pytest.mark.parametrize("mask", ["MIG-eeee", None])
def test_readings_that_a_gpu_does_not_support_are_left_out(
    monkeypatch: Patch, mask: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    """A GPU in MIG mode is one GPU that reports little; the mask names one of its instances."""
    silent = dict.fromkeys(("util", "power", "reasons"), FakeNvml.NVMLError_NotSupported())
    install(monkeypatch, FakeGpu(UUIDS[0]), FakeGpu(UUIDS[1], **silent))
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with open_gpus(visible=["bbbbbbbb-2222"]) as (gpu,):
        names = ("free_memory", "used_memory", "temperature", "sm_clock", "memory_clock")
        assert gpu(0.0).keys() == {f"gpu_1/gpu_{name}" for name in names}
    assert not ours(recwarn)


def test_the_number_of_gpus_is_limited(monkeypatch: Patch) -> None:
    """GPUs beyond the sixteenth are not sampled."""
    install(monkeypatch, *(FakeGpu(f"GPU-{number}") for number in range(20)))
    assert len(keys()) == 16


@pytest.mark.parametrize("fault", [None, FakeNvml.NVMLError_DriverNotLoaded()])
def test_without_an_nvidia_driver_there_is_no_warning(
    monkeypatch: Patch, fault: Exception | None
) -> None:
    """A missing package or driver causes a warning only if the run is on a GPU."""
    install(monkeypatch, fault=fault)
    if fault is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # as if not installed
    assert keys() == []
    with pytest.warns(PerfWarning, match="nvidia-ml-py"):
        assert keys(ranks=1) == []


def test_a_failed_reading_is_dropped_with_one_warning(monkeypatch: Patch) -> None:
    """The other readings of that GPU continue."""
    install(monkeypatch, FakeGpu(UUIDS[0], power=FakeNvml.NVMLError_Unknown("bus")))
    with open_gpus() as (gpu,), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = gpu(0.0), gpu(1.0)
    assert first == second
    assert "gpu_0/gpu_power" not in first
    assert "gpu_0/gpu_util" in first
    assert ours(caught) == [
        "lightning_perf: gpu_0: reading power failed (NVMLError_Unknown: bus); it is no longer "
        "sampled."
    ]


def test_a_gpu_that_cannot_be_opened_does_not_hide_the_others(monkeypatch: Patch) -> None:
    """A GPU that is lost before the run is named in a warning; the others are sampled."""
    nvml = install(monkeypatch, *map(FakeGpu, UUIDS))
    handle = nvml.nvmlDeviceGetHandleByIndex

    def broken(index: int) -> FakeGpu:
        if index == 1:
            raise nvml.NVMLError_GpuIsLost
        return handle(index)

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", broken)
    with pytest.warns(PerfWarning, match="GPU 1 is not sampled"):
        assert keys() == ["gpu_0", "gpu_2"]


def test_activity_of_tensor_cores(monkeypatch: Patch) -> None:
    """NVML's counters give it between two readings; OFU relates it to the maximum clock."""
    gpu = FakeGpu(UUIDS[0], activity=(90.0, 60.0, 30.0), clocks=(1485, 2619))
    nvml = install(monkeypatch, gpu)
    with open_gpus() as (sensor,):
        for _ in range(2):
            found = sensor(0.0)
            assert found["gpu_0/sm_activity"] == 90.0
            assert found["gpu_0/tensor_activity"] == 60.0
            assert found["gpu_0/dram_activity"] == 30.0
            assert found["gpu_0/ofu"] == 60.0 * 1485 / 1980
        assert nvml.samples == 2
    assert nvml.samples == 0


def test_older_gpus_have_no_activity(monkeypatch: Patch) -> None:
    """Before Hopper there are no such counters: no key, and no warning."""
    install(monkeypatch, FakeGpu(UUIDS[0]))
    with open_gpus() as (sensor,):
        assert not {"gpu_0/ofu", "gpu_0/tensor_activity"} & sensor(0.0).keys()
