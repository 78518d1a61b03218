"""Loggers that are slow: called less often by us, and as often as ever by Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
from helpers.clocks import FakeClock
from helpers.small import Records, Small, ours, trainer

from lightning_perf import Diagnosis, Timings, Window, WindowCallback, always_on
from lightning_perf.tracking import paced

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Keeps when each of our calls began; single ones may take longer, by their number."""

    def __init__(
        self, clock: FakeClock, seconds: float, delayed: Mapping[int, float] | None = None
    ) -> None:
        super().__init__()
        self.clock, self.seconds, self.delayed = clock, seconds, dict(delayed or {})
        self.began: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        seconds = self.seconds
        if "loss" not in metrics:
            self.began.append(self.clock())
            seconds = self.delayed.get(len(self.began), seconds)
        self.clock.sleep(seconds)
        super().log_metrics(metrics, step)


class Once(WindowCallback):
    """Logs its key in one window alone."""

    columns = ("progress/batches",)

    def on_window(self, window: Window) -> dict[str, float]:
        return {"once": 1.0} if window.step == 5 else {"step": float(window.step)}


class Closing(L.Callback):
    """Stands for a callback that closes the logger: what comes later is lost."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rows = [*trainer.logger.rows]


def fit(
    folder: Path,
    patch: pytest.MonkeyPatch,
    seconds: float,
    *further: L.Callback,
    delayed: Mapping[int, float] | None = None,
) -> tuple[SlowRecords, Timings, list[Any]]:
    """Train with a logger that takes so long per call; returns our warnings, too."""
    clock = FakeClock()
    clock.replace_clocks(patch)
    patch.setattr(paced, "perf_counter", clock)
    records, timings = SlowRecords(clock, seconds, delayed), Timings()
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 8}
    with pytest.warns() as caught:
        trainer(folder, timings, Once(), *further, logger=records, **options).fit(Logging(clock))
    return records, timings, ours(caught)


def test_our_calls_of_a_slow_logger_take_two_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the first two and the last; Lightning's calls stay, and one warning names it."""
    records, timings, warned = fit(tmp_path, monkeypatch, PER_CALL)
    assert len(records.of("loss")) == STEPS
    _, second, *between, _ = records.began
    assert between
    for number, began in enumerate(between, 1):
        assert PER_CALL * number <= 0.02 * (began - second)
    rows = {row.name: row for row in timings.table}
    calls = len(records.began)
    assert rows["lightning_perf.SlowRecords.log_metrics"][1:3] == (PER_CALL * calls, calls)
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


def test_a_callback_that_closes_a_slow_logger_after_training_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is passed on before the ``on_train_end`` of callbacks after ours."""
    closing = Closing()
    records, _, _ = fit(tmp_path, monkeypatch, PER_CALL, closing)
    assert closing.rows == records.rows
    assert records.of("step")[-1] == (STEPS - 1, STEPS - 1)


@pytest.mark.parametrize("delayed", [{}, {1: 3.0}, {1: 0.3}, {10: 2.0}, {1: 3.0, 10: 2.0}])
def test_a_fast_logger_gets_each_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delayed: dict[int, float]
) -> None:
    """Nothing is merged, and nobody is warned, although single calls are slow."""
    records, _, warned = fit(tmp_path, monkeypatch, 0.01, delayed=delayed)
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
