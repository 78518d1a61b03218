"""The examples run unchanged and show the described output."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_perf.tracking.runs import folders_of
from lightning_perf.tracking.summary import read_summary

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
#: `train_gpt.py` is a LightningCLI: see test_example.py and the tests of configs;
#: `wandb_tracker.py` is a tracker: see tracking/test_trackers.py.
SCRIPTS = ["ten_lines", "classify_digits", "manual_optimization", "slow_classifier", "two_ranks"]
#: Fewer batches than the default.
ARGUMENTS = {"slow_classifier": ["--epochs", "2"]}


def run(name: str) -> dict[str, Any]:
    """Run a script in the test's working directory, and read the summary that it writes."""
    torch.set_num_threads(1)  # a fork cannot inherit the threads of an earlier test
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return dict(read_summary(folders_of(Path())[-1] / "summary.json"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_and_leaves_its_summary(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prints its summary, with MFU and the time of forward."""
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    summary = run(name)
    whole = summary["stages"]["train"]["whole_run"]
    assert summary["status"] == "finished"
    assert 0 < whole["throughput"]["mfu"] < 1
    assert whole["timings"]["forward"] > 0
    printed = capfd.readouterr().out
    assert "MFU" in printed
    if name == "classify_digits":
        accuracy = float(printed.rpartition("accuracy ")[2].rstrip("%\n"))
        assert accuracy > 80
    if name == "slow_classifier":
        assert "input-bound" in [each["code"] for each in summary["verdicts"]]
    if name == "two_ranks":
        assert summary["setup"]["world_size"] == 2
        (straggler,) = [each for each in summary["verdicts"] if each["code"] == "straggler"]
        assert (straggler["rank"], straggler["phase"]) == (1, "input")


def test_every_script_is_run() -> None:
    """A new example needs a test."""
    others = {"fabric_mfu", "train_gpt", "wandb_tracker"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *others}


def test_fabric(capfd: pytest.CaptureFixture[str]) -> None:
    """A loop of Fabric shows its MFU twice."""
    runpy.run_path(str(EXAMPLES / "fabric_mfu.py"), run_name="__main__")
    shown = re.findall(r"batch (\d+): MFU ([\d.]+)%", capfd.readouterr().out)
    assert [batch for batch, _ in shown] == ["50", "100"]
    assert all(0 < float(mfu) < 100 for _, mfu in shown)


def test_the_notebook_runs_in_order(in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs in a kernel if nbclient is installed, otherwise cell by cell."""
    torch.set_num_threads(1)
    if find_spec("nbclient") and find_spec("ipykernel"):
        import nbclient
        import nbformat

        book = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(book, resources={"metadata": {"path": str(in_tmp)}}).execute()
        printed = json.dumps(book)
    else:
        cells = json.loads(NOTEBOOK.read_text())["cells"]
        names: dict[str, object] = {"__name__": "__main__"}
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
        printed = capfd.readouterr().out
    for part in ("MFU", "samples/s", "report.html"):
        assert part in printed
