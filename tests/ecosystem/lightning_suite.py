"""Run Lightning's own tests with our callbacks, and repeat without them those that do not pass.

``python lightning_suite.py CHECKOUT [PATHS AND OPTIONS OF PYTEST]``; paths are below
``tests/tests_pytorch``. Tests whose result differs with us must be listed, with the reason, in
``lightning_expected.toml``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Collection
from pathlib import Path

HERE = Path(__file__).parent
ROOT = "tests/tests_pytorch"


def outcomes(
    tests: Path, *options: str, attach: bool = False, only: Collection[str] = ()
) -> tuple[dict[str, str], int]:
    """The result of each test by its name, and how many batches our callbacks counted.

    With ``only``, the others are still collected: some of Lightning's tests end otherwise once
    another file has imported ``pytorch_lightning``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line",
            "-p", "attach", "-p", "no:cacheprovider", "--outcomes", str(file), *options,
        ]  # fmt: skip
        command += ["--attach", folder] if attach else []
        if only:
            (listed := Path(folder, "only.json")).write_text(json.dumps([*only]))
            command += ["--only", str(listed)]
        subprocess.run(command, cwd=tests, env=os.environ | {"PYTHONPATH": str(HERE)}, check=False)
        found = json.loads(file.read_text())
        return found["ends"], found["batches"]


def main(checkout: str, *options: str) -> bool:
    """Compare both runs; true if tests ran and differ only as expected."""
    tests = Path(checkout, ROOT)
    groups = tomllib.loads((HERE / "lightning_expected.toml").read_text())["differences"]
    expected = {test: group["reason"] for group in groups for test in group["tests"]}
    with_us, batches = outcomes(tests, *options, attach=True)
    print(f"with us: {dict(Counter(with_us.values()))}, {batches:,} batches")
    # Tests that pass with us need not run without us.
    others = [name for name, end in with_us.items() if end != "passed"]
    alone, _ = outcomes(tests, *options, only=others) if others else ({}, 0)
    changes = {
        name.removeprefix(f"{ROOT}/"): f"{alone.get(name)} -> {with_us[name]}"
        for name in others
        if with_us[name] != alone.get(name)
    }
    for name, change in sorted(changes.items()):
        print(f"{change}: {name} ({expected.get(name, 'NOT EXPECTED')})")
    print(f"{len(changes)} of {len(with_us)} differ from Lightning alone")
    return bool(with_us) and changes.keys() <= expected.keys()


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
