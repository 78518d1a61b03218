"""Two real processes: one run, sums over ranks, and files of both ranks."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.faults import ForkServer
from helpers.small import FLOPS_PER_SAMPLE, RANKS, Records, Small, ours, trainer
from helpers.torch_traces import traces
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import Flops, GlobalRank, PyTorch, SpeedMonitor
from lightning_perf.background import wait_until
from lightning_perf.run import context
from lightning_perf.run.callback import PerfCallback
from lightning_perf.run.context import current_run

pytestmark = pytest.mark.slow


class Dump(PerfCallback):
    """Writes what the other callbacks reported to one file per rank."""

    def __init__(self, folder: Path, watched: list[Any]) -> None:
        super().__init__()
        self.folder, self.watched = folder, watched

    def close(self, context: Any, reason: str) -> None:
        rates = {type(c).__name__: c.metrics for c in self.watched}
        samples = context.progress.timestamp("train").sample
        seconds, _, timed, *_ = context.batches.totals("train")
        found = {"metrics": rates, "samples": samples, "rate": seconds and timed / seconds}
        (self.folder / f"rank{context.ranks.global_rank}.json").write_text(json.dumps(found))


class Slow(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def test_two_ranks_write_into_one_run(tmp_path: Path, mlflow_database: str) -> None:
    """Both ranks' traces are artifacts of one run, and samples are the sum of both."""
    logger = MLFlowLogger("ranks", run_name="two", tracking_uri=mlflow_database)
    # A window longer than the run is reported once, at its end, with all batches.
    monitor, flops = SpeedMonitor(window_size=100), Flops(peak_flops=1e9)
    profiler = PyTorch(schedule="first 2ba")
    dump = Dump(tmp_path, [monitor, flops])
    # One torch thread, because a fork cannot inherit the threads of an earlier test.
    torch.set_num_threads(1)
    trainer(tmp_path, monitor, flops, profiler, dump, logger=logger, **RANKS).fit(Slow())

    client = MlflowClient(mlflow_database)
    experiment = client.get_experiment_by_name("ranks")
    (run,) = client.search_runs([experiment.experiment_id])
    names = [a.path for a in client.list_artifacts(run.info.run_id, "two/torch_traces")]
    expected = [f"rank{rank}.2.pt.trace.json.gz" for rank in (0, 1)]
    assert names == [f"two/torch_traces/{name}" for name in expected]
    found = traces(tmp_path / "two")
    assert [trace["rank"] for trace in found.values()] == [0, 1]
    assert [trace["distributedInfo"]["rank"] for trace in found.values()] == [0, 1]

    values = run.data.metrics
    assert values["batch_flops"] == 2 * 4 * FLOPS_PER_SAMPLE
    assert values["total_flops"] == 2e9
    ratio = values["throughput/samples_per_sec"] / values["throughput/batches_per_sec"]
    assert ratio == pytest.approx(8)
    assert values["throughput/device/samples_per_sec"] * 2 == values["throughput/samples_per_sec"]
    assert json.loads(run.data.params["lightning_perf"])["world_size"] == 2

    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)]
    assert [rank["samples"] for rank in ranks] == [32, 32]
    own = sum(rank["rate"] for rank in ranks)
    assert values["throughput/samples_per_sec"] == pytest.approx(own)


def test_a_callback_that_fails_on_one_rank_hangs_no_other_rank(tmp_path: Path) -> None:
    """The monitor of rank 1 fails in mid-run; both ranks train to the end."""

    class Fragile(SpeedMonitor):
        def after_batch(self, context: Any, batch: Any) -> None:
            if context.ranks.global_rank == 1 and context.timestamp.batch == 4:
                raise ZeroDivisionError("planted")
            super().after_batch(context, batch)

    class Counting(Flops):
        reports = 0

        def receive(self, window: Any) -> Any:
            found = super().receive(window)
            self.reports += 1
            self.metrics = {**self.metrics, "reports": self.reports}
            return found

    flops = Counting(schedule="2ba", peak_flops=1e9)
    dump = Dump(tmp_path, [flops])
    torch.set_num_threads(1)
    run = trainer(tmp_path, Fragile(window_size=2), flops, dump, **RANKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning is raised in the other process
        run.fit(Slow())
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)]
    assert [rank["samples"] for rank in ranks] == [32, 32]
    # Eight batches per rank: reports at the first, second, fourth, sixth and eighth. The last may
    # be late.
    assert all(rank["metrics"]["Counting"]["reports"] >= 4 for rank in ranks)


