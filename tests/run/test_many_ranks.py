"""Several real ranks: their collectives, sums over ranks, and ranks that pause or die."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers.late import Late, Sleeps
from helpers.small import RANKS, Small, trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import (
    Flops,
    PerfWarning,
    SpeedMonitor,
    Suite,
    SystemMetrics,
    Timings,
    WindowCallback,
    always_on,
)
from lightning_perf.run import context

pytestmark = pytest.mark.slow

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast",
    "broadcast_object_list", "barrier", "monitored_barrier", "gather", "gather_object", "reduce",
    "reduce_scatter", "scatter", "all_to_all", "send", "recv", "isend", "irecv",
)  # fmt: skip


class Counted(L.Callback):
    """Counts the collectives of this process from the first batch to the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0:
            for name in COLLECTIVES:
                setattr(dist, name, self.counting(name, getattr(dist, name)))
            # Ours are those of a group that torch does not register.
            gloo: Any = dist.ProcessGroupGloo
            gloo.allgather = self.counting("ours", gloo.allgather)

    def counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return call

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        path = self.folder / f"rank{trainer.global_rank}.json"
        path.write_text(json.dumps(self.calls))


def collectives(folder: Path, batches: int, ours: list[Any], every: int = 1000) -> list[Any]:
    """The collectives of both ranks during a number of batches."""
    folder.mkdir()
    torch.set_num_threads(1)
    options: dict[str, Any] = {**RANKS, "max_steps": batches, "max_epochs": -1}
    trainer(folder, Counted(folder), *ours, log_every_n_steps=every, **options).fit(Small())
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def always() -> list[Any]:
    """All callbacks that watch a whole run."""
    return [Suite([SpeedMonitor(window_size=2), Flops("1000ba"), Timings(), SystemMetrics()])]


def test_nothing_is_exchanged_per_batch(tmp_path: Path) -> None:
    """Sixteen more batches need the same collectives with and without us; a report needs one."""
    few, many = (collectives(tmp_path / f"ours{n}", n, always()) for n in (8, 24))
    plain = [collectives(tmp_path / f"plain{n}", n, []) for n in (8, 24)]
    reported = collectives(tmp_path / "reported", 24, always(), every=4)
    for rank in (0, 1):
        more = Counter(many[rank]) - Counter(few[rank])
        assert more == Counter(plain[1][rank]) - Counter(plain[0][rank])
        assert set(Counter(reported[rank]) - Counter(many[rank])) == {"ours"}
        # One report per four batches; a report wider than one message needs a second one.
        assert reported[rank]["ours"] - many[rank]["ours"] <= 2 * 24 // 4


