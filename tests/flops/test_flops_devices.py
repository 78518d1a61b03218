"""The table of peaks: real device names match exactly their entry."""

import json
import re
from pathlib import Path

import pytest

from lightning_perf.flops import lookup, peak_flops, table

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
        "AMD Radeon RX 7900 XTX",
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
    """Entries are in order, and units times clock give the 16-bit peaks."""
    data = json.loads(Path(lookup.__code__.co_filename).with_name("device_peaks.json").read_text())
    assert [peaks.name for peaks in table()] == list(data)
    checked = {name: row["check"] for name, row in data.items() if "check" in row}
    assert len(checked) > 50
    for name, check in checked.items():
        rate = check["sm"] * check["boost_ghz"] * 1e9 * check["flop_per_clk_per_sm_16bit"]
        assert rate == pytest.approx(data[name]["fp16"], rel=0.02)
