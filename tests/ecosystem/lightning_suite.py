"""Run Lightning's own tests without and with our callbacks, and tell what we changed.

``python lightning_suite.py CHECKOUT [PATHS AND OPTIONS OF PYTEST]``; paths are below
``tests/tests_pytorch``. Tests that end otherwise with us than without us have to be listed, with
the reason, in ``lightning_expected.toml``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = "tests/tests_pytorch"


def outcomes(tests: Path, options: list[str]) -> dict[str, str]:
    """How each of the tests ends, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line",
            "-p", "attach", "-p", "no:cacheprovider", "--outcomes", str(file), *options,
        ]  # fmt: skip
        subprocess.run(command, cwd=tests, env=os.environ | {"PYTHONPATH": str(HERE)}, check=False)
        found: dict[str, str] = json.loads(file.read_text())
        return found


def main(checkout: str, *options: str) -> bool:
    """Compare both runs; true if they differ by what is expected alone."""
    tests = Path(checkout, ROOT)
    groups = tomllib.loads((HERE / "lightning_expected.toml").read_text())["differences"]
    expected = {f"{ROOT}/{test}": group["reason"] for group in groups for test in group["tests"]}
    alone = outcomes(tests, [*options])
    with_us = outcomes(tests, [*options, "--attach"])
    differ = {
        name for name in with_us.keys() | alone.keys() if with_us.get(name) != alone.get(name)
    }
    for title, ends in (("without us", alone), ("with us", with_us)):
        print(f"{title}: {dict(Counter(ends.values()))}")
    for name in sorted(differ):
        change = f"{alone.get(name)} -> {with_us.get(name)}"
        print(f"{change}: {name} ({expected.get(name, 'NOT EXPECTED')})")
    return differ <= expected.keys()


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
