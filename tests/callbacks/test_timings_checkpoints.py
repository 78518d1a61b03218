"""The table lists the time of writing checkpoints, by the hook that saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.small import Small, trainer
from helpers.windows import rows_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_perf import Timings
from lightning_perf.timing import clock


class Saver(L.Callback):
    """Saves one checkpoint itself."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


def test_writing_a_checkpoint_is_listed_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the time by the hook that saved it, and what modules and callbacks add."""
    now = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])

    class SlowIO(TorchCheckpointIO):
        @override
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            now[0] += 5.0
            super().save_checkpoint(*args, **options)

    class SlowModule(Small):
        @override
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            now[0] += 1.0

    timings, saves = Timings(), ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1)
    run = trainer(tmp_path, timings, Saver(), saves, plugins=[SlowIO()], enable_checkpointing=True)
    run.fit(SlowModule())
    rows = {row.name: (row.seconds, row.calls) for row in timings.table if row.seconds}
    assert rows == {
        "checkpoint writing (ModelCheckpoint.on_train_batch_end)": (10.0, 2),
        "checkpoint writing (Saver.on_train_batch_end)": (5.0, 1),
        "SlowModule.on_save_checkpoint": (3.0, 3),
    }
    assert sum(row["checkpoint"] for _, row in rows_of(timings)) == 18.0
