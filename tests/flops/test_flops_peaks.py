"""Peaks: the table, estimates from units and clock, and what is used for a device."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_perf.errors import ConfigError
from lightning_perf.flops import device_name, lookup, peak_flops, table
from lightning_perf.flops.counter import Counts
from lightning_perf.flops.operators import tf32_is_on
from lightning_perf.flops.peaks import (
    Peak,
    PeakResolver,
    check_peak,
    estimated_peak,
    resolve_peak,
)


def properties(name, sm_count, clock_ghz, capability):
    """What torch knows of a device."""
    major, minor = capability
    return SimpleNamespace(
        name=name,
        multi_processor_count=sm_count,
        clock_rate=clock_ghz * 1e6,
        major=major,
        minor=minor,
    )


NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A2": "A2",
    "NVIDIA RTX A2000": "RTX A2000",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Blackwell Max-Q",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Blackwell Server",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell",
    "NVIDIA RTX PRO 5000 Blackwell": "RTX PRO 5000 Blackwell",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 4090 D": "RTX 4090 D",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti SUPER",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti",
    "Tesla T4": "T4",
    "Tesla P4": "P4",
    "Tesla V100-SXM2-16GB": "V100 SXM2",
    "Tesla V100-PCIE-32GB": "V100 PCIe",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
    "NVIDIA TITAN RTX": "Titan RTX",
    "NVIDIA TITAN V": "Titan V",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI250X": "MI250X (per GCD)",
    "Apple M2": "Apple M2",
    "Apple M2 Max": "Apple M2 Max",
}


@pytest.mark.parametrize(("device", "entry"), NAMES.items())
def test_device_names(device, entry):
    """Each name as reported by torch matches its entry."""
    peaks = lookup(device)
    assert peaks is not None
    assert peaks.name == entry


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA T400 4GB",
        "NVIDIA T1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA RTX 5000 Ada Generation Laptop GPU",
        "NVIDIA RTX A2000 Laptop GPU",
        "GeForce RTX 2080 with Max-Q Design",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce GTX 1080 Ti",
        "NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU",
        "NVIDIA RTX PRO 4500 Blackwell",
        "NVIDIA GB10",
        "NVIDIA Thor",
        "Orin",
        "AMD Instinct MI308X",
        "AMD Radeon RX 7900 XTX",
        "AMD Radeon Graphics",
        "Intel(R) Arc(TM) B580 Graphics",
        "Intel(R) Data Center GPU Max 1550",
        "Apple M5",
        "Apple M5 Max",
        "cpu",
        "",
    ],
)
def test_devices_that_are_not_in_the_table(device):
    """Laptop models, MIG slices and unknown devices match no entry."""
    assert lookup(device) is None
    assert peak_flops(device, "float16") is None


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1979e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla T4", "float16", 65e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5e12),
    ],
)
def test_composers_cases(device, dtype, expected):
    """Dense peaks agree with Composer's to a tenth of a percent."""
    assert peak_flops(device, dtype) == pytest.approx(expected, rel=1e-3)


def test_float32_uses_tf32_if_supported():
    """TF32 changes only the peak of float32, and only on devices with TF32."""
    a100, t4 = "NVIDIA A100-SXM4-40GB", "Tesla T4"
    assert peak_flops(a100, "float32") == 19.5e12
    assert peak_flops(a100, "float32", tf32=True) == 156e12
    assert peak_flops(a100, "bfloat16", tf32=True) == 312e12
    assert peak_flops(t4, "float32", tf32=True) == peak_flops(t4, "float32") == 8.1e12
    assert (peak_flops(a100, "tf32"), peak_flops(t4, "tf32")) == (156e12, 8.1e12)


def test_an_unsupported_dtype_has_no_peak():
    """Unsupported and unknown dtypes have no peak."""
    assert peak_flops("Tesla T4", "bfloat16") is None
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float8_e4m3fn") is None
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float12") is None


def test_every_entry_is_valid():
    """Patterns compile, values are plausible, and each entry has a source."""
    for peaks in table():
        assert peaks.patterns
        assert all(re.compile(pattern) for pattern in peaks.patterns)
        assert peaks.source
        assert re.match("datasheet|derived|secondary", peaks.confidence)
        values = [peaks.fp32, peaks.tf32, peaks.fp16, peaks.bf16, peaks.fp8, peaks.int8, peaks.fp4]
        given = [value for value in values if value is not None]
        assert given
        assert min(given) > 1e12
        assert max(given) < 2e16


