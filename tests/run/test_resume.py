"""A run that is killed and resumed makes the same decisions and counts as an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import ForkServer
from helpers.small import Records, Small, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_perf import Cyclic, Every, Fixed, SpeedMonitor, Suite, WindowCallback
from lightning_perf.run.callback import PerfCallback

pytestmark = pytest.mark.slow


class Loader:
    """A resumable loader that continues at its position; batch sizes differ."""

    def __init__(self) -> None:
        self.index = 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[list[Tensor]]:
        for self.index in range(self.index % 9 + 1, 10):  # noqa: B020
            size = 1 + self.index * 7 % 5
            yield [torch.full((size, 8), 0.1), torch.ones(size, 1)]

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class Model(Small):
    def train_dataloader(self) -> Any:
        return Loader()

    def get_num_tokens_in_batch(self, batch: list[Tensor]) -> int:
        return batch[0].numel()


class Log(PerfCallback):
    """Writes each schedule decision to a file, and kills its process after a given batch."""

    def __init__(self, folder: Path, killed_at: int) -> None:
        super().__init__()
        self.folder, self.killed_at = folder, killed_at
        self.schedules = [
            Every("4ba", lasting="2ba"), Every("10sp"), Every("50tok"), Every("0.25dur"),
            Every("1ep"), Fixed(3, 4),
            Cyclic(skip_first=1, wait=1, warmup=1, active=2, repeat=0),
            Cyclic(wait=1, warmup=1, active=2, repeat=1, per_epoch=True),
        ]  # fmt: skip

    def prepare(self, context: Any) -> None:
        for schedule in self.schedules:
            schedule.setup(context.schedule_context)

    def after_batch(self, context: Any, batch: Any) -> None:
        for schedule in self.schedules:
            schedule.observe(context.moment)
        stamp = context.moment.timestamp.state_dict()
        counts = {k: v for k, v in stamp.items() if not k.endswith("_wct")}
        decisions = [schedule(context.moment) for schedule in self.schedules]
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps([counts, decisions]) + "\n")
        if stamp["batch"] == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def two_epochs(folder: Path, killed_at: int, checkpoint: Path | None) -> None:
    """Train two epochs of nine batches of varying size."""
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    suite = Suite([SpeedMonitor(window_size=3), Log(folder, killed_at)])
    run = trainer(folder, suite, saving, enable_checkpointing=True, max_epochs=2)
    run.fit(Model(), ckpt_path=checkpoint)


def train(
    fork_server: ForkServer, folder: Path, killed_at: int = 0, checkpoint: Path | None = None
) -> tuple[int, list]:
    """Train in a child process; return how it ended and what it wrote."""
    ended = fork_server.run(folder, two_epochs, folder, killed_at, checkpoint)
    assert ended.code in (0, -signal.SIGKILL), ended.stderr
    lines = (folder / "log.jsonl").read_text().splitlines()
    return ended.code, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list:
    """The decisions of an uninterrupted run."""
    code, log = train(fork_server, tmp_path_factory.mktemp("whole") / "run")
    assert code == 0
    assert len(log) == 18
    assert all(any(decisions[i] for _, decisions in log) for i in range(8))
    return log


@pytest.mark.parametrize("killed_at", [5, 9, 13], ids=["mid-epoch", "epoch end", "second epoch"])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    fork_server: ForkServer, tmp_path: Path, uninterrupted: list, killed_at: int
) -> None:
    """Counts and schedule decisions after SIGKILL and resume are those of an uninterrupted run."""
    code, before = train(fork_server, tmp_path, killed_at)
    assert code == -signal.SIGKILL
    assert before == uninterrupted[:killed_at]
    # The batch in which it was killed had not been saved, so it runs again.
    (tmp_path / "log.jsonl").unlink()
    code, after = train(fork_server, tmp_path, 0, tmp_path / f"step={killed_at - 1}.ckpt")
    assert code == 0
    assert after == uninterrupted[killed_at - 1 :]


class Logged(Small):
    """Logs by ``self.log`` wherever our callbacks log."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("theirs", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validate/theirs", float(batch_idx))


class Batches(WindowCallback):
    columns = ("progress/batches",)

    def on_window(self, window: Any) -> dict[str, float]:
        return {"ours": window.total("progress/batches")}


@pytest.mark.filterwarnings("ignore:(You're resuming|Checkpoint directory)")
@pytest.mark.parametrize(
    ("saved", "options"),
    [
        ({"every_n_epochs": 1}, {}),
        ({"save_on_train_epoch_end": True}, {"accumulate_grad_batches": 3}),
        ({"every_n_train_steps": 6}, {"val_check_interval": 8}),
        ({"every_n_train_steps": 8}, {"val_check_interval": 8}),
        (
            {"monitor": "validate/theirs", "save_on_train_epoch_end": False},
            {"val_check_interval": 4},
        ),
    ],
)
def test_steps_are_those_of_self_log(
    tmp_path: Path, saved: dict[str, Any], options: dict[str, Any]
) -> None:
    """Metrics of one moment have one step, also in validation and after any checkpoint."""

    def train(epochs: int, checkpoint: Path | None = None) -> None:
        logs, saves = Records(), ModelCheckpoint(tmp_path / "saved", save_top_k=-1, **saved)
        run = trainer(
            tmp_path, Batches(), saves, logger=logs, max_epochs=epochs, limit_val_batches=2,
            enable_checkpointing=True, log_every_n_steps=2, num_sanity_val_steps=0, **options,
        )  # fmt: skip
        run.fit(Logged(), ckpt_path=checkpoint)
        for name in ("", "validate/"):
            ours = dict.fromkeys(step for step, _ in logs.of(f"{name}ours"))
            theirs = [step for step, _ in logs.of(f"{name}theirs")]
            # The end of training is reported, too.
            assert theirs
            assert [step for step in ours if step in theirs] == theirs
            assert len(ours) <= len(theirs) + (not name)

    train(1)
    checkpoints = sorted((tmp_path / "saved").glob("*.ckpt"))
    assert checkpoints
    for checkpoint in checkpoints:
        train(2, checkpoint=checkpoint)
