"""Ranks that share a batch count its samples, tokens and FLOPs once."""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small import (
    FLOPS_PER_SAMPLE,
    RANKS,
    Dump,
    Small,
    launch,
    samples_per_batch,
    trainer,
)
from helpers.versions import needs_model_parallel
from lightning.pytorch import strategies
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_perf import ConfigError, Flops, SpeedMonitor, Suite
from lightning_perf.run import compat

PEAK = 1e9


class Meshed(Small):
    """Tensor parallel on the tensor dimension of the mesh, sharded over the other ranks."""

    def configure_model(self) -> None:
        if not hasattr(self, "done"):
            self.done = True
            mesh = self.device_mesh
            assert mesh is not None
            if mesh["tensor_parallel"].size() > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.net, mesh["tensor_parallel"], plan)
            if mesh["data_parallel"].size() > 1:
                fully_shard(self.net, mesh=mesh["data_parallel"])


class Declared(Meshed):
    """Declares its FLOPs per batch, on any number of ranks."""

    flops_per_batch = 9000.0


MESHES = ((4, 1), (2, 2), (1, 4))


def train(folder: Path, accelerator: str, meshes: tuple[tuple[int, int], ...]) -> None:
    """Train each model on each mesh, and write what rank 0 reports to a file."""
    warnings.simplefilter("ignore")
    for model, sizes in product((Meshed, Declared), meshes):
        watched = [SpeedMonitor(window_size=2), Flops(peak_flops=PEAK)]
        dump = Dump(folder / f"{model.__name__}.{sizes[0]}.json", watched)
        strategy = strategies.ModelParallelStrategy(*sizes)
        options = {"max_epochs": 3, "devices": sizes[0] * sizes[1], "accelerator": accelerator}
        trainer(folder, *watched, dump, strategy=strategy, **options).fit(model())


def check(folder: Path, model: str, data_parallel: int, ranks: int) -> None:
    """Check that the metrics equal their definitions."""
    found = json.loads((folder / f"{model}.{data_parallel}.json").read_text())
    assert samples_per_batch(found) == pytest.approx(data_parallel * 4)
    flops = Declared.flops_per_batch if model == "Declared" else 4 * FLOPS_PER_SAMPLE
    assert found["batch_flops"] == data_parallel * flops
    assert found["total_flops"] == ranks * PEAK
    by_hand = data_parallel * flops * found["actual_batches_per_sec"] / (ranks * PEAK)
    assert found["mfu"] == pytest.approx(by_hand)
    per_second = found["throughput/flops_per_sec"] / found["throughput/batches_per_sec"]
    assert per_second == pytest.approx(data_parallel * flops)


@needs_model_parallel
def test_a_batch_counts_once_on_every_mesh(fork_server: Any, tmp_path: Path) -> None:
    """Throughput, FLOPs and MFU equal their definitions on 4 x 1, 2 x 2 and 1 x 4 ranks."""
    fork_server.ranks(tmp_path, 4, train, tmp_path, "cpu", MESHES)
    for model, (data_parallel, _) in product(("Meshed", "Declared"), MESHES):
        check(tmp_path, model, data_parallel, ranks=4)


@needs_model_parallel
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_batch_counts_once_on_two_gpus(tmp_path: Path) -> None:
    """The same on two GPUs, with two data shards and with tensors split over both GPUs."""
    script = tmp_path / "train.py"
    script.write_text(
        "from test_shared_batches import *\n"
        f"train(Path({str(tmp_path)!r}), 'gpu', ((2, 1), (1, 2)))\n"
    )
    launch(script)
    for model, data_parallel in product(("Meshed", "Declared"), (1, 2)):
        check(tmp_path, model, data_parallel, ranks=2)


@pytest.mark.slow
def test_a_suite_declares_how_many_ranks_share_a_batch(tmp_path: Path) -> None:
    """If the strategy does not say it: two ranks of DDP that get the same batches."""
    monitor = SpeedMonitor(window_size=2)
    suite = Suite([monitor], data_parallel_size=1)
    options = {**RANKS, "use_distributed_sampler": False}
    dump = Dump(tmp_path / "found.json", [monitor])
    trainer(tmp_path, suite, dump, **options).fit(Small())
    found = json.loads((tmp_path / "found.json").read_text())
    assert samples_per_batch(found) == pytest.approx(4)


def test_a_data_parallel_size_that_does_not_divide_the_ranks_is_refused(tmp_path: Path) -> None:
    """The error at construction or set-up names the field and gives an example."""
    with pytest.raises(ConfigError, match="data_parallel_size"):
        Suite([SpeedMonitor()], data_parallel_size=0)
    with pytest.raises(ConfigError, match="does not divide the world size, 1"):
        trainer(tmp_path, Suite([SpeedMonitor()], data_parallel_size=2)).fit(Small())


def test_an_unknown_strategy_shares_nothing() -> None:
    """Without Lightning's sampler arguments, or with invalid ones, each rank has its own batch."""
    for given in ({}, {"num_replicas": 0}, {"num_replicas": 3}, {"num_replicas": "many"}):
        strategy = SimpleNamespace(distributed_sampler_kwargs=given)
        assert compat.data_parallel_size(SimpleNamespace(strategy=strategy, world_size=4)) == 4
