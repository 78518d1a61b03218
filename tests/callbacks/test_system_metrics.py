"""SystemMetrics in real trainings: keys, times of reports, ranks, nodes, GPUs, memory."""

from __future__ import annotations

import json
import pickle
import threading
import time
import warnings
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers.fake_nvml import FakeGpu, FakeNvml, install
from helpers.small import Records, Small, ours, trainer
from helpers.windows import window_of
from lightning.pytorch.loggers import MLFlowLogger

from lightning_perf import ConfigError, PerfWarning, SpeedMonitor, Suite, SystemMetrics, Window
from lightning_perf.background import wait_until
from lightning_perf.callbacks import system_metrics as module
from lightning_perf.callbacks.system_metrics import _memory
from lightning_perf.core.progress import Ranks
from lightning_perf.run import signals
from lightning_perf.run.callback import PerfCallback
from lightning_perf.system import HOST, Sampler
from lightning_perf.system.gpus import GPU

#: A short interval. What is not sampled in time is sampled at the end of the run.
FAST = 0.1
MEMORY = {"memory/rss", "memory/peak_rss"}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run waits for a sample, however busy the machine is."""
    monkeypatch.setattr(module, "PATIENCE", 60.0)


class Slow(Small):
    def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def sampling() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "lightning_perf sys" in thread.name]


def settled() -> bool:
    """Whether no sampling thread is left, some time after sampling was stopped."""
    until = time.monotonic() + 60
    while sampling() and time.monotonic() < until:
        time.sleep(0.01)
    return not sampling()


def test_a_training_reports_the_machine_and_its_memory(tmp_path: Path, records: Records) -> None:
    """Determined's metrics and ours, for node 0, and no GPU metrics if there is no GPU."""
    trainer(tmp_path, SystemMetrics(FAST), logger=records).fit(Slow())
    found = records.keys - {"epoch"}
    host = {f"system/node_0/{name}" for name in HOST}
    # A sandbox may show no disk and no network.
    optional = {key for key in host if "/disk_" in key or "/net_" in key}
    assert host - optional | MEMORY <= found <= host | MEMORY
    assert settled()


def test_a_run_too_short_to_be_sampled_reports_at_its_end(tmp_path: Path, records: Records) -> None:
    """With a sample every hour, each metric has one point: its average over the run."""
    metrics = SystemMetrics("1h")
    trainer(tmp_path, metrics, logger=records, log_every_n_steps=4).fit(Slow())
    assert [step for step, _ in records.of("system/node_0/free_memory")] == [15]
    assert metrics.metrics["system/node_0/free_memory"] > 0


def test_reports_follow_lightning_s_and_repeat_no_sample(tmp_path: Path, records: Records) -> None:
    """A report without a new sample has only memory; nested validation has no report of its own."""
    options = {"log_every_n_steps": 4, "limit_val_batches": 2, "val_check_interval": 8}
    trainer(tmp_path, SystemMetrics("1h"), logger=records, **options).fit(Slow())
    assert [step for step, _ in records.of("memory/rss")] == [3, 7, 11, 15]
    assert len(records.of("system/node_0/free_memory")) == 1


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_have_the_same_keys(tmp_path: Path, records: Records, stage: str) -> None:
    """The keys do not depend on the stage, so that MLflow shows them in one tab."""
    a_trainer = trainer(tmp_path, SystemMetrics(), logger=records, limit_val_batches=4)
    getattr(a_trainer, stage)(Small(), verbose=False) if stage != "predict" else (
        a_trainer.predict(Small())
    )
    assert "system/node_0/free_memory" in records.keys


def test_it_works_in_a_suite_and_trains_again(tmp_path: Path, records: Records) -> None:
    """It works beside another callback and twice with one Trainer; its thread ends each time."""
    a_trainer = trainer(tmp_path, Suite([SpeedMonitor(4), SystemMetrics()]), logger=records)
    for _ in range(2):
        records.rows.clear()
        a_trainer.fit(Small())
        assert settled()
        assert {"system/node_0/free_memory", "throughput/batches_per_sec"} <= records.keys
        a_trainer.fit_loop.max_epochs += 1


def test_the_thread_ends_with_a_run_that_fails(tmp_path: Path) -> None:
    """An exception of the user's code also ends the sampling."""

    class Fails(Small):
        def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
            assert sampling()
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        trainer(tmp_path, SystemMetrics()).fit(Fails())
    assert settled()


