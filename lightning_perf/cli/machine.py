"""The commands about this machine and other devices: its installation, and peaks."""

from __future__ import annotations

import platform
import signal
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import Version

from lightning_perf.checks import install_command, is_installed
from lightning_perf.cli import Failure, print_json
from lightning_perf.errors import ConfigError, without_credentials
from lightning_perf.schedule.triggers import PROC, USUAL
from lightning_perf.terminal import new_console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from lightning_perf.flops.peaks import DevicePeaks

#: Packages, and what the optional ones are for.
PACKAGES = {
    **dict.fromkeys(("lightning_perf", "torch")),
    "lightning": "Trainers of lightning.pytorch",
    "pytorch-lightning": "Trainers of pytorch_lightning",
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

    name: str
    value: str
    #: ``ok``, ``missing`` (a feature is off) or ``error`` (something is broken).
    state: str = "ok"


def doctor(*, json: bool = False) -> int:
    """Check versions, devices, the set-up and the tracking server.

    Says which feature lacks which package.

    Args:
        json: Print JSON.
    """
    findings = [*_system(), *_packages(), *_hardware(), *_setup()]
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        console = new_console(soft_wrap=True)
        for name, value, state in findings:
            text = value if state == "ok" else f"{state}: {value}"
            console.print(f"{name}: {text}", style=_STYLES[state])
    return int(any(finding.state == "error" for finding in findings))


def _system() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.system()}")
    for there, name, instead in (
        (USUAL == "SIGUSR2", "SIGUSR2", "OnSignal() records after Ctrl+Break"),
        (hasattr(signal, "SIGURG"), "SIGURG", "no profiler records data loader workers"),
        (PROC.exists(), str(PROC), "no lightning-perf capture, and no time of waiting for a CPU"),
        (is_installed("resource"), "resource", "reading a recording may use any amount of memory"),
    ):
        if not there:
            yield Finding(name, f"{instead}, since this system does not have it", "missing")


def _packages() -> Iterator[Finding]:
    for name, feature in PACKAGES.items():
        try:
            installed = version(name)
            if name == "mlflow" and (problem := _refused_by_sqlalchemy(Version(installed))):
                yield Finding(name, f"{installed} {problem}", "error")
            else:
                yield Finding(name, installed)
        except PackageNotFoundError:
            purpose = f", for {feature}" if feature else ""
            text = f"not installed{purpose}: {install_command(name)}"
            yield Finding(name, text, "missing" if feature else "error")


def _refused_by_sqlalchemy(mlflow: Version) -> str | None:
    """Why a release of MLflow does not import: pip installs these pairs."""
    if mlflow < Version("3.14") and is_installed("sqlalchemy"):
        beside = Version(version("sqlalchemy"))
        if beside >= Version("2.1"):
            return f'does not import beside SQLAlchemy {beside}: pip install "sqlalchemy<2.1"'
    return None


def _hardware() -> Iterator[Finding]:
    from lightning_perf.cgroup import usable_cpus
    from lightning_perf.flops import measure, peaks
    from lightning_perf.system.gpus import nvidia_driver

    yield Finding("CPU", f"{peaks.device_name('cpu')}, {usable_cpus()} usable")
    for setting, rows in measure.kept_peaks().items():
        if best := measure.trusted_peak(rows):
            text = f"{best[0] / 1e12:.3g} TFLOP/s, measured on {best[1]}; {setting}"
            yield Finding("peak", f"{text}; delete {measure.kept_file()} to forget it")
    build, gpus = peaks.cuda_devices()
    yield Finding("CUDA", f"torch is built for {build or 'CPUs'}")
    for number, name in enumerate(gpus):
        entry = peaks.lookup(name)
        known = f"peak from the table ({entry.name})" if entry else "no peak in the table"
        yield Finding(f"GPU {number}", f"{name}, {known}", "ok" if entry else "missing")
    driver = nvidia_driver()
    if driver is None:
        state = "missing" if gpus else "ok"
        yield Finding("NVML", "not found: no metrics of NVIDIA GPUs", state)
    elif gpus:
        yield Finding("NVML", f"driver {driver}")
    else:
        yield Finding("NVML", f"driver {driver}, but torch sees no GPU", "error")


def _setup() -> Iterator[Finding]:
    from lightning_perf.callbacks.factory import selected
    from lightning_perf.tracking.mlflow import tracking_problem
    from lightning_perf.tracking.runs import default_tracking_uri

    for group in _GROUPS:
        here = any(entry.name == "lightning_perf" for entry in entry_points(group=group))
        value = "installed" if here else "not installed: LIGHTNING_PERF has no effect"
        yield Finding(group, value, "ok" if here else "error")
    try:
        names = [type(part).__name__ for suite in selected() for part in suite.parts]
        yield Finding("LIGHTNING_PERF", ", ".join(names) or "off")
    except ConfigError as error:
        yield Finding("LIGHTNING_PERF", str(error), "error")
    address = default_tracking_uri()
    problem = tracking_problem(address)
    if problem is None:
        yield Finding("MLflow", without_credentials(address))
    elif address.startswith("sqlite:///"):
        yield Finding("MLflow", f"{without_credentials(address)}, which does not exist yet")
    else:
        yield Finding("MLflow", problem, "error")


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
            "its peak in FLOP/s"
        )
    if json:
        print_json([asdict(row) for row in rows])
        return 0
    console = new_console()
    console.print(_table(rows))
    if any(row.confidence != "datasheet" for row in rows):
        console.print("* derived, or from third-party sources instead of the vendor's data sheet.")
    if not all(row.url for row in rows):
        console.print("? unverified: no line of a source is on record.")
    for row in rows if name is not None else ():
        note = f"\n  note: {row.note}" if row.note else ""
        line = f'\n  read {row.checked}: "{row.quote}"\n  {row.url}' if row.url else ""
        console.print(f"{row.name}: {row.quality}\n  source: {row.source}{note}{line}")
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
        marks = "*" * (row.confidence != "datasheet") + "?" * (not row.url)
        peaks = (_teraflops(getattr(row, column)) for column in _COLUMNS)
        table.add_row(row.name + marks, *peaks)
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
    peak = flops.measure_peak(device, dtype, _BUDGET_SECONDS)
    if peak is None:
        raise Failure(
            f"{device} cannot multiply {dtype} matrices: one of them is unknown to torch, there is "
            "no such device, or this machine is too busy. Try --device cpu --dtype float32"
        )
    name = flops.device_name(device)
    listed, entry = flops.peak_flops(name, dtype, tf32=tf32_is_on()), flops.lookup(name)
    if json:
        print_json({"device": name, "dtype": dtype, "measured": peak, "table": listed})
        return 0
    text = "The table has no peak for this device and dtype."
    if listed is not None and entry is not None:
        text = (
            f"{listed / 1e12:.4g} TFLOP/s (table: {entry.name}, {entry.quality}); "
            f"measured is {peak / listed:.1%} of it."
        )
    console = new_console(soft_wrap=True)
    console.print(f"{name}, {dtype}: {peak / 1e12:.4g} TFLOP/s (measured)\n{text}")
    return 0
