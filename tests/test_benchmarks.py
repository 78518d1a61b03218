"""Benchmarks that no other test imports still run."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
#: One planted fault of few steps: trained and recorded, then diagnosed again from the record.
PLANTED = """
import sys
from dataclasses import replace

from planted import __main__ as planted

planted.FAULTS[:] = [replace(each, steps=40) for each in planted.FAULTS]
train = ["--only", "slow_inner_hook", "--record", "one.pickle"]
for options in (train, ["--replay", "one.pickle"]):
    sys.argv = ["planted", "--part", "held_out", *options]
    planted.main()
"""


@pytest.mark.slow
def test_a_planted_fault_is_found_and_scored(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the verdict, and both runs print a table of the same case."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)
    command = [sys.executable, "-c", PLANTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = pickle.loads((in_tmp / "one.pickle").read_bytes())
    assert "callback-bound" in [verdict["code"] for verdict in result["verdicts"]]
    assert done.stdout.count("| trainings | 1 (+ 0 that failed) |") == 2


def test_the_page_of_tried_advice_is_what_its_data_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No figure of it, nor of the summary in the documentation, is written by hand."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tried = importlib.import_module("planted.tried")
    committed = tried.TABLE.read_text(), tried.PAGE.read_text()
    for name in ("TABLE", "PAGE"):
        copy = tmp_path / name
        copy.write_text(f"{tried.MARK}: old\n")
        monkeypatch.setattr(tried, name, copy)
    tried.write()
    assert tried.TABLE.read_text() == committed[0]
    assert tried.PAGE.read_text().strip() in committed[1]