@pytest.mark.parametrize(
    "interval",
    [
        "10ba",
        "soon",
        "",
        "0.5dur",
        "0s",
        "0.05sec",
        "99ms",
        "-1s",
        "1.s.",
        "1m30s",
        0.05,
        0,
        -1,
        True,
        None,
        float("nan"),
    ],
)
def test_an_invalid_interval_is_refused(interval: Any) -> None:
    """The message says what to write instead."""
    with pytest.raises(ConfigError, match=r"^interval=.*Try interval='10s', '500ms', or 0.5"):
        SystemMetrics(interval)


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [
        ("1s", 1), ("1sec", 1), ("1m", 60), (1, 1), (0.1, 0.1), (2.5, 2.5),
        ("0.5s", 0.5), (".5sec", 0.5), ("500ms", 0.5), ("100ms", 0.1), ("0.1S", 0.1),
        ("10 seconds", 10), ("1min", 60), ("0.5 s", 0.5), ("1.5 Minutes", 90),
        (np.float32(2.5), 2.5),
    ],
)  # fmt: skip
def test_intervals_are_times_or_seconds(interval: Any, seconds: float) -> None:
    """Seconds may be fractions, down to the minimum; spawned ranks get the same interval."""
    again = pickle.loads(pickle.dumps(SystemMetrics(interval)))
    assert (again.interval, again._seconds) == (interval, seconds)


@pytest.mark.slow
def test_mlflow_has_it_in_its_system_tab(tmp_path: Path, mlflow_database: str) -> None:
    """MLflow accepts its keys as system metrics."""
    from mlflow import MlflowClient  # not where gpu tests run

    logger = MLFlowLogger("system", tracking_uri=mlflow_database)
    trainer(tmp_path, SystemMetrics(), logger=logger).fit(Small())
    run = MlflowClient(mlflow_database).get_run(logger.run_id)
    assert run.data.metrics["system/node_0/free_memory"] > 0
    assert '"SystemMetrics": {}' in run.data.params["lightning_perf"]


# -- GPUs -------------------------------------------------------------------------------------