def test_a_rank_that_no_longer_answers_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What EarlyStopping monitors is not waited for again in later epochs, after a wait in vain."""

    class Silent(PerfCallback):
        def on_epoch(self, context: Any) -> None:
            context.windows.gatherer.lost = context.ranks.global_rank == 1

    def wait(done: Any, timeout: float) -> None:
        with (tmp_path / f"{torch.distributed.get_rank()}").open("a") as file:
            file.write(f"{timeout} ")
        wait_until(done, timeout / 100)

    monkeypatch.setattr(context, "wait_until", wait)
    torch.set_num_threads(1)
    stop = EarlyStopping("throughput/batches_per_sec", patience=9)
    run = trainer(tmp_path, SpeedMonitor(2), Silent(), stop, max_epochs=3, **RANKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reports are lost in the other process
        run.fit(Small())
    assert (tmp_path / "0").read_text().split() == ["10.0", "0.0", "0.0"]


def test_ranks_leave_fit_together(tmp_path: Path) -> None:
    """Though rank 0 waits for files, which take longer than those of the others."""

    def write() -> None:
        time.sleep(3.0)
        (tmp_path / "file").touch()

    class SlowFile(Small):
        def on_train_end(self) -> None:
            if self.global_rank == 0:
                current_run(self.trainer).file_worker.submit(write, "a slow file")

        def teardown(self, stage: str) -> None:
            (tmp_path / f"{self.global_rank}").write_text(f"{(tmp_path / 'file').exists()}")

    trainer(tmp_path, SpeedMonitor(2), **RANKS).fit(SlowFile())
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]


def test_ranks_may_have_different_shapes(tmp_path: Path, mlflow_database: str) -> None:
    """One odd batch is counted on one rank only, and the reports of both ranks still match."""

    class Ragged(Slow):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            odd = self.trainer.global_rank == 1 and self.trainer.global_step == 3
            return [part[:3] for part in batch] if odd else batch

    logger = MLFlowLogger("ragged", run_name="ragged", tracking_uri=mlflow_database)
    torch.set_num_threads(1)
    flops = Flops(schedule="2ba", peak_flops=1e9)
    trainer(tmp_path, SpeedMonitor(window_size=3), flops, logger=logger, **RANKS).fit(Ragged())
    client = MlflowClient(mlflow_database)
    (run,) = client.search_runs([client.get_experiment_by_name("ragged").experiment_id])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "mfu")]
    assert steps == [3, 5, 7]  # the first two batches are counted
    # The odd batch, which rank 1 counts, is in its windows, too.
    key = "throughput/samples_per_sec"
    assert [p.step for p in client.get_metric_history(run.info.run_id, key)] == [3, 4, 5, 6, 7]


def fit_and_test(folder: Path) -> None:
    """Fit and test on this rank; rank 0 writes how many reports each stage had."""
    warnings.simplefilter("ignore")
    records, model = Records(), Slow()
    run = trainer(folder, SpeedMonitor(window_size=2), devices=2, strategy="ddp", logger=records)
    run.fit(model)
    run.test(model, verbose=False)
    if run.global_rank == 0:
        keys = ["throughput/samples_per_sec", "test/throughput/samples_per_sec"]
        found = {key: len(records.of(key)) for key in keys}
        (folder / "found.json").write_text(json.dumps(found))


def test_a_second_run_in_the_same_processes_is_reported(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Fit and test in the same processes, of a launcher, both have reports of both ranks."""
    fork_server.ranks(tmp_path, 2, fit_and_test, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    # Eight batches per rank and stage, without the first. A window of two is full from the third
    # batch on; then the end of training needs no report of its own, but the end of the test does.
    assert found["throughput/samples_per_sec"] == 6
    assert found["test/throughput/samples_per_sec"] >= 5


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"filename": "{batch}.json"}, ["filename"]),
        ({"filename": "{batch}", "remote_file_name": "{batch}"}, ["filename", "remote_file_name"]),
        ({"filename": "{batch}.json", "folder": "{local_rank:02d}"}, []),
        ({"filename": "{batch}.json", "ranks": [1, 7]}, []),
        ({"filename": "{batch}.json", "schedule": "first 1ba" & GlobalRank(1)}, []),
    ],
    ids=str,
)
def test_a_name_that_several_ranks_share_warns(
    tmp_path: Path, options: dict[str, Any], fields: list[str]
) -> None:
    """Set-up says to add the rank, once for each such name."""
    seen = tmp_path / "warnings"

    class Watched(Small):
        def on_fit_start(self) -> None:
            if self.global_rank == 0:
                seen.write_text("\n".join(ours(caught)))

    profiler = PyTorch(**{"schedule": "first 1ba"} | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, profiler, **RANKS).fit(Watched())
    shared = [line for line in seen.read_text().splitlines() if "add {rank} to it" in line]
    assert [line.partition("(")[2].partition("=")[0] for line in shared] == fields
