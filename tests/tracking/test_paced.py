"""Loggers that are slow: called less often by us, and as often as ever by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.clocks import FakeClock
from helpers.small import Records, Small, ours, trainer

from lightning_perf import Diagnosis, Timings, Window, WindowCallback, always_on
from lightning_perf.tracking import paced

STEPS, PER_CALL = 128, 0.5


class Logging(Small):
    """Batches of a second, of which Lightning logs each."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.sleep(1.0)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class SlowRecords(Records):
    """Keeps when each of our calls began."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.began: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" not in metrics:
            self.began.append(self.clock())
        self.clock.sleep(self.seconds)
        super().log_metrics(metrics, step)


class Once(WindowCallback):
    """Logs its key in one window alone."""

    columns = ("progress/batches",)

    def on_window(self, window: Window) -> dict[str, float]:
        return {"once": 1.0} if window.step == 5 else {"step": float(window.step)}


def fit(
    folder: Path, patch: pytest.MonkeyPatch, seconds: float
) -> tuple[SlowRecords, Timings, list[Any]]:
    """Train with a logger that takes so long per call; returns our warnings, too."""
    clock = FakeClock()
    clock.replace_clocks(patch)
    patch.setattr(paced, "perf_counter", clock)
    records, timings = SlowRecords(clock, seconds), Timings()
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 8}
    with pytest.warns() as caught:
        trainer(folder, timings, Once(), logger=records, **options).fit(Logging(clock))
    return records, timings, ours(caught)


def test_our_calls_of_a_slow_logger_take_two_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the first and the last one; Lightning's calls stay, and one warning names it."""
    records, timings, warned = fit(tmp_path, monkeypatch, PER_CALL)
    assert len(records.of("loss")) == STEPS
    first, *between, _ = records.began
    assert between
    for number, began in enumerate(between, 1):
        assert PER_CALL * number <= 0.02 * (began - first)
    rows = {row.name: row for row in timings.table}
    # The last call is after the table.
    assert rows["lightning_perf.SlowRecords.log_metrics"][1:3] == (
        PER_CALL * len(records.began[:-1]), len(records.began[:-1])
    )  # fmt: skip
    theirs = rows["SlowRecords.log_metrics"]
    assert theirs.seconds == PER_CALL * theirs.calls
    assert ["SlowRecords takes 500 ms per call" in text for text in warned] == [True]


def test_what_a_slow_logger_does_not_get_comes_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last value of each key, at the step of the call; nothing waits at the end."""
    records, _, _ = fit(tmp_path, monkeypatch, PER_CALL)
    steps = [(step, row) for step, row in records.rows if "loss" not in row]
    (once,) = (step for step, row in steps if "once" in row)
    assert once == min(step for step, _ in steps if step is not None and step >= 5)
    last, row = steps[-1]
    assert last == row["step"] == STEPS - 1
    assert "timings/forward" in row


def test_a_fast_logger_gets_each_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is merged, and nobody is warned."""
    records, _, warned = fit(tmp_path, monkeypatch, 0.01)
    assert [step for step, _ in records.of("step")] == [*range(5), *range(6, STEPS), STEPS - 1]
    assert not warned


def test_the_advice_on_a_slow_logger_comes_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what Lightning calls, so that the run takes what it promises, or less."""
    clock = FakeClock()
    clock.replace_clocks(monkeypatch)
    monkeypatch.setattr(paced, "perf_counter", clock)

    def seconds_per_batch(every: int) -> tuple[float, Diagnosis]:
        suite, began = always_on(show_summary=False), clock()
        options: dict[str, Any] = {"log_every_n_steps": every, "max_epochs": 8}
        with pytest.warns(match="takes 10.0 s per call"):
            trainer(tmp_path, suite, logger=SlowRecords(clock, 10.0), **options).fit(Logging(clock))
        (diagnosis,) = (part for part in suite.parts if isinstance(part, Diagnosis))
        return (clock() - began) / STEPS, diagnosis

    before, diagnosis = seconds_per_batch(4)
    (found,) = (each for each in diagnosis.verdicts if each.code == "logger-bound")
    assert found.culprit == "SlowRecords.log_metrics"
    after, _ = seconds_per_batch(int(found.evidence["advised_log_every_n_steps"]))
    assert after <= 1.02 * float(found.evidence["advised_step_seconds"]) < before