class Claims(SingleDeviceStrategy):
    """Says that there are two ranks, and gathers from this one alone."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size = 2


@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated")  # Lightning calls it
@pytest.mark.parametrize("grouped", [False, True])
def test_a_strategy_that_does_not_gather_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, grouped: bool
) -> None:
    """A world size of 2 in one process costs the metrics of all ranks, with a warning."""
    runner = trainer(tmp_path, always_on(), strategy="ddp" if grouped else Claims(), max_steps=4)
    if grouped:  # torch has a process group, of one rank
        monkeypatch.setattr(L.Trainer, "world_size", 2)
    said = "all_gather returns nothing of the other ranks"
    with patch.dict(os.environ), pytest.warns(PerfWarning, match=said):  # Lightning changes it
        runner.fit(Small())
    if grouped:
        dist.destroy_process_group()
    assert runner.global_step == 4


class FailsAtEnd(Small):
    """Rank 0 raises after its last report, and its process goes on."""

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            raise RuntimeError("planted")


def end_after_failure(rank: int, folder: Path) -> None:
    """One of two ranks, which catches the exception; writes how long its ``fit`` took to end."""
    # As of a launcher.
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    began, model = [0.0], FailsAtEnd()

    class Ends(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            began[0] = time.monotonic()

    options = {"strategy": "ddp", "devices": 2}
    with suppress(RuntimeError):
        trainer(folder, Ends(), SpeedMonitor(), **options).fit(model)
    (folder / f"rank{rank}").write_text(str(time.monotonic() - began[0]))
    dist.barrier()
    os._exit(0)


def test_a_rank_whose_exception_is_caught_holds_no_other_in_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others would wait for its last message."""
    monkeypatch.setattr(context, "LEAVE_TIMEOUT", 60.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=end_after_failure, args=(rank, tmp_path)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
        assert each.exitcode == 0
    assert [float((tmp_path / f"rank{rank}").read_text()) < 20 for rank in (0, 1)] == [True, True]


class Weights(L.Callback):
    """Writes the losses and final weights of rank 1 to a file, as bits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item().hex())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            weights = [
                value.hex() for p in pl_module.parameters() for value in p.flatten().tolist()
            ]
            self.path.write_text(json.dumps({"losses": self.losses, "weights": weights}))


def test_the_numbers_of_several_ranks_are_unchanged(tmp_path: Path) -> None:
    """Losses and weights are bit-identical with and without us, hook of backward included."""
    torch.set_num_threads(1)
    found = []
    for name, ours in (("ours", always()), ("plain", [])):
        torch.manual_seed(1)
        model, path = Small(), tmp_path / f"{name}.json"
        trainer(tmp_path, *ours, Weights(path), max_epochs=2, **RANKS).fit(model)
        found.append(json.loads(path.read_text()))
    assert len(found[0]["losses"]) == 16
    assert found[0] == found[1]


class Own(WindowCallback):
    """Writes each rank's own values of each window, and the global metrics of rank 0."""

    columns = ("batch/*", "flops/*")

    def __init__(self, folder: Path, watched: list[Any]) -> None:
        super().__init__()
        self.folder, self.watched = folder, watched
        self.rows: list[dict[str, float]] = []

    def on_window(self, window: Any) -> None:
        self.rows.append({name: window.own(name) for name in window.columns})
        if window.at_end:
            found = {key: value for each in self.watched for key, value in each.metrics.items()}
            text = json.dumps({"rows": self.rows, "metrics": found})
            (self.folder / f"rank{window.rank}.json").write_text(text)


class Uneven(Small):
    """Each rank has a loader of its own with another batch size."""

    def train_dataloader(self) -> Any:
        size = 2 + self.global_rank
        x = torch.ones(12 * size, 8)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_global_metrics_are_sums_of_the_ranks_own(tmp_path: Path, ranks: int) -> None:
    """Samples, FLOPs and rates are sums over ranks that have different batch sizes."""
    torch.set_num_threads(1)
    watched = [SpeedMonitor(window_size=100), Flops("1000ba", peak_flops=1e9)]
    options = {"strategy": "ddp_fork", "devices": ranks, "use_distributed_sampler": False}
    own = Own(tmp_path, watched)
    trainer(tmp_path, *watched, own, log_every_n_steps=1000, **options).fit(Uneven())
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    rows, metrics = [each["rows"][-1] for each in found], found[0]["metrics"]
    assert [row["batch/samples"] / row["batch/count"] for row in rows] == [
        2 + r for r in range(ranks)
    ]
    for key, column in (("samples", "batch/samples"), ("flops", "flops/model")):
        rate = sum(row[column] / row["batch/seconds"] for row in rows)
        assert metrics[f"throughput/{key}_per_sec"] == pytest.approx(rate, rel=1e-12)
        assert metrics[f"throughput/device/{key}_per_sec"] == pytest.approx(rate / ranks, rel=1e-12)
    assert metrics["batch_flops"] == sum(
        row["flops/known"] / row["flops/known_batches"] for row in rows
    )
    mfu = sum(row["flops/ideal_seconds"] / row["flops/seconds"] for row in rows) / ranks
    assert metrics["mfu"] == pytest.approx(mfu, rel=1e-12)


class Stops(Late):
    """Rank 1 is stopped (SIGSTOP) for two seconds in one phase of batch 10."""

    def wait(self, phase: str) -> None:
        super().wait(phase)
        now = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if (
            phase == self.phase
            and self.global_rank == 1
            and now == 10
            and not hasattr(self, "done")
        ):
            self.done = True
            wake = f"import os, time; time.sleep(2); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
            child = subprocess.Popen([sys.executable, "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
            child.wait()


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "callback"])
def test_a_paused_rank_loses_nothing(tmp_path: Path, phase: str) -> None:
    """Both ranks train to the end, and every report arrives."""
    torch.set_num_threads(1)
    monitor = SpeedMonitor(window_size=2)
    own = Own(tmp_path, [monitor])
    options: dict[str, Any] = {**RANKS, "max_steps": 24, "max_epochs": -1, "log_every_n_steps": 4}
    model = Stops(set(), phase, 0.0)
    trainer(tmp_path, Sleeps(), monitor, Timings(), own, **options).fit(model)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found["rows"]) >= 6
        assert found["metrics"]["throughput/samples_per_sec"] > 0
        # The pause is within one of the windows.
        assert max(row["batch/seconds"] for row in found["rows"]) > 1.5


class Dies(Late):
    """Rank 1 is killed in one phase."""

    def wait(self, phase: str) -> None:
        super().wait(phase)
        now = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if phase == self.phase and self.global_rank == 1 and now == 20:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_death(folder: Path, phase: str) -> None:
    warnings.simplefilter("ignore")
    logger = CSVLogger(folder, "csv", "0", flush_logs_every_n_steps=1)
    options = {**RANKS, "max_steps": 40, "max_epochs": -1, "log_every_n_steps": 4}
    ours = [SpeedMonitor(window_size=2), Timings(), SystemMetrics()]
    trainer(folder, Sleeps(), *ours, logger=logger, **options).fit(Dies(set(), phase, 0.0))


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "callback"])
def test_a_killed_rank_does_not_hang_the_others(
    fork_server: Any, tmp_path: Path, phase: str
) -> None:
    """The run ends with torch's error, and the metrics logged before are kept."""
    ended = fork_server.run(tmp_path, train_until_death, tmp_path, phase)
    assert ended.code != 0
    assert "SIGKILL" in ended.stderr, ended.stderr[-2000:]
    header, *rows = (tmp_path / "csv/0/metrics.csv").read_text().splitlines()
    assert "throughput/samples_per_sec" in header
    assert len(rows) >= 3
