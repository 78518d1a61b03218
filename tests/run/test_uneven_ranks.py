"""Ranks with different numbers of batches, and ranks whose wall clock jumps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.servers import free_port
from helpers.small import RANKS, Small, trainer
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import Flops, SpeedMonitor, SystemMetrics, Timings, WindowCallback

pytestmark = pytest.mark.slow

OWN_LOADERS = RANKS | {"use_distributed_sampler": False}


class Batches(WindowCallback):
    """Writes the batches and samples of all ranks in each window, as received by each rank."""

    columns = ("progress/batches", "batch/samples", "batch/count", "batch/seconds")

    def __init__(self, folder: Path, *watched: Any) -> None:
        super().__init__()
        self.folder, self.watched = folder, watched
        self.windows: list[tuple[str, list[float]]] = []

    def on_window(self, window: Any) -> None:
        self.windows.append((window.stage, window["progress/batches"].tolist()))
        metrics = {key: value for each in self.watched for key, value in each.metrics.items()}
        found = {
            "windows": self.windows, "metrics": metrics, "at_end": window.at_end,
            "samples": [float(row[window.columns["batch/samples"]]) for row in window.totals],
            "own": {name: window.since_start(name) for name in window.columns},
        }  # fmt: skip
        (self.folder / f"rank{window.rank}.json").write_text(json.dumps(found))


def left(folder: Path) -> list[dict[str, Any]]:
    """What both ranks received."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


class OtherLengths(Small):
    """Each rank has its own loader with another number of batches, of four samples each."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lengths = lengths

    def own(self) -> Any:
        x = torch.ones(4 * self.lengths[self.global_rank], 8)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    val_dataloader = test_dataloader = own


def always(*more: Any) -> list[Any]:
    """Callbacks with different report schedules, so that messages differ."""
    return [SpeedMonitor(window_size=2), Flops("3ba", 1e9), Timings(), SystemMetrics(), *more]


@pytest.mark.parametrize("lengths", [(3, 7), (7, 3)])
def test_validation_may_be_longer_on_one_rank(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """The longer rank's batches are counted, and reports of training continue as before."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        **RANKS, "limit_val_batches": 1.0, "max_epochs": 2, "log_every_n_steps": 4,
        "num_sanity_val_steps": 0, "use_distributed_sampler": False, "limit_train_batches": 8,
    }  # fmt: skip
    trainer(tmp_path, *always(Batches(tmp_path)), **options).fit(OtherLengths(*lengths))
    epoch = [["train", [4, 4]], ["train", [4, 4]], ["validate", [*lengths]]]
    # The report of an epoch's last batch arrives with the validation's.
    for found in left(tmp_path):
        windows = found["windows"]
        assert sorted(windows[:-1]) == sorted(epoch * 2)
        assert windows[-1] == ["train", [0, 0]]


