"""Trials in processes of their own: what they leave behind, and what they compare."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import tried

from lightning_perf.trials.experiment import Candidate, Experiment, Setting
from lightning_perf.trials.proof import same_training

WORKERS = Candidate(
    "Workers", 2, "num_workers=2", "input", True, [], None, {}, {"num_workers": 2}, "", []
)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files and folders below a folder, with their content and time."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a checkpoint that a trial must not replace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "last.ckpt").write_text("of another run")
    return tmp_path


def experiment(case: str) -> Experiment:
    command = [sys.executable, tried.__file__, case]
    return Experiment(command, minutes=5, seconds=0.5, only=[], tell=print)


@pytest.fixture
def trials(request: pytest.FixtureRequest, in_folder: Path) -> Iterator[Experiment]:
    found = experiment(request.param)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("trials", ["fixed"], indirect=True)
def test_the_first_run_diagnoses_and_leaves_nothing(trials: Experiment, in_folder: Path) -> None:
    """Checkpoints, logs and the lines after fit of a script that writes all of them."""
    before = contents(in_folder)
    outcome = trials.run(Setting(keeps=("checkpoint", "validation")))
    assert outcome.error is None
    assert contents(in_folder) == before
    result = outcome.result
    assert result["timed"] >= 60
    assert result["epoch"] == 20
    assert result["dataset"] == "fixed"
    assert result["verdicts"]
    assert "Elsewhere writes nothing in trials" in result["notes"]


def both(trials: Experiment, name: str) -> str:
    """Whether a training with workers is the same as without."""
    trials.batches = 12
    results: list[Any] = []
    for setting in (Setting(), Setting((WORKERS,))):
        outcome = trials.run(setting)
        assert outcome.error is None
        results.append(outcome.result)
    assert results[1]["startup"] > 0
    return same_training(results[1], results[:1], [], exact=True, dataset=name)


@pytest.mark.slow
@pytest.mark.parametrize("trials", ["fixed"], indirect=True)
def test_workers_leave_a_training_equal(trials: Experiment, in_folder: Path) -> None:
    """Its weights are not seeded: both trials begin with the same ones."""
    before = contents(in_folder)
    assert both(trials, "fixed") == "equal"
    assert contents(in_folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("trials", ["stateful"], indirect=True)
def test_items_that_depend_on_earlier_ones_are_found(trials: Experiment) -> None:
    """In workers each copy of the dataset counts for itself."""
    assert both(trials, "stateful") == "not equal: batch 1 differs"


@pytest.mark.slow
@pytest.mark.parametrize("trials", ["hangs"], indirect=True)
def test_a_change_that_hangs_is_a_result(trials: Experiment) -> None:
    """Its processes are ended, and the next trial runs."""
    trials.batches, trials.allowed = 12, 40.0
    assert trials.run(Setting()).error is None
    outcome = trials.run(Setting((WORKERS,)))
    assert outcome.error is not None
    assert outcome.error.startswith("stopped after 40.")


@pytest.mark.slow
def test_a_command_without_a_fit_says_so(in_folder: Path) -> None:
    """Such as one that does not train, or trains elsewhere."""
    trials = Experiment([sys.executable, "-c", "print('done')"], 1, 1, [], print)
    try:
        assert "ended without Trainer.fit" in str(trials.run(Setting()).error)
        failed = Experiment([sys.executable, "-c", "raise OSError('no data')"], 1, 1, [], print)
        assert failed.run(Setting()).error == "OSError: no data"
        failed.close()
    finally:
        trials.close()
