"""The tests that need a GPU run with few packages installed: see ``benchmarks/gpu``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Packages that a machine with a GPU need not have.
ABSENT = ("jsonargparse", "memray", "mlflow", "viztracer", "wandb", "xdist")
#: Calls pytest twice: the first time it imports what the second one needs, too.
PROGRAM = f"""
import sys

sys.modules |= dict.fromkeys({ABSENT})
import pytest

for arguments in sys.argv[1:]:
    if code := pytest.main(arguments.split()):
        sys.exit(code)
"""


@pytest.mark.slow
def test_gpu_tests_need_no_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are collected without MLflow, memray, VizTracer, jsonargparse and wandb.

    Tests of these are skipped with a reason that names the package; others of the file run.
    """
    paths = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    texts = {path.relative_to(TESTS.parent).as_posix(): path.read_text() for path in paths}
    marked = {name for name, text in texts.items() if "@pytest.mark.gpu" in text}
    collect = ["-q -p no:cacheprovider --collect-only -m gpu", *sorted(marked)]
    skip = "-q -p no:cacheprovider tests/run/test_copies.py -k objects_can_be_copied -rs"
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-c", PROGRAM, " ".join(collect), skip]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = done.stdout.splitlines()
    found = {line.partition("::")[0] for line in lines if line.startswith("tests/")}
    assert found == marked
    assert "memray is not installed" in done.stdout
    assert "2 skipped" in done.stdout
    assert " passed" in done.stdout
