"""A single rank holds its reports for 0.25 s, by a clock that only the tests advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.clocks import FakeClock
from helpers.small import Records, Small, trainer
from torch import Tensor

from lightning_perf import Window, WindowCallback
from lightning_perf.run import collective


class DeliveryLog(WindowCallback):
    """Records each window's step, and how many batches had started when it was delivered."""

    columns = ("progress/batches",)

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.seen: list[tuple[str, int, int]] = []

    def on_window(self, window: Window) -> dict[str, float]:
        self.seen.append((window.stage, window.step, self.begun))
        return {"batches": window.own("progress/batches")}


class TickingModule(Small):
    """16 batches of 0.1 s each, by the clock of reports."""

    def __init__(
        self, patch: pytest.MonkeyPatch, callback: DeliveryLog, fails_at: int = -1
    ) -> None:
        super().__init__()
        self.callback, self.fails_at = callback, fails_at
        self.clock = FakeClock()
        patch.setattr(collective, "monotonic", self.clock)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise ValueError("the user's")
        self.clock.sleep(0.1)
        self.callback.begun = batch_idx + 1
        return super().training_step(batch, batch_idx)


def windows_of(
    folder: Path, patch: pytest.MonkeyPatch, callback: DeliveryLog, **options: Any
) -> list[tuple[str, int, int]]:
    """The windows of a run, in the order of delivery."""
    trainer(folder, callback, log_every_n_steps=2, **options).fit(TickingModule(patch, callback))
    return callback.seen


def test_reports_are_delivered_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report is not held; others follow at the first report after the hold."""
    records = Records()
    seen = windows_of(tmp_path, monkeypatch, DeliveryLog(), logger=records, limit_val_batches=0)
    assert seen[:5] == [
        ("train", 1, 2),
        ("train", 3, 6),
        ("train", 5, 6),
        ("train", 7, 10),
        ("train", 9, 10),
    ]
    assert records.of("batches")[:8] == [(step, 2.0) for step in range(1, 16, 2)]


def test_reports_are_not_held_if_steps_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step takes longer than the hold, each report is delivered after its own batch."""
    monkeypatch.setattr(collective, "HOLD", 0.2)
    seen = windows_of(tmp_path, monkeypatch, DeliveryLog(), limit_val_batches=0)
    assert seen[:8] == [("train", step, step + 1) for step in range(1, 16, 2)]


def test_held_reports_are_delivered_before_validation_and_epoch_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks that monitor a metric there find the latest value."""
    callback = DeliveryLog()
    missing: list[str] = []

    class Monitors(L.Callback):
        def on_validation_start(self, *_: Any) -> None:
            self.check("validation")

        def on_train_epoch_end(self, *_: Any) -> None:
            self.check("epoch")

        def check(self, when: str) -> None:
            steps = [step for stage, step, _ in callback.seen if stage == "train"]
            if steps and callback.begun - 1 not in steps:
                missing.append(f"{when} after {callback.begun}")

    monkeypatch.setattr(collective, "HOLD", 100.0)
    options = {"val_check_interval": 4, "limit_val_batches": 1}
    trainer(tmp_path, callback, Monitors(), log_every_n_steps=2, **options).fit(
        TickingModule(monkeypatch, callback)
    )
    assert len([stage for stage, *_ in callback.seen if stage == "train"]) >= 8
    assert not missing


def test_held_reports_are_logged_when_training_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If training raises, the held reports are logged before the run ends."""
    records, callback = Records(), DeliveryLog()
    monkeypatch.setattr(collective, "HOLD", 100.0)
    run = trainer(tmp_path, callback, log_every_n_steps=2, logger=records)
    with pytest.raises(ValueError, match="the user's"):
        run.fit(TickingModule(monkeypatch, callback, fails_at=9))
    assert records.of("batches") == [(step, 2.0) for step in (1, 3, 5, 7)]