@pytest.mark.parametrize("lengths", [(5, 12), (12, 5)])
def test_a_test_may_be_longer_on_one_rank(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """The rank that has finished answers the other's reports; at the end both have all batches."""
    torch.set_num_threads(1)
    parts = always(Batches(tmp_path))
    trainer(tmp_path, *parts, log_every_n_steps=2, **OWN_LOADERS).test(
        OtherLengths(*lengths), verbose=False
    )
    short = lengths.index(min(lengths))
    for rank, found in enumerate(left(tmp_path)):
        windows = [batches for _, batches in found["windows"]]
        assert windows[:2] == [[2, 2], [2, 2]]
        assert [sum(each) for each in zip(*windows, strict=True)] == [*lengths]
        assert len(windows) == (3 if rank == short else 7)
        # The first batch has no rate.
        assert found["samples"] == [4 * (length - 1) for length in lengths]


class Joined(OtherLengths):
    """Trains with torch's `Join`: a rank without batches joins the others' all-reduce."""

    train_dataloader = OtherLengths.own

    def on_train_start(self) -> None:
        # Lightning's own collective at the start of each batch would wait for the other rank.
        self._join = Join([self.trainer.model])
        self._join.__enter__()

    def on_train_end(self) -> None:
        self._join.__exit__(None, None, None)


@pytest.mark.parametrize("lengths", [(5, 14), (14, 5)])
def test_ranks_with_different_numbers_of_batches_train_with_join(
    tmp_path: Path, lengths: tuple[int, int]
) -> None:
    """The metrics are sums over the batches of both ranks, under the usual keys."""
    torch.set_num_threads(1)
    monitor = SpeedMonitor(window_size=100)
    run = trainer(
        tmp_path, monitor, *always()[1:], Batches(tmp_path, monitor),
        log_every_n_steps=4, **OWN_LOADERS,
    )  # fmt: skip
    run.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    run.fit(Joined(*lengths))
    ranks = left(tmp_path)
    for found in ranks:
        batches = zip(*(each for _, each in found["windows"]), strict=True)
        assert [sum(each) for each in batches] == [*lengths]
        assert found["samples"] == [4 * (length - 1) for length in lengths]
    own = [each["own"] for each in ranks]
    rate = sum(each["batch/samples"] / each["batch/seconds"] for each in own)
    assert ranks[0]["metrics"]["throughput/samples_per_sec"] == pytest.approx(rate, rel=1e-12)


#: Each rank trains on its own number of batches.
ENDS = """
import sys
from pathlib import Path

from lightning_perf import Timings
from lightning_perf.run import context
from run.test_uneven_ranks import OtherLengths, trainer

context.GATHER_TIMEOUT = 1.0  # as after 10 seconds
folder, *lengths = sys.argv[1:]
OtherLengths.train_dataloader = OtherLengths.own
options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
trainer(Path(folder), Timings(), **options).fit(OtherLengths(*map(int, lengths)))
"""


@pytest.mark.parametrize("lengths", [(6, 12), (12, 6)])
def test_a_process_that_others_do_not_answer_ends(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """Then the other rank, which waits for it in backward, fails as without us."""
    (script := tmp_path / "train.py").write_text(ENDS)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    command = [sys.executable, str(script), str(tmp_path), *map(str, lengths)]
    # Lightning kills the whole group of processes.
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True, check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "another rank did not answer at the end of the run" in done.stderr
    assert done.returncode == lengths.index(min(lengths)), done.stderr[-2000:]


#: Both ranks train, destroy all process groups, and train again.
AGAIN = """
import sys, time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning_perf import Timings
from run.test_uneven_ranks import Small, trainer

for part in ("first", "second"):
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20))
    trainer(Path(sys.argv[1], part), Timings(), strategy=strategy, devices=2).fit(Small())
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
"""


def test_the_user_may_destroy_all_groups_between_fits(tmp_path: Path) -> None:
    """The store of the first process group ends with it, so that the second one finds its own."""
    (script := tmp_path / "train.py").write_text(AGAIN)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    port = str(free_port())
    common = {"PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True,
            env=os.environ | common | {"NODE_RANK": "0", "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
        )
        for rank in "01"
    ]  # fmt: skip
    errors = [each.communicate(timeout=120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], "".join(errors)[-3000:]


class Jumps(L.Callback):
    """Sets one rank's wall clock forward by a day, then back by two."""

    def __init__(self, rank: int) -> None:
        self.rank, self.offset = rank, 0.0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step in (3, 6):
            self.offset += 86400.0 if trainer.global_step == 3 else -172800.0
            true, shift = time.time, self.offset
            time.time = lambda: true() + shift
            time.time_ns = lambda: int(1e9 * time.time())


class Watch(Batches):
    """Measures the duration of the run with a monotonic clock."""

    def prepare(self, context: Any) -> None:
        super().prepare(context)
        self.began = time.monotonic()

    def on_window(self, window: Any) -> None:
        super().on_window(window)
        assert window["batch/seconds"].min() >= 0
        assert window.own("batch/seconds") <= time.monotonic() - self.began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wall_clock_that_jumps_changes_no_rate(tmp_path: Path, rank: int) -> None:
    """All times of a rank come from monotonic clocks, and only these are exchanged."""
    torch.set_num_threads(1)
    parts = always()
    watch = Watch(tmp_path, *parts)
    trainer(tmp_path, Jumps(rank), *parts, watch, log_every_n_steps=2, **RANKS).fit(Small())
    for found in left(tmp_path):
        assert found["at_end"]
        assert [batches for _, batches in found["windows"]] == [[2, 2]] * 4 + [[0, 0]]
        metrics = found["metrics"]
        assert 0 < metrics["throughput/samples_per_sec"] < 1e6
        assert all(value < 3600 for key, value in metrics.items() if key.startswith("timings/"))
        assert 0 < metrics["time/total"] < 1