def test_gpus_of_a_node_are_averaged(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU has its number from nvidia-smi; the utilization of the first rises in mid-run."""
    one, two = FakeGpu("GPU-a", util=0), FakeGpu("GPU-b", activity=(90.0, 60.0, 30.0))
    nvml = install(monkeypatch, one, two)

    class Rises(Small):
        def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
            one.values["util"] = 100 if batch_idx >= 8 else 0
            if batch_idx in (7, 8):  # both values are sampled
                seen = two.readings
                wait_until(lambda: two.readings > seen + 2, 60.0)
            return super().training_step(batch, batch_idx)

    trainer(tmp_path, SystemMetrics(FAST), logger=records, log_every_n_steps=99).fit(Rises())
    ((_, use),) = records.of("system/node_0/gpu_0/gpu_util")
    assert 0 < use < 100
    for name in GPU:
        assert len(records.of(f"system/node_0/gpu_1/{name}")) == 1
    assert settled()
    assert nvml.open == 0


@pytest.mark.slow
def test_a_lost_gpu_warns_once_and_the_others_continue(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-run its metrics end; those of the other GPU and of the host continue."""
    one, two = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    install(monkeypatch, one, two)

    class Loses(Small):
        def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
            if batch_idx == 8:
                one.values["memory"] = FakeNvml.NVMLError_GpuIsLost("fell off the bus")
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    with pytest.warns(PerfWarning) as caught:
        trainer(tmp_path, SystemMetrics(FAST), logger=records).fit(Loses())
    assert ours(caught) == [
        "lightning_perf: gpu_0 is no longer measured (NVMLError_GpuIsLost: fell off the bus)."
    ]
    lost = max(step for step, _ in records.of("system/node_0/gpu_0/gpu_util"))
    for others in ("gpu_1/gpu_util", "free_memory"):
        assert max(step for step, _ in records.of(f"system/node_0/{others}")) > lost


def test_cuda_memory_has_composer_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of the allocator, in gigabytes."""
    kinds = "allocated_bytes", "active_bytes", "inactive_split_bytes", "reserved_bytes"
    stats = {
        kind: {"all": {"current": number * 10**9, "peak": number * 10**10 + 12345}}
        for number, kind in enumerate(kinds, start=1)
    }
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: {**stats, "num_alloc_retries": 3}
    )
    found = signals.cuda_memory(torch.device("cuda", 0))
    names = "allocated", "active", "inactive", "reserved"
    assert found == {
        **{f"current_{name}_mem": float(number) for number, name in enumerate(names, start=1)},
        **{f"peak_{name}_mem": 10.0 * number for number, name in enumerate(names, start=1)},
        "alloc_retries": 3,
    }
    assert set(found) == set(signals.CUDA_MEMORY)
    assert signals.cuda_memory(torch.device("cpu")) == {}


def test_on_cuda_the_gpus_are_those_visible_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are matched by UUID: here CUDA device 0 is GPU 1 of nvidia-smi."""
    install(monkeypatch, FakeGpu("GPU-a-1"), FakeGpu("GPU-b-2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(uuid="b-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    sampler = signals.node_sampler(SimpleNamespace(strategy=strategy), Ranks(), {7})
    assert sampler is not None
    sampler.subscribe("me", 60.0)
    assert sampler.refresh(10)
    sampler.unsubscribe("me")
    gpus = {name.partition("/")[0] for name in sampler.latest if name.startswith("gpu_")}
    assert gpus == {"gpu_1"}


def test_an_allocator_without_statistics_has_no_memory_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's pluggable allocator has no statistics: one warning, and no other metric is lost."""

    def refuse(device: torch.device) -> dict[str, float]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(signals, "cuda_memory", refuse)
    signal = signals.MemorySignal(torch.device("cuda", 0), None, 3)
    with pytest.warns(PerfWarning) as caught:
        first, second = signal.totals("train"), signal.totals("train")
    assert len(ours(caught)) == 1
    assert "allocator is not measured" in ours(caught)[0]
    assert len(first) == len(second) == len(signal.columns)
    assert first[0] == 3


ALLOCATOR = [f"memory/{name}" for name in ("rss", "peak_rss", *signals.CUDA_MEMORY)]


def test_memory_of_several_ranks_is_rank_0_s_and_the_maximum() -> None:
    """The rank that runs out of memory first may be any; host memory is per node, not per rank."""
    one, other = [float(n) for n in range(11)], [nan, nan, *(float(20 - n) for n in range(2, 11))]
    found = _memory(
        window_of(
            dict(zip(ALLOCATOR, map(list, zip(one, other, [nan] * 11, strict=True)), strict=True))
        )
    )
    assert found["memory/current_allocated_mem"] == 2.0
    assert found["memory/max_over_ranks/current_allocated_mem"] == 18.0
    assert found["memory/alloc_retries"] == 10.0
    assert found["memory/rss"] == 0.0
    assert not [key for key in found if "max_over_ranks" in key and "rss" in key]
    alone = _memory(window_of({name: [value] for name, value in zip(ALLOCATOR, one, strict=True)}))
    assert not [key for key in alone if "max_over_ranks" in key]


def nodes_window(nodes: int, gpus: int) -> Window:
    """Nodes of four ranks, of which the first samples: node n is at n %, its GPU g at n + g %."""
    ranks = range(4 * nodes)
    first = [float(rank % 4 == 0) for rank in ranks]
    columns = {
        "memory/node_rank": [float(rank // 4) for rank in ranks],
        "memory/pid": [float(rank) for rank in ranks],
        "system/cpu_util_simple": [
            2.0 * each * (r // 4) for r, each in zip(ranks, first, strict=True)
        ],
        "system/cpu_util_simple/seconds": [2.0 * each for each in first],
    }
    for slot in range(gpus):
        key = f"system/gpu_slot_{slot}"
        columns[key] = [float(slot) if each else -1.0 for each in first]
        for name in GPU:
            columns[f"{key}/{name}"] = [
                3.0 * each * (r // 4 + slot) for r, each in zip(ranks, first, strict=True)
            ]
        columns[f"{key}/seconds"] = [3.0 * each for each in first]
    return window_of(columns)


def test_up_to_eight_nodes_have_their_own_keys() -> None:
    """The values of the sampling rank are used, whatever the others send."""
    found = SystemMetrics().on_window(nodes_window(8, gpus=2))
    assert found["system/node_5/cpu_util_simple"] == 5.0
    assert found["system/node_5/gpu_1/gpu_util"] == 6.0
    assert len(found) == 8 * (1 + 2 * len(GPU))


def test_readings_without_duration_are_left_out() -> None:
    """A sensor that was read between its two columns has no mean, and causes no warning."""
    columns = {"memory/node_rank": [0.0], "memory/pid": [7.0]}
    columns |= {"system/cpu_util_simple": [2.0], "system/cpu_util_simple/seconds": [0.0]}
    assert not SystemMetrics().on_window(window_of(columns))


def test_of_many_nodes_the_spread_is_logged() -> None:
    """The nodes with minimum and maximum are named, and the number of keys is constant."""
    found = SystemMetrics().on_window(nodes_window(101, gpus=2))
    key = "system/nodes/cpu_util_simple"
    assert [found[f"{key}/{name}"] for name in ("min", "median", "max")] == [0.0, 50.0, 100.0]
    assert (found[f"{key}/min_node"], found[f"{key}/max_node"]) == (0, 100)
    key = "system/gpus/gpu_power"
    assert [found[f"{key}/{name}"] for name in ("min", "median", "max")] == [0.0, 50.5, 101.0]
    assert (found[f"{key}/max_node"], found[f"{key}/max_gpu"]) == (100, 1)
    assert found.keys() == SystemMetrics().on_window(nodes_window(9, gpus=1)).keys()


def test_gpus_share_a_column_of_seconds() -> None:
    """A sensor that stops early is left out, and the mean of the others is right."""
    sampler = Sampler()
    signal = signals.NodeSignal(sampler, slots=2)
    sampler.receive({f"gpu_3/{name}": 10.0 for name in GPU}, 2.0)
    sampler.receive({f"gpu_3/{name}": 40.0 for name in GPU if name != "gpu_power"}, 1.0)
    found = dict(zip(signal.columns, signal.totals("train"), strict=True))
    assert found["system/gpu_slot_0"] == 3
    assert found["system/gpu_slot_0/gpu_util"] / found["system/gpu_slot_0/seconds"] == 20.0
    assert isnan(found["system/gpu_slot_0/gpu_power"])
    assert (found["system/gpu_slot_1"], found["system/gpu_slot_1/seconds"]) == (-1.0, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_has_all_metrics(tmp_path: Path, records: Records) -> None:
    """Utilization, memory and power of the GPU in use, and the memory of the allocator."""
    options = {"accelerator": "gpu", "logger": records}
    trainer(tmp_path, SystemMetrics(FAST), **options).fit(Slow())
    keys = {key.partition("/gpu_")[2].partition("/")[2] for key in records.keys}
    assert {"gpu_util", "gpu_free_memory", "gpu_power", "gpu_sm_clock"} <= keys
    assert {f"memory/{name}" for name in signals.CUDA_MEMORY} <= records.keys
    assert all(value > 0 for _, value in records.of("memory/peak_allocated_mem"))


# -- several processes ------------------------------------------------------------------------


class Dump(PerfCallback):
    """Writes what was reported, and which threads sample, to one file per rank."""

    def __init__(self, folder: Path, watched: SystemMetrics) -> None:
        super().__init__()
        self.folder, self.watched = folder, watched
        self.threads: list[str] = []

    def after_batch(self, context: Any, batch: Any) -> None:
        self.threads = sampling()
        self.known = len(context.sampler.processes) if context.sampler else 0

    def close(self, context: Any, reason: str) -> None:
        found = {
            "threads": len(self.threads),
            "known": self.known,
            "rss": psutil.Process().memory_info().rss,
        }
        rank = context.ranks.global_rank
        (self.folder / f"rank{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_one_rank_of_a_node_samples_for_all(tmp_path: Path, mlflow_database: str) -> None:
    """Of two forked ranks the first has the thread, and it counts the processes of both."""
    from mlflow import MlflowClient  # not where gpu tests run

    metrics = SystemMetrics(FAST)
    logger = MLFlowLogger("system-ranks", run_name="two", tracking_uri=mlflow_database)
    # One torch thread, because a fork cannot inherit the threads of an earlier test.
    torch.set_num_threads(1)
    options = {"strategy": "ddp_fork", "devices": 2, "logger": logger, "max_epochs": 4}
    trainer(tmp_path, metrics, Dump(tmp_path, metrics), **options).fit(Slow())
    first, second = (json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1))
    assert (first["threads"], second["threads"]) == (1, 0)
    assert (first["known"], second["known"]) == (2, 0)
    client = MlflowClient(mlflow_database)
    experiment = client.get_experiment_by_name("system-ranks")
    (run,) = client.search_runs([experiment.experiment_id])
    system = {key for key in run.data.metrics if key.startswith("system/")}
    assert {key.split("/")[1] for key in system} == {"node_0"}
    history = client.get_metric_history(run.info.run_id, "system/node_0/process_rss")
    assert history[-1].value == pytest.approx(first["rss"] + second["rss"], rel=0.2)


def train_on_nodes(folder: Path) -> None:
    """Train in this process, and write the keys that it reports to a file."""
    warnings.simplefilter("ignore")
    module.PATIENCE = 60.0
    metrics = SystemMetrics()
    options = {"strategy": "ddp", "num_nodes": 2, "log_every_n_steps": 99, "logger": Records()}
    run = trainer(folder, metrics, **options)
    run.fit(Slow())
    (folder / f"keys{run.global_rank}.json").write_text(json.dumps([*metrics.metrics]))


def test_each_node_reports_under_its_number(fork_server: Any, tmp_path: Path) -> None:
    """With two nodes of one rank each, rank 0 logs the metrics of both."""
    fork_server.ranks(tmp_path, 2, train_on_nodes, tmp_path, nodes=2)
    keys = json.loads((tmp_path / "keys0.json").read_text())
    for number in (0, 1):
        assert f"system/node_{number}/free_memory" in keys
        assert f"system/node_{number}/cpu_util_simple" in keys
