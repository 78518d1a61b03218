"""lightning-perf compare: real runs, addresses, exit codes, and runs that cannot be compared."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.clocks import FakeClock, Planned
from helpers.command import call
from helpers.small import Small, trainer
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor

from lightning_perf import Flops, SpeedMonitor, Timings


class Plots(L.Callback):
    """Takes some seconds per batch, by a fake clock."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def on_train_batch_end(self, *args: Any) -> None:
        self.clock.sleep(self.seconds)


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Trains for 64 batches with a callback that takes some seconds per batch."""

    def train(name: str, plots: float = 0.0, **options: Any) -> str:
        model = Planned(monkeypatch, batch_size=1)
        # Before ours: the hooks of each batch are in its window.
        callbacks = [Plots(model.clock, plots), Timings()] if plots else [Timings()]
        trainer(tmp_path / name, *callbacks, **({"log_every_n_steps": 8} | options)).fit(model)
        return str(tmp_path / name)

    return train


def compare(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str], str]:
    """The exit code, the lines of the output without borders, and stderr."""
    capsys.readouterr()  # of the trainings, whose end waits for files on a busy machine
    code, out, err = call(capsys, "compare", *args)
    return code, [" ".join(line.replace("│", " ").split()) for line in out.splitlines()], err


def test_the_slower_phase_and_its_cause_are_named(
    leave: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 s of a callback in batches of 1 s fail in CI, but not in the other direction.

    Without a terminal, as in CI, no name is cut.
    """
    monkeypatch.setenv("COLUMNS", "40")
    slow, fast = leave("slow", 0.5), leave("fast")
    code, lines, err = compare(capsys, slow, fast, "--threshold", "5%")
    assert (code, err) == (1, "")
    assert lines[0] == (
        f"{slow} compared with {fast}: slower: 1.00 s -> 1.50 s per batch, "
        "+50.0% (+50.0% to +50.0%)"
    )
    change = "+50.0% +50.0% to +50.0%"
    assert f"time per batch 1.00 s 1.50 s {change}" in lines
    assert f"callbacks 0 µs 500 ms {change}" in lines
    assert f"Plots.on_train_batch_end 0 µs 500 ms {change}" in lines
    assert not any(line.startswith("forward") for line in lines)
    code, lines, _ = compare(capsys, fast, slow, "--threshold", "0.05")
    assert code == 0
    assert "faster: 1.50 s -> 1.00 s per batch, -33.3%" in lines[0]


