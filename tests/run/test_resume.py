"""A run that is killed and resumed decides and counts as one that never was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import TESTS

pytestmark = pytest.mark.slow

#: Trains two epochs of nine batches of varying size; writes every decision down as it falls.
SCRIPT = '''
import json, os, sys
from pathlib import Path
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from helpers.small import Small, trainer
from lightning_perf import Cyclic, Every, Fixed, SpeedMonitor, Suite
from lightning_perf.run.callback import PerfCallback

folder, killed_at, checkpoint = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
SCHEDULES = [
    Every("4ba", lasting="2ba"), Every("10sp"), Every("50tok"), Every("0.25dur"), Every("1ep"),
    Fixed(3, 4), Cyclic(skip_first=1, wait=1, warmup=1, active=2, repeat=0),
    Cyclic(wait=1, warmup=1, active=2, repeat=1, per_epoch=True),
]

class Loader:
    """Goes on where it was, like a loader for long runs; each batch has a size of its own."""
    def __init__(self): self.index = 0
    def __len__(self): return 9
    def __iter__(self):
        for self.index in range(self.index % 9 + 1, 10):
            size = 1 + self.index * 7 % 5
            yield [torch.full((size, 8), 0.1), torch.ones(size, 1)]
    def state_dict(self): return {"index": self.index}
    def load_state_dict(self, state): self.index = state["index"]

class Model(Small):
    def train_dataloader(self): return Loader()
    def get_num_tokens_in_batch(self, batch): return batch[0].numel()

class Log(PerfCallback):
    def prepare(self, context):
        for schedule in SCHEDULES: schedule.setup(context.schedule_context)
    def after_batch(self, context, batch):
        for schedule in SCHEDULES: schedule.observe(context.moment)
        stamp = context.moment.timestamp.state_dict()
        counts = {k: v for k, v in stamp.items() if not k.endswith("_wct")}
        decisions = [schedule(context.moment) for schedule in SCHEDULES]
        with open(folder / "log.jsonl", "a") as file:
            file.write(json.dumps([counts, decisions]) + "\\n")
        if stamp["batch"] == killed_at:
            os.kill(os.getpid(), 9)

saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
run = trainer(folder, Suite([SpeedMonitor(window_size=3), Log()]), saving,
              enable_checkpointing=True, max_epochs=2)
run.fit(Model(), ckpt_path=checkpoint)
'''


def train(folder: Path, killed_at: int = 0, checkpoint: str = "") -> tuple[int, list]:
    """Run the script in a process of its own; what it wrote, and how it ended."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(killed_at), checkpoint],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    lines = (folder / "log.jsonl").read_text().splitlines()
    return done.returncode, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list:
    """The decisions of a run that nobody killed."""
    code, log = train(tmp_path_factory.mktemp("whole") / "run")
    assert code == 0
    assert len(log) == 18
    assert all(any(decisions[i] for _, decisions in log) for i in range(8))
    return log


@pytest.mark.parametrize("killed_at", [5, 9, 13], ids=["mid-epoch", "epoch end", "second epoch"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: list, killed_at: int
) -> None:
    """Counts and schedule decisions after SIGKILL and resume equal those of one whole run."""
    code, before = train(tmp_path, killed_at)
    assert code == -signal.SIGKILL
    assert before == uninterrupted[:killed_at]
    # The batch in which it was killed had not been saved: it is done again.
    (tmp_path / "log.jsonl").unlink()
    code, after = train(tmp_path, 0, str(tmp_path / f"step={killed_at - 1}.ckpt"))
    assert code == 0
    assert after == uninterrupted[killed_at - 1 :]
