"""The public names, and the cost of importing the package."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_perf
from lightning_perf import extend

NAMES = """
All Always AnyOf At ConfigError Cyclic Diagnosis Elapsed Every Fixed Flops GlobalRank Hang
HasTag LocalRank MemorySnapshot Memray Moment Never Not OnSignal OnSlowBatch OnVerdict
OpenTelemetry PerfWarning Profiler Prometheus PyTorch RecorderBusy Schedule SpeedMonitor Stages
Suite SystemMetrics Time TimeUnit Timestamp Timings Tracker Verdict VizTracer Window
WindowCallback always_on
"""


def test_public_names_are_frozen() -> None:
    """Users write these names in code and in YAML, so that a change must be intended."""
    assert lightning_perf.__all__ == sorted(NAMES.split())
    assert dir(lightning_perf) == lightning_perf.__all__


FOR_AUTHORS = """
CHANGES Change ConfigError Context FOREVER FunctionRule Impact Limits Moment Names NotHere
PerfWarning Profiler RULES Ranks Recorded RecorderBusy Recording Rule Run Schedule Seen Signal
Signals Time TimeUnit Timestamp Tracker Trigger Unknown Verdict Window WindowCallback as_schedule
defaults flag flop_formula needs post rank_list refuse_python_profiler refuse_torch_profiler
stage_list times whole
"""


def test_names_for_authors_are_frozen() -> None:
    """Extensions import these names, so that a change must be intended."""
    assert sorted(extend.__all__) == sorted(FOR_AUTHORS.split())
    for name in extend.__all__:
        assert name in ("CHANGES", "FOREVER", "RULES", "Recording") or getattr(extend, name).__doc__


def test_every_public_name_is_imported_for_type_checkers() -> None:
    """The imports under TYPE_CHECKING are those of `__all__`."""
    tree = ast.parse(Path(lightning_perf.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [alias.asname for node in imports for alias in node.names if alias.asname]
    assert sorted(found) == lightning_perf.__all__


@pytest.mark.parametrize("name", NAMES.split())
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    """Each name resolves to an object of that name with a docstring."""
    value = getattr(lightning_perf, name)
    assert value.__name__ == name
    assert value.__doc__


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt name raises AttributeError, as for any module."""
    with pytest.raises(AttributeError, match="SpeedMonitr"):
        lightning_perf.SpeedMonitr  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_mlflow() -> None:
    """The import is cheap, so that any file may contain it."""
    code = "import sys, lightning_perf; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "mlflow", "lightning", "numpy", "rich"} & set(loaded)


def in_new_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code that may import the tests' helpers, with a folder as its argument."""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, str(folder)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_it_trains_with_torch_and_lightning_only(tmp_path: Path) -> None:
    """Without MLflow and the recorders' tools, all names can be imported and training runs."""
    code = """
import sys
from pathlib import Path
from typing import Any
from importlib.abc import MetaPathFinder

MISSING = {
    "mlflow", "memray", "viztracer", "pynvml", "psutil", "jsonargparse", "opentelemetry",
    "prometheus_client",
}

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import lightning_perf
from helpers.small import Small, trainer
for name in lightning_perf.__all__:
    getattr(lightning_perf, name)
from lightning_perf import PyTorch, always_on
suite = always_on()
profiler = PyTorch(schedule="first 1ba")
trainer(sys.argv[1], suite, profiler, log_every_n_steps=4).fit(Small())
assert suite.parts[1].metrics["mfu"] > 0
for name in ("Memray", "OpenTelemetry", "Prometheus", "VizTracer"):
    try:
        getattr(lightning_perf, name)()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = in_new_process(code, tmp_path)
    assert list(tmp_path.rglob("*.pt.trace.json.gz"))
    assert "MFU" in done.stdout
    assert "is off for the rest of this run" not in done.stderr
    packages = {
        "Memray": ("memray", "memray"),
        "OpenTelemetry": ("opentelemetry.exporter.otlp.proto.http", "otel"),
        "Prometheus": ("prometheus_client", "prometheus"),
        "VizTracer": ("viztracer", "viztracer"),
    }
    for name, (package, extra) in packages.items():
        advice = f'Try pip install "lightning_perf[{extra}]".'
        assert f"{name} needs the package {package}. {advice}" in done.stdout


@pytest.mark.slow
def test_the_end_of_a_run_imports_no_large_package(tmp_path: Path) -> None:
    """The first end of a run in a process writes its summary without further imports."""
    code = """
import sys
import lightning as L
import lightning_perf
from helpers.small import Small, trainer

class Before(L.Callback):
    def on_train_end(self, trainer, pl_module):
        self.modules = set(sys.modules)

before = Before()
trainer(sys.argv[1], lightning_perf.SpeedMonitor(), before, max_epochs=4).fit(Small())
print("imported:", *{name.partition(".")[0] for name in set(sys.modules) - before.modules})
"""
    done = in_new_process(code, tmp_path)
    _, mark, names = done.stdout.rpartition("imported:")
    assert mark
    heavy = {"jinja2", "lightning_perf", "matplotlib", "mlflow", "rich", "scipy", "torch"}
    assert not heavy & set(names.split())
    assert list(tmp_path.rglob("summary.json"))


def test_signatures_are_those_of_the_constructors() -> None:
    """LightningCLI and editors read the arguments with their types."""
    parameters = inspect.signature(lightning_perf.SpeedMonitor).parameters
    assert parameters["window_size"].annotation == "int"
    assert "self" not in parameters
