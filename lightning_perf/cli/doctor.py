"""``lightning-perf doctor``: what is installed, what this machine offers, and what is missing."""

from __future__ import annotations

import json as json_format
import os
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jsonargparse import ArgumentParser

from lightning_perf.checks import install_command
from lightning_perf.errors import ConfigError, describe, without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Packages, and what needs those that need not be there.
_PACKAGES = {
    **dict.fromkeys(("lightning_perf", "torch", "lightning")),
    "pytorch-lightning": "Trainers of the package pytorch_lightning",
    "mlflow": "metrics, files and reports in MLflow",
    "matplotlib": "timings.png",
    "memray": "Memray",
    "viztracer": "VizTracer",
    "psutil": "SystemMetrics",
    "nvidia-ml-py": "SystemMetrics of NVIDIA GPUs",
    "jsonargparse": "LightningCLI and LIGHTNING_PERF=file.yaml",
}
_GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


class Finding(NamedTuple):
    """One line of the command's output."""

    #: ``packages``, ``hardware`` or ``set-up``.
    part: str
    name: str
    value: str
    #: ``ok``, ``missing`` (a feature is off) or ``error`` (something is broken).
    state: str = "ok"


def parser() -> ArgumentParser:
    """The arguments of the command."""
    parser = ArgumentParser(
        description="Check versions, devices, permissions and the tracking server. Says which "
        "feature lacks which package."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(json: bool) -> int:
    """Print the findings; the exit code is 1 if something is broken."""
    found = [*_packages(), *_hardware(), *_setup()]
    if json:
        print(json_format.dumps([each._asdict() for each in found], indent=1))
    else:
        _show(found)
    return 1 if any(each.state == "error" for each in found) else 0


def _show(found: list[Finding]) -> None:
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    styles = {"ok": "", "missing": "yellow", "error": "bold red"}
    for part in dict.fromkeys(each.part for each in found):
        console.print(part, style="bold")
        for each in found:
            if each.part == part:
                state = "" if each.state == "ok" else f"{each.state}: "
                console.print(f"  {each.name}: {state}{each.value}", style=styles[each.state])


def _packages() -> Iterator[Finding]:
    yield Finding("packages", "python", platform.python_version())
    for name, feature in _PACKAGES.items():
        try:
            yield Finding("packages", name, version(name))
        except PackageNotFoundError:
            purpose = f", for {feature}" if feature else ""
            value = f"not installed{purpose}: {install_command(name)}"
            yield Finding("packages", name, value, "missing" if feature else "error")


def _hardware() -> Iterator[Finding]:
    from lightning_perf.flops import cuda_devices, device_name, lookup
    from lightning_perf.system import nvidia_driver

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("hardware", "CPU", f"{device_name('cpu')}, {usable} usable")
    build, gpus = cuda_devices()
    text = "torch is built for CPUs" if build is None else f"torch is built for {build}"
    yield Finding("hardware", "CUDA", text)
    for number, name in enumerate(gpus):
        entry = lookup(name)
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
        here = any(each.name == "lightning_perf" for each in entry_points(group=group))
        value = "installed" if here else "not installed: LIGHTNING_PERF has no effect"
        yield Finding("set-up", group, value, "ok" if here else "error")
    yield _variable(os.environ.get("LIGHTNING_PERF", ""))
    yield _tracking()


def _variable(value: str) -> Finding:
    if not value:
        return Finding("set-up", "LIGHTNING_PERF", "not set")
    from lightning_perf.callbacks.factory import callbacks

    try:
        found = callbacks()
    except ConfigError as error:
        return Finding("set-up", "LIGHTNING_PERF", str(error), "error")
    names = [type(part).__name__ for each in found for part in each.parts]
    return Finding("set-up", "LIGHTNING_PERF", f"{value}: {', '.join(names) or 'off'}")


def _tracking() -> Finding:
    from lightning_perf.tracking.mlflow import check_reachable
    from lightning_perf.tracking.runs import default_tracking_uri

    address = default_tracking_uri()
    shown = without_credentials(address)
    database = address.removeprefix("sqlite:///")
    if database != address:
        there = Path(database).exists()
        return Finding(
            "set-up", "MLflow", f"{shown}{'' if there else ', which does not exist yet'}"
        )
    try:
        check_reachable(address)
    except OSError as error:
        return Finding("set-up", "MLflow", f"{shown} does not respond ({describe(error)})", "error")
    return Finding("set-up", "MLflow", f"{shown} is reachable")
