"""Training is bit-identical with and without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import lightning as L
import pytest
import torch
from helpers.small import Small, ours, trainer
from helpers.trainings import KINDS, Model, differences, result

from lightning_perf import PyTorch, SpeedMonitor, Timings, always_on

#: Warnings that these trainings cause in Lightning, torchmetrics and torch, with and without us.
pytestmark = pytest.mark.filterwarnings("ignore:(?!lightning_perf)")


def watched() -> list[L.Callback]:
    return [always_on(show_summary=False), PyTorch(schedule="at 2ba for 2ba")]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_nothing_that_a_training_results_in_changes(tmp_path: Path, name: str) -> None:
    """Losses, weights, checkpoint, random states and metrics are equal while a profiler records.

    ``benchmarks/unchanged.py`` compares the same trainings under every profiler.
    """
    plain = result(KINDS[name], tmp_path / "plain", [])
    assert differences(plain, result(KINDS[name], tmp_path / "watched", watched())) == []


@pytest.mark.parametrize("first", [True, False], ids=["made with us", "made without us"])
def test_checkpoints_load_with_and_without_us(tmp_path: Path, first: bool) -> None:
    """A resumed run ends with the same weights, with or without us before and after."""

    def fit(folder: Path, ours: bool, epochs: int, checkpoint: Path | None = None) -> Any:
        L.seed_everything(5)
        run = trainer(folder, *(watched() if ours else []), max_epochs=epochs)
        model = Model()
        run.fit(model, ckpt_path=checkpoint)
        run.save_checkpoint(folder / "saved.ckpt")
        return [each.detach() for each in model.parameters()]

    fit(tmp_path / "theirs", False, 1)
    expected = fit(tmp_path / "alone", False, 2, tmp_path / "theirs" / "saved.ckpt")
    fit(tmp_path / "first", first, 1)
    found = fit(tmp_path / "second", not first, 2, tmp_path / "first" / "saved.ckpt")
    assert all(map(torch.equal, expected, found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "state",
    [
        "old",
        [1],
        {"progress": 5},
        {"progress": {"stages": None}},
        {"progress": {"stages": {"train": 3}}},
        {"progress": {"validation_seconds": None}},
    ],
    ids=str,
)
def test_a_state_that_is_not_ours_does_not_stop_a_resumed_training(
    tmp_path: Path, state: object
) -> None:
    """A damaged state, or one of another version, gives one warning; Lightning's counts remain."""
    run = trainer(tmp_path, SpeedMonitor(2), Timings())
    run.fit(Small())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    saved["callbacks"] |= dict.fromkeys(saved["callbacks"], state)
    torch.save(saved, tmp_path / "saved.ckpt")
    monitor = SpeedMonitor(2)
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        run = trainer(tmp_path, monitor, Timings(), max_epochs=2)
        run.fit(Small(), ckpt_path=tmp_path / "saved.ckpt")
    assert len(ours(caught)) == isinstance(state, dict)
    assert monitor.state_dict()["progress"]["stages"]["train"]["batch"] == 32