def test_entries_agree_with_their_units():
    """Entries are in order, and each unit does a power of two of 16-bit FLOPs per clock."""
    data = json.loads(Path(lookup.__code__.co_filename).with_name("device_peaks.json").read_text())
    assert [peaks.name for peaks in table()] == list(data)
    checked = [peaks for peaks in table() if peaks.boost_mhz]
    assert len(checked) > 50
    for peaks in checked:
        rate = peaks.fp16 / (peaks.sm * peaks.boost_mhz * 1e6)
        assert rate == pytest.approx(2 ** round(math.log2(rate)), rel=0.02), peaks.name


def claims(quote):
    """The numbers in a line, as FLOP/s; of CUDA cores and a clock, FP32's."""
    numbers = [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", quote)]
    if quote.startswith("CUDA Cores"):
        cores, clocks = re.findall(r"Cores (.*), Boost Clock \(GHz\) (.*)", quote)[0]
        return [
            2e9 * float(number.replace(" ", "")) * float(clock)
            for number in cores.split("/")
            for clock in clocks.split("/")
        ]
    return [number * scale for number in numbers for scale in (1e12, 1e15)]


def test_a_source_on_record_has_a_peak_of_its_entry():
    """The quoted line gives one of the values, or twice it: with sparsity, or of two devices.

    AI TOPS are those of the smallest dtype with sparsity. No entry has a part of its source.
    """
    verified = [peaks for peaks in table() if peaks.url]
    assert len(verified) > 60
    for peaks in table():
        assert bool(peaks.url) == bool(peaks.quote) == bool(peaks.checked), peaks.name
    for peaks in verified:
        assert peaks.url.startswith("https://")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", peaks.checked)
        values = [peaks.fp32, peaks.tf32, peaks.fp16, peaks.bf16, peaks.fp8, peaks.int8, peaks.fp4]
        known = np.array([value * factor for value in values if value for factor in (1, 2)])
        assert np.isclose(np.array(claims(peaks.quote))[:, None], known, rtol=0.01).any(), (
            peaks.name
        )


def test_an_entry_without_a_source_on_record_is_unverified(gpu):
    """Whoever reads the source of the peak sees it."""
    gpu("NVIDIA H20")
    assert not lookup("NVIDIA H20").url
    assert resolve_peak(CUDA, "bfloat16").source == "table: H20 (secondary, unverified)"


@pytest.mark.parametrize(
    ("device", "dtype", "tf32", "clock"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", False, 1.83e9),
        ("NVIDIA H100 80GB HBM3", "float32", True, 1.83e9),
        # 67 TFLOP/s hold at 1,980 MHz.
        ("NVIDIA H100 80GB HBM3", "float32", False, None),
        ("NVIDIA H100 80GB HBM3", "float64", False, None),
        ("NVIDIA GB200", "bfloat16", False, None),  # its clock is not published
    ],
)
def test_the_clock_at_which_a_peak_holds(gpu, monkeypatch, device, dtype, tf32, clock):
    """It is known for the units for matrices, where the table has it."""
    gpu(device)
    monkeypatch.setattr("lightning_perf.flops.peaks.tf32_is_on", lambda: tf32)
    assert resolve_peak(CUDA, dtype).clock == clock


@pytest.mark.parametrize(
    ("device", "sm_count", "clock_ghz", "capability"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 1.41, (8, 0)),
        ("NVIDIA H100 80GB HBM3", 132, 1.83, (9, 0)),
        ("NVIDIA B200", 148, 1.856, (10, 0)),
        ("NVIDIA L4", 58, 2.04, (8, 9)),
        ("NVIDIA A40", 84, 1.74, (8, 6)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, (12, 0)),
        ("Tesla T4", 40, 1.59, (7, 5)),
        ("Tesla V100-SXM2-16GB", 80, 1.53, (7, 0)),
        ("Tesla P100-SXM2-16GB", 56, 1.48, (6, 0)),
        ("NVIDIA GeForce RTX 4090", 128, 2.52, (8, 9)),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, (8, 6)),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, (12, 0)),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, (7, 5)),
    ],
)
def test_known_devices(device, sm_count, clock_ghz, capability):
    """The table and the estimate agree to a few percent."""
    compared = 0
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "int8", "float4_e2m1fn_x2", "float32"):
        for tf32 in (False, True):
            ours = estimated_peak(properties(device, sm_count, clock_ghz, capability), dtype, tf32)
            known = peak_flops(device, dtype, tf32=tf32)
            if known is not None and ours is not None:
                compared += 1
                # Some data sheets give float32 at a higher clock than that of the tensor cores.
                assert ours == pytest.approx(known, rel=0.1)
    assert compared >= 4


