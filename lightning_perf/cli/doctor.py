"""The command that checks an installation."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.checks import install_command
from lightning_perf.cli import JSON, command, new_console, print_json
from lightning_perf.errors import ConfigError, without_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Packages, and what the optional ones are for.
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
_STYLES = {"ok": "", "missing": "yellow", "error": "bold red"}


class Finding(NamedTuple):
    """One line of the command's output."""

    #: ``packages``, ``hardware`` or ``set-up``.
    part: str
    name: str
    value: str
    #: ``ok``, ``missing`` (a feature is off) or ``error`` (something is broken).
    state: str = "ok"


@command(JSON)
def doctor(json: bool) -> int:
    """Check versions, devices, permissions and the tracking server.

    Says which feature lacks which package.
    """
    found = [*_packages(), *_hardware(), *_setup()]
    if json:
        print_json([each._asdict() for each in found])
    else:
        console, part = new_console(soft_wrap=True), ""
        for each in found:
            if each.part != part:
                console.print(part := each.part, style="bold")
            state = "" if each.state == "ok" else f"{each.state}: "
            console.print(f"  {each.name}: {state}{each.value}", style=_STYLES[each.state])
    return 1 if any(each.state == "error" for each in found) else 0


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
    from lightning_perf.system.host import usable_cpus

    yield Finding("hardware", "CPU", f"{device_name('cpu')}, {usable_cpus()} usable")
    build, gpus = cuda_devices()
    yield Finding("hardware", "CUDA", f"torch is built for {build or 'CPUs'}")
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
    yield Finding("set-up", "LIGHTNING_PERF", *_variable(os.environ.get("LIGHTNING_PERF", "")))
    yield Finding("set-up", "MLflow", *_tracking())


def _variable(value: str) -> tuple[str, str]:
    from lightning_perf.callbacks.factory import callbacks

    if not value:
        return "not set", "ok"
    try:
        found = callbacks()
    except ConfigError as error:
        return str(error), "error"
    names = [type(part).__name__ for each in found for part in each.parts]
    return f"{value}: {', '.join(names) or 'off'}", "ok"


def _tracking() -> tuple[str, str]:
    from lightning_perf.tracking.mlflow import tracking_problem
    from lightning_perf.tracking.runs import default_tracking_uri

    address = default_tracking_uri()
    problem = tracking_problem(address)
    if problem and address.startswith("sqlite:///"):
        return f"{address}, which does not exist yet", "ok"
    return (problem, "error") if problem else (without_credentials(address), "ok")
