"""The commands about this machine and other devices: its installation, and peaks."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.checks import install_command
from lightning_perf.cli import Failure, print_json
from lightning_perf.errors import ConfigError, closest, without_credentials
from lightning_perf.terminal import new_console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from packaging.specifiers import SpecifierSet
    from rich.table import Table

    from lightning_perf.flops.peaks import DevicePeaks

#: Packages, and what the optional ones are for.
PACKAGES = {
    **dict.fromkeys(("lightning_perf", "torch", "lightning")),
    "pytorch-lightning": "Trainers of the package pytorch_lightning",
    "mlflow": "metrics, files and reports in MLflow",
    "memray": "Memray",
    "viztracer": "VizTracer",
    "psutil": "SystemMetrics",
    "nvidia-ml-py": "SystemMetrics of NVIDIA GPUs",
    "jsonargparse": "LightningCLI and LIGHTNING_PERF=file.yaml",
}
_GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")
_STYLES = {"ok": "", "missing": "yellow", "error": "bold red"}


class Finding(NamedTuple):
    """One line of the command's output."""

    #: ``packages``, ``hardware`` or ``set-up``.
    part: str
    name: str
    value: str
    #: ``ok``, ``missing`` (a feature is off) or ``error`` (something is broken).
    state: str = "ok"


def doctor(*, json: bool = False) -> int:
    """Check versions, devices, permissions and the tracking server.

    Says which feature lacks which package.

    Args:
        json: Print JSON.
    """
    findings = [*_packages(), *_hardware(), *_setup()]
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        console, part = new_console(soft_wrap=True), ""
        for finding in findings:
            if finding.part != part:
                console.print(part := finding.part, style="bold")
            state = "" if finding.state == "ok" else f"{finding.state}: "
            console.print(f"  {finding.name}: {state}{finding.value}", style=_STYLES[finding.state])
    return 1 if any(finding.state == "error" for finding in findings) else 0


def _packages() -> Iterator[Finding]:
    from packaging.version import Version

    yield Finding("packages", "python", platform.python_version())
    supported = _supported()
    for name, feature in PACKAGES.items():
        purpose = f", for {feature}" if feature else ""
        try:
            value, wanted = version(name), supported.get(name, "")
            # Builds of vendors are called 2.6.0a0+nv: what counts is 2.6.0.
            if not wanted or Version(value).base_version in wanted:
                yield Finding("packages", name, value)
                continue
            value = f'{value} is not supported{purpose}: pip install "{name}{wanted}"'
        except PackageNotFoundError:
            value = f"not installed{purpose}: {install_command(name)}"
        yield Finding("packages", name, value, "missing" if feature else "error")