def test_published_figures():
    """The estimates of A100 and H100 equal their published peaks."""
    a100 = estimated_peak(properties("A100", 108, 1.41, (8, 0)), "bfloat16")
    h100 = estimated_peak(properties("H100", 132, 1.83, (9, 0)), "bfloat16")
    assert a100 == pytest.approx(312e12, rel=1e-3)
    assert h100 == pytest.approx(989.4e12, rel=1e-3)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((3, 7), "float32"), ((99, 0), "float16"), ((7, 5), "bfloat16"), ((8, 0), "float8_e4m3fn")],
)
def test_unknown_units(capability, dtype):
    """Unknown capabilities and unsupported dtypes have no estimate."""
    assert estimated_peak(properties("", 10, 1.0, capability), dtype) is None


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
    monkeypatch.setattr("lightning_perf.flops.peaks.measure_peak", lambda *_, **__: 7e9)


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
    assert resolve_peak(CUDA, "bfloat16") == Peak(989.4e12, "table: H200 (datasheet)", 1.83e9)


def test_an_unknown_nvidia_gpu_is_estimated(gpu):
    """The peak of an A100 slice follows from its number of multiprocessors."""
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    gpu(name, multi_processor_count=14, clock_rate=1410000, major=8, minor=0)
    found = resolve_peak(CUDA, "bfloat16")
    assert found is not None
    assert found.value == pytest.approx(312e12 * 14 / 108, rel=1e-3)
    assert found.source == f"estimated: {name}"


@pytest.mark.parametrize(
    ("name", "capability", "hip"),
    [
        ("NVIDIA GB10", (12, 1), None),
        ("NVIDIA Thor", (11, 0), None),
        ("Orin", (8, 7), None),
        ("AMD Instinct MI308X", (9, 4), "6.4"),
        ("AMD Radeon RX 7900 XTX", (11, 0), "6.4"),
    ],
)
def test_a_gpu_without_a_known_rate_is_measured(gpu, rate, monkeypatch, name, capability, hip):
    """No device is without a peak: neither systems on a chip nor AMD's that are not listed."""
    major, minor = capability
    gpu(name, multi_processor_count=20, clock_rate=1.3e6, major=major, minor=minor)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert resolve_peak(CUDA, "bfloat16") == Peak(7e9, "measured")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA RTX PRO 4500"])
def test_a_gpu_of_a_known_architecture_is_estimated(gpu, name):
    """Laptop models and small ones of an architecture follow from their own clock."""
    gpu(name, multi_processor_count=82, clock_rate=1.5e6, major=12, minor=0)
    halved = 2 if "GeForce" in name else 1
    assert resolve_peak(CUDA, "bfloat16").value == 82 * 1.5e9 * 1024 / halved


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
    assert device_name(CPU)  # the vendor's name, which differs between machines
    assert resolve_peak(meta, "float32") is None


def test_the_peak_of_a_run_is_that_of_most_of_its_work(gpu):
    """A summary shows the peak that MFU refers to: of convolutions, that of TensorFloat-32."""
    gpu("NVIDIA A100-SXM4-40GB")
    peaks = PeakResolver(CUDA, "32-true")
    assert peaks.setup()["peak_flops"] == 19.5e12
    peaks.cost_of(Counts(model={"float32": 1, "tf32": 99}))
    assert peaks.setup()["peak_flops"] == 156e12
    assert peaks.setup()["peak_clock"] == peaks.clock() == 1.41e9


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


def test_a_device_that_is_not_known_is_measured(monkeypatch):
    """A peak from a product of matrices is better than none; its source says so."""
    module = "lightning_perf.flops.peaks"
    monkeypatch.setattr(f"{module}.device_name", lambda _: "AMD Radeon RX 9070 XT")
    monkeypatch.setattr(f"{module}.measure_peak", lambda *_: 4.9e13)
    assert resolve_peak(torch.device("xpu"), "float32") == Peak(4.9e13, "measured")
    assert resolve_peak(torch.device("xpu"), "float32", 5e13) == Peak(5e13, "given")


def test_the_table_has_no_device_without_a_name_in_torch():
    """No device name of torch would match rows of XLA devices."""
    assert not [row.name for row in table() if re.match("TPU|Trainium|Inferentia", row.name)]
