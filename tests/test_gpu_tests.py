"""The tests that need a GPU run with few packages installed: see ``benchmarks/gpu``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Packages that a machine with a GPU need not have.
ABSENT = ("jsonargparse", "memray", "mlflow", "viztracer", "wandb", "xdist")
PROGRAM = f"""
import sys

sys.modules |= dict.fromkeys({ABSENT})
import pytest

sys.exit(pytest.main(sys.argv[1:]))
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run tests without these packages; returns what pytest prints."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
def test_gpu_tests_need_no_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are collected without MLflow, memray, VizTracer, jsonargparse and wandb."""
    texts = {path: path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    marked = {str(path) for path, text in texts.items() if "@pytest.mark.gpu" in text}
    lines = run(monkeypatch, "--collect-only", "-m", "gpu").splitlines()
    found = {line.partition("::")[0] for line in lines if "::" in line}
    assert {str(TESTS.parent / name) for name in found} == marked


@pytest.mark.slow
def test_tests_of_a_missing_package_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the package; the other tests of the file run."""
    found = run(monkeypatch, "tests/run/test_copies.py", "-k", "objects_can_be_copied", "-rs")
    assert "memray is not installed" in found
    assert "2 skipped" in found
    assert " passed" in found
