"""Sources of a peak: the user, the table, an estimate or a measurement."""

from types import SimpleNamespace

import pytest
import torch

from lightning_perf.errors import ConfigError
from lightning_perf.flops import check_peak, device_name, peaks, tf32_is_on
from lightning_perf.flops.peaks import Peak, resolve_peak

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Make torch report a GPU with a given name."""

    def pretend(name, **properties):
        found = SimpleNamespace(name=name, **properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


@pytest.fixture
def rate(monkeypatch):
    """Make every measurement return the same rate."""
    monkeypatch.setattr(peaks, "measure_peak", lambda *_, **__: 7e9)


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), True, "fast", "1e12", [1]])
def test_an_invalid_peak_is_refused(given):
    """The error names the argument."""
    with pytest.raises(ConfigError, match="gpu_flops_available"):
        check_peak(given, "gpu_flops_available")


@pytest.mark.parametrize(
    ("given", "meant"), [(312, "312e12"), (0.5, "0.5e12"), (999e6, "312e12"), (312e24, "312e12")]
)
def test_a_peak_in_another_unit_is_refused(given, meant):
    """An implausible number is refused with the unit and the probable value."""
    with pytest.raises(ConfigError, match=r"in FLOP/s \(not TFLOP/s\)") as caught:
        check_peak(given)
    assert caught.value.example == meant
    check_peak(float(meant))


def test_a_given_peak_takes_precedence(gpu, rate):
    """A number from the user is used on every device."""
    gpu("NVIDIA H200")
    assert resolve_peak(CUDA, "bfloat16", 1e12) == Peak(1e12, "given")
    assert resolve_peak(CPU, "float32", 10**9) == Peak(1e9, "given")


def test_a_gpu_of_the_table(gpu):
    """A known GPU has the peak of the table, with its entry and confidence."""
    gpu("NVIDIA H200")
    assert resolve_peak(CUDA, "bfloat16") == Peak(989.4e12, "table: H200 (datasheet)")


def test_an_unknown_nvidia_gpu_is_estimated(gpu):
    """The peak of an A100 slice follows from its number of multiprocessors."""
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    gpu(name, multi_processor_count=14, clock_rate=1410000, major=8, minor=0)
    found = resolve_peak(CUDA, "bfloat16")
    assert found is not None
    assert found.value == pytest.approx(312e12 * 14 / 108, rel=1e-3)
    assert found.source == f"estimated: {name}"


@pytest.mark.parametrize("properties", [{"clock_rate": 1e6, "major": 99}, {"major": 8}])
def test_an_unknown_gpu_has_no_peak(gpu, properties):
    """Without a known capability or a clock there is no estimate."""
    gpu("NVIDIA Quantum", multi_processor_count=14, minor=0, **properties)
    assert resolve_peak(CUDA, "float16") is None


def test_an_unknown_amd_gpu_is_not_estimated(gpu, monkeypatch):
    """AMD's capabilities look like NVIDIA's but have another meaning."""
    gpu("AMD Radeon RX 9999", multi_processor_count=96, clock_rate=2e6, major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert resolve_peak(CUDA, "float16") is None


def test_a_cpu_is_measured(rate):
    """A CPU is measured, and so is any device on request."""
    assert resolve_peak(CPU, "float32") == Peak(7e9, "measured")
    assert resolve_peak(CUDA, "float32", "measure") == Peak(7e9, "measured")


def test_other_devices():
    """A device without a name in torch has no peak."""
    meta = torch.device("meta")
    assert device_name(meta) == "meta"
    assert device_name(CPU)  # the maker's name, which differs from machine to machine
    assert resolve_peak(meta, "float32") is None


def test_the_tf32_setting_decides_float32(gpu, monkeypatch):
    """float32 has the peak of TF32 while products may use it."""
    gpu("NVIDIA A100-SXM4-40GB")
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", 19.5e12), ("high", 156e12)):
            torch.set_float32_matmul_precision(setting)
            assert tf32_is_on() is (setting == "high")
            found = resolve_peak(CUDA, "float32")
            assert found is not None
            assert found.value == expected
    finally:
        torch.set_float32_matmul_precision(before)