def test_json_and_several_baselines(leave: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A run within the spread of its baselines passes."""
    runs = [leave(f"run{plots}", plots) for plots in (0.2, 0.0, 0.1, 0.3)]
    capsys.readouterr()
    code, out, _ = call(capsys, "compare", *runs, "--threshold", "5%", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["slower"], found["threshold"]) == (False, 0.05)
    (step,) = (each for each in found["changes"] if each["kind"] == "step")
    assert step["before"] == pytest.approx(1 + (0 + 0.1 + 0.3) / 3)
    assert step["low"] < 0 < step["high"]
    assert found["baselines"] == runs[1:]


@pytest.mark.slow
def test_runs_in_mlflow_are_found_by_id_and_name(
    leave: Any, mlflow_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They can be compared with a run in a folder."""
    logger = MLFlowLogger("compare", tracking_uri=mlflow_database, run_name="fast-one")
    leave("fast", logger=logger)
    slow = leave("slow", 0.5)
    for name in ("fast-one", str(logger.run_id)):
        code, _, _ = compare(
            capsys, slow, name, "--threshold", "5%", "--tracking-uri", mlflow_database
        )
        assert code == 1


def test_throughput_and_mfu_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Timings the step and rates are compared; another peak gives a note."""
    monkeypatch.setenv("COLUMNS", "200")

    class Sleeps(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(0.002)
            return super().training_step(batch, batch_idx)

    for name, precision, peak in (("a", "32-true", 1e12), ("b", "bf16-mixed", 1.5e12)):
        callbacks = [SpeedMonitor(window_size=4), Flops(peak_flops=peak)]
        options = {"log_every_n_steps": 8, "precision": precision}
        trainer(tmp_path / name, *callbacks, **options).fit(Sleeps(batch_size=1))
    code, lines, _ = compare(capsys, str(tmp_path / "b"), str(tmp_path / "a"))
    assert code == 0
    names = {line.split(" ")[0] for line in lines}
    assert {"time", "batches/s", "samples/s", "MFU"} <= names
    (mfu,) = (line.split(" ")[1] for line in lines if line.startswith("MFU"))
    assert float(mfu.removesuffix("%")) > 0  # also of a model whose MFU is a millionth
    assert "Note: precision differs: 32-true before, bf16-mixed now." in lines
    assert "Note: peak_flops differs: 1 TFLOP/s before, 1.5 TFLOP/s now." in lines


@pytest.mark.parametrize("sizes", [(2, 8), (8, 2)])
def test_changes_are_shares_of_what_they_are_about(
    sizes: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If batch sizes differ: times of themselves, and those of phases of the time per batch."""
    monkeypatch.setenv("COLUMNS", "200")
    for size in sizes:
        callbacks = [Timings(), SpeedMonitor(window_size=4)]
        options = {"log_every_n_steps": 2, "max_epochs": 4}
        trainer(tmp_path / str(size), *callbacks, **options).fit(Small(batch_size=size))
    runs = [str(tmp_path / str(size)) for size in sizes]
    _, lines, _ = compare(capsys, *runs)
    _, out, _ = call(capsys, "compare", *runs, "--json")
    changes = {each["name"]: each for each in json.loads(out)["changes"]}
    whole = {"sample": changes["sample"]["before"], "batch": changes["batch"]["before"]}
    for name, label in (("sample", "time per sample"), ("batch", "time per batch"), *zip(
        ("forward", "backward"), ("forward", "backward"), strict=True
    )):  # fmt: skip
        rows = [line for line in lines if line.startswith(f"{label} ")]
        change = changes[name]["after"] - changes[name]["before"]
        share = change / whole.get(name, whole["batch"])
        # Phases that hardly change have no row.
        assert [f" {share:+.1%} " in row for row in rows] == [True] or abs(share) < 0.01


def test_short_runs_have_no_verdict(leave: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are shown; with a threshold the exit code says that the result is unknown."""
    short, fast = leave("short", max_steps=20), leave("fast")
    code, lines, _ = compare(capsys, short, fast)
    assert code == 0
    assert any(line.startswith(f"Note: {short} has 2 windows after the warm-up") for line in lines)
    code, _, err = compare(capsys, short, fast, "--threshold", "5%")
    assert code == 2
    assert "a run has too few windows" in err


WHOLE = {"whole_run": {"first": 0, "last": 1, "batches": 2}}
GOOD = {**WHOLE, "windows": {"batches": [10] * 6, "timings": {"forward": [1.0] * 6}}}


def written(folder: Path, content: str | dict[str, Any]) -> str:
    """A folder with a summary of some stages, or with the given text."""
    folder.mkdir()
    if isinstance(content, dict):
        summary = {"version": 1, "status": "finished", "run": "x", "stages": content}
        content = json.dumps(summary)
    if content:
        (folder / "summary.json").write_text(content)
    return str(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "there is no"), ("{", "is cut short or no JSON"), ("[]", "is not a summary"),
        ('{"version": 99}', "has version 99"), ({"test": WHOLE}, "is about"),
        ({"train": {**WHOLE, "windows": {"batches": [1, 2], "timings": {"forward": [1.0]}}}},
         "the windows of"),
        ({"train": WHOLE}, "has no windows"), ({}, "has no windows"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_compared_give_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, why: str
) -> None:
    """Missing, truncated, foreign, newer, damaged or empty files, and other stages."""
    bad, good = written(tmp_path / "bad", content), written(tmp_path / "good", {"train": GOOD})
    code, lines, err = compare(capsys, bad, good)
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert err.startswith("lightning-perf compare: ")
    assert why in err


def test_a_baseline_of_zero_seconds_has_no_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison works and shows no share of it."""
    nothing = {**WHOLE, "windows": {"batches": [10] * 6, "timings": {"forward": [0.0] * 6}}}
    good, zero = (
        written(tmp_path / str(n), {"train": each}) for n, each in enumerate((GOOD, nothing))
    )
    assert compare(capsys, good, zero)[0] == 0


@pytest.mark.parametrize("threshold", ["x", "-5%", "nan", "nan%", "5", ""])
def test_a_threshold_is_a_share(capsys: pytest.CaptureFixture[str], threshold: str) -> None:
    """The message has an example."""
    code, _, err = compare(capsys, "a", "b", f"--threshold={threshold}")
    assert code == 2
    assert "such as 5% or 0.05" in err
