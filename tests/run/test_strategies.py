"""Every way in which Lightning starts several ranks on a CPU, with the always-on callbacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import FLOPS_PER_SAMPLE, Dump, Small, samples_per_batch, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_perf import Flops, SpeedMonitor, Suite, SystemMetrics, Timings

pytestmark = pytest.mark.slow


def watched() -> list[Any]:
    """Callbacks that report once, at the end, over the whole run."""
    return [
        SpeedMonitor(window_size=100),
        Flops("1000ba", peak_flops=1e9),
        Timings(),
        SystemMetrics(),
    ]


def train(folder: Path, **options: Any) -> None:
    """A short training on the ranks given by the options."""
    torch.set_num_threads(1)
    callbacks = watched()
    dump = Dump(folder / "found.json", callbacks)
    trainer(folder, Suite(callbacks), dump, log_every_n_steps=1000, **options).fit(Small())


SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from test_strategies import train
if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""


def start(folder: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a process that trains and launches its ranks as the strategy does."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    known = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), json.dumps(options)],
        env={**known, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(folder: Path, ranks: int, nodes: int = 1) -> None:
    """Check that the reports cover all ranks."""
    found = json.loads((folder / "found.json").read_text())
    assert samples_per_batch(found) == pytest.approx(ranks * 4)
    assert found["total_flops"] == ranks * 1e9
    if ranks > 1:
        assert found["timings/forward/max"] >= found["timings/forward/min"] > 0
        assert found["straggler/share"] == 0.0 or found["straggler/rank"] >= -1
    for node in range(nodes):
        assert f"system/node_{node}/free_memory" in found
    assert f"system/node_{nodes}/free_memory" not in found


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_every_launcher_of_lightning_works(fork_server: Any, tmp_path: Path, strategy: str) -> None:
    """Callbacks work when pickled, forked, or constructed again by a script that is run again."""
    options = {"strategy": strategy, "devices": 2}
    if strategy in ("ddp_fork", "ddp_notebook"):
        ended = fork_server.run(tmp_path / "process", train, tmp_path, **options)
        assert ended.code == 0, ended.stderr[-3000:]
    else:
        process = start(tmp_path, options)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    check(tmp_path, ranks=2)


def train_on_nodes(folder: Path) -> None:
    """Train in this process, which is one of four ranks."""
    warnings.simplefilter("ignore")
    train(folder, strategy="ddp", devices=2, num_nodes=2)


def test_two_nodes_of_two_ranks(fork_server: Any, tmp_path: Path) -> None:
    """The ranks are numbered as by torchrun: node 1 has ranks 2 and 3."""
    fork_server.ranks(tmp_path, 4, train_on_nodes, tmp_path, nodes=2)
    check(tmp_path, ranks=4, nodes=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_strategies_of_gpus(tmp_path: Path, strategy: str) -> None:
    """On one or two GPUs: throughput and FLOPs of all ranks, and device times."""
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    ranks = min(torch.cuda.device_count(), 2)
    options = {"strategy": strategy, "devices": ranks, "accelerator": "gpu"}
    process = start(tmp_path, options)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    check(tmp_path, ranks)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["batch_flops"] == ranks * 4 * FLOPS_PER_SAMPLE
    assert found["timings/device/forward"] > 0
    assert found["memory/current_allocated_mem"] > 0


@pytest.mark.filterwarnings("ignore")  # of Lightning, about checkpoints
def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Runs on two ranks, then three, then one continue from the counts of the checkpoint."""
    torch.set_num_threads(1)
    checkpoint: str | None = None
    folder, done = tmp_path / "checkpoints", 0
    for ranks in (2, 3, 1):
        callbacks = watched()
        dump = Dump(tmp_path / f"{ranks}.json", callbacks)
        saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
        options: dict[str, Any] = {
            "strategy": "ddp_fork" if ranks > 1 else "auto", "devices": ranks,
            "max_steps": done + 4, "max_epochs": -1, "log_every_n_steps": 1000,
            "enable_checkpointing": True,
        }  # fmt: skip
        trainer(folder, Suite(callbacks), dump, saves, **options).fit(Small(), ckpt_path=checkpoint)
        done += 4
        checkpoint = str(folder / f"step={done}.ckpt")
        found = json.loads((tmp_path / f"{ranks}.json").read_text())
        assert found["batch"] == done
        assert found["sample"] == done * 4
        assert samples_per_batch(found) == pytest.approx(ranks * 4)