def _supported() -> dict[str, SpecifierSet]:
    """The supported versions by package; those of pytorch-lightning are Lightning's."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in requires("lightning_perf") or ()]
    except PackageNotFoundError:  # a source tree that is not installed
        return {}
    versions = {requirement.name: requirement.specifier for requirement in required}
    return versions | {"pytorch-lightning": versions["lightning"]}


def _hardware() -> Iterator[Finding]:
    from lightning_perf.cgroup import usable_cpus
    from lightning_perf.flops import measure, peaks
    from lightning_perf.system.gpus import nvidia_driver

    yield Finding("hardware", "CPU", f"{peaks.device_name('cpu')}, {usable_cpus()} usable")
    for setting, rows in measure.kept_peaks().items():
        if best := measure.trusted_peak(rows):
            here = "" if setting.startswith(peaks.device_name("cpu")) else " of another machine"
            text = f"{best[0] / 1e12:.3g} TFLOP/s, measured on {best[1]}; {setting}"
            text += f"; delete {measure.kept_file()} to forget it"
            yield Finding("hardware", f"peak{here}", text)
    build, gpus = peaks.cuda_devices()
    yield Finding("hardware", "CUDA", f"torch is built for {build or 'CPUs'}")
    for number, name in enumerate(gpus):
        entry = peaks.lookup(name)
        known = f"peak from the table ({entry.name})" if entry else "no peak in the table"
        yield Finding("hardware", f"GPU {number}", f"{name}, {known}", "ok" if entry else "missing")
    driver = nvidia_driver()
    if driver is None:
        state = "missing" if gpus else "ok"
        yield Finding("hardware", "NVML", "not found: no metrics of NVIDIA GPUs", state)
        return
    yield Finding("hardware", "NVML", f"driver {driver}")
    if not gpus:
        yield Finding("hardware", "GPUs", "NVML has a driver, but torch sees no GPU", "error")


def _setup() -> Iterator[Finding]:
    folder = Path.cwd()
    usable = os.access(folder, os.W_OK)
    text = f"{folder} is {'' if usable else 'not '}writable"
    yield Finding("set-up", "working directory", text, "ok" if usable else "error")
    for group in _GROUPS:
        here = any(entry.name == "lightning_perf" for entry in entry_points(group=group))
        value = "installed" if here else "not installed: LIGHTNING_PERF has no effect"
        yield Finding("set-up", group, value, "ok" if here else "error")
    yield Finding("set-up", "LIGHTNING_PERF", *_variable(os.environ.get("LIGHTNING_PERF", "")))
    yield Finding("set-up", "MLflow", *_tracking())


def _variable(value: str) -> tuple[str, str]:
    from lightning_perf.callbacks.factory import selected

    if not value:
        return "not set", "ok"
    try:
        suites = selected()
    except ConfigError as error:
        return str(error), "error"
    names = [type(part).__name__ for suite in suites for part in suite.parts]
    return f"{value}: {', '.join(names) or 'off'}", "ok"


def _tracking() -> tuple[str, str]:
    from lightning_perf.tracking.mlflow import tracking_problem
    from lightning_perf.tracking.runs import default_tracking_uri

    address = default_tracking_uri()
    problem = tracking_problem(address)
    if problem and address.startswith("sqlite:///"):
        return f"{without_credentials(address)}, which does not exist yet", "ok"
    return (problem, "error") if problem else (without_credentials(address), "ok")


# -- peaks ----------------------------------------------------------------------------------------

_COLUMNS = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "int8", "fp4")
# Longer than in training, for a better estimate.
_BUDGET_SECONDS = 1.0


def devices(name: str | None = None, *, json: bool = False) -> int:
    """Show the dense peaks of devices, by dtype.

    Args:
        name: A device name as in torch, or a part of it; also shows the sources.
        json: Print JSON, in FLOP/s.
    """
    from lightning_perf import flops

    rows = flops.table() if name is None else _named(name)
    if not rows:
        raise Failure(
            f"no device matches {name}. Try lightning-perf devices, or Flops(peak_flops=...) with "
            "its peak in FLOP/s", 1,
        )  # fmt: skip
    if json:
        print_json([asdict(row) for row in rows])
        return 0
    console = new_console()
    console.print(_table(rows))
    if any(row.confidence != "datasheet" for row in rows):
        console.print("* derived, or from third-party sources instead of the vendor's data sheet.")
    for row in rows if name is not None else ():
        note = f"\n  note: {row.note}" if row.note else ""
        console.print(f"{row.name}: {row.confidence}\n  source: {row.source}{note}")
    return 0


def _named(name: str) -> list[DevicePeaks]:
    """The entries of this name, else those that contain it, else the one that MFU would use."""
    from lightning_perf import flops

    exact = [row for row in flops.table() if row.name.casefold() == name.casefold()]
    used = flops.lookup(name)
    part = [row for row in flops.table() if name.casefold() in row.name.casefold()]
    return exact or part or ([used] if used else [])


def _table(rows: Sequence[DevicePeaks]) -> Table:
    from rich.table import Table

    title = "dense peaks in TFLOP/s (int8: TOP/s)"
    # No lines, to fit into 80 columns.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        name = row.name if row.confidence == "datasheet" else f"{row.name} *"
        table.add_row(name, *(_teraflops(getattr(row, column)) for column in _COLUMNS))
    return table


def _teraflops(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e12:.0f}" if value >= 1e14 else f"{value / 1e12:.3g}"


#: The headings of the table of peaks, by torch's names.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def measure(*, dtype: str = "float32", device: str = "cpu", json: bool = False) -> int:
    """Measure the peak of a device of this machine with a matrix product.

    Args:
        dtype: Operand dtype, such as bfloat16 or bf16.
        device: The device, as a torch name: cpu, cuda, cuda:1.
        json: Print JSON, in FLOP/s.
    """
    from lightning_perf import flops
    from lightning_perf.flops.operators import tf32_is_on

    dtype = _DTYPES.get(dtype, dtype)
    _check_measurable(device, dtype)
    peak = flops.measure_peak(device, dtype, _BUDGET_SECONDS)
    if peak is None:
        why = f"{device} cannot multiply {dtype} matrices, or this machine is too busy"
        raise Failure(f"{why}. Try --device cpu --dtype float32", 1)
    name = flops.device_name(device)
    listed, entry = flops.peak_flops(name, dtype, tf32=tf32_is_on()), flops.lookup(name)
    if json:
        print_json({"device": name, "dtype": dtype, "measured": peak, "table": listed})
        return 0
    text = "The table has no peak for this device and dtype."
    if listed is not None and entry is not None:
        text = (
            f"{listed / 1e12:.4g} TFLOP/s (table: {entry.name}, {entry.confidence}); "
            f"measured is {peak / listed:.1%} of it."
        )
    console = new_console(soft_wrap=True)
    console.print(f"{name}, {dtype}: {peak / 1e12:.4g} TFLOP/s (measured)\n{text}")
    return 0


def _check_measurable(device: str, dtype: str) -> None:
    """Refuse a device or a dtype that does not exist."""
    from lightning_perf.flops import measure, peaks

    if not measure.is_dtype(dtype):
        known = [*_DTYPES, *_DTYPES.values(), "tf32"]
        near = closest(dtype, known, "bfloat16")
        raise Failure(f"{dtype} is not a dtype of torch. Try --dtype {near}")
    if not measure.is_device(device):
        raise Failure(f"{device} is not a device of torch. Try --device cuda")
    build, gpus = peaks.cuda_devices()
    if device.startswith("cuda") and not gpus:
        why = "torch is built for CPUs" if build is None else "torch sees no GPU"
        raise Failure(f"{device} cannot be measured: {why}. Try --device cpu", 1)
