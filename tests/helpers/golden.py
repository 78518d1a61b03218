"""The training runs behind `test_golden.py`, each in a process of its own.

A server that has all imports forks one process per variant, so that the state of an earlier run
(caches, one-time warnings, threads) does not affect a later one. It reads one variant per line from
stdin and answers each with one line. What a run shows goes into files, which is what processes of
several ranks have in common:

- ``events/PID.jsonl``: the logger's input, warnings, and the rank of the process;
- ``out``: the trainer's ``default_root_dir``; ``cwd`` and ``tmp``: where no file should stay;
- ``log.txt``: what was printed.

Only public names of the package are used.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_perf as lp

#: Batches per epoch and rank, samples per batch, epochs: 40 batches in all.
BATCHES, BATCH_SIZE, EPOCHS, WIDTH = 20, 4, 2, 8
#: FLOP/s of one device, because a measured peak would differ in each run.
PEAK = 1e12
SECONDS = 120.0


def metric_callbacks() -> list[Any]:
    """The four metric callbacks, with settings that make them reproducible."""
    return [speed_monitor(), flops(), lp.Timings(), system_metrics()]


def speed_monitor() -> Any:
    return lp.SpeedMonitor(window_size=10, gpu_flops_available=PEAK)


def flops() -> Any:
    return lp.Flops(peak_flops=PEAK)


def system_metrics() -> Any:
    """Sampled at the start and at the end, never by the clock."""
    return lp.SystemMetrics(interval="1h")


CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "speed_monitor": lambda: [speed_monitor()],
    "flops": lambda: [flops()],
    "timings": lambda: [lp.Timings()],
    "system_metrics": lambda: [system_metrics()],
    "pytorch": lambda: [lp.PyTorch()],
    "viztracer": lambda: [lp.VizTracer()],
    "memray": lambda: [lp.Memray()],
    "memory_snapshot": lambda: [lp.MemorySnapshot()],
    "suite": lambda: [lp.Suite(metric_callbacks())],
    "suite_pytorch": lambda: [lp.Suite(metric_callbacks()), lp.PyTorch()],
}


class Tiny(L.LightningModule):
    """Two linear layers on fixed data, with a loss that Lightning logs."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        samples = BATCHES * BATCH_SIZE * self.ranks
        x = torch.linspace(-1, 1, samples * WIDTH).reshape(samples, WIDTH)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH_SIZE)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def record_event(folder: Path, what: str, **details: Any) -> None:
    """Append one event of this process."""
    with (folder / "events" / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"event": what, **details}) + "\n")


class EventLogger(Logger):
    """Writes its input to a file at once, because a rank's process ends inside Lightning."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def name(self) -> str:
        return "golden"

    @property
    def version(self) -> str:
        return "version_7"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {key: float(value) for key, value in metrics.items()}
        record_event(self.folder, "metrics", step=step, metrics=values)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        record_event(
            self.folder, "params", params={key: str(value) for key, value in params.items()}
        )


class LogsRank(L.Callback):
    """Records the rank of a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        record_event(self.folder, "rank", rank=trainer.global_rank)


def on_warning(
    folder: Path, message: Warning | str, category: type[Warning], filename: str, *_: Any
) -> None:
    """Record the package's warnings; deprecations of other packages vary with their versions."""
    package = str(Path(str(lp.__file__)).parent)
    dated = issubclass(category, DeprecationWarning | PendingDeprecationWarning | FutureWarning)
    if issubclass(category, lp.PerfWarning) or (filename.startswith(package) and not dated):
        record_event(folder, "warning", category=category.__name__, text=str(message))


def train(folder: Path, variant: dict[str, Any]) -> None:
    """Run one variant."""
    ranks = variant["ranks"]
    loggers: list[Logger] = [EventLogger(folder)] if variant["logger"] else []
    if variant["mlflow"]:
        from lightning.pytorch.loggers import MLFlowLogger

        store = f"sqlite:///{folder}/mlflow.db"
        artifacts = str(folder / "artifacts")
        loggers.append(MLFlowLogger("golden", "golden-run", store, artifact_location=artifacts))
    checkpoints = ModelCheckpoint(
        folder / "out/checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp_fork" if ranks > 1 else "auto",
        callbacks=[*CALLBACKS[variant["callbacks"]](), LogsRank(folder), checkpoints],
        logger=loggers,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "out",
        log_every_n_steps=5,
        max_epochs=EPOCHS,
        val_check_interval=10,
        limit_val_batches=3,
        limit_test_batches=12,
        limit_predict_batches=12,
        accumulate_grad_batches=variant["accumulate"],
    )
    getattr(trainer, variant["stage"])(Tiny(ranks))
    record_checkpoint(folder)
    if variant["mlflow"]:
        record_mlflow(folder, loggers[-1])


def record_checkpoint(folder: Path) -> None:
    """Record the callbacks' state in the last checkpoint: the names, which a resume looks up."""
    last = folder / "out/checkpoints" / f"step={BATCHES}.ckpt"
    if last.exists():
        kept = torch.load(last, weights_only=True)["callbacks"]
        ours = {key: names(state) for key, state in kept.items() if "ModelCheckpoint" not in key}
        record_event(folder, "checkpoint", callbacks=ours)


def names(state: Any, prefix: str = "") -> list[str]:
    """The paths of all values of nested dicts."""
    if not isinstance(state, dict) or not state:
        return [prefix]
    return sorted(path for k, v in state.items() for path in names(v, f"{prefix}/{k}".strip("/")))


def record_mlflow(folder: Path, logger: Any) -> None:
    """The points, params, tags and artifacts of the run."""
    client, run_id = logger.experiment, logger.run_id
    run = client.get_run(run_id)
    for key in run.data.metrics:
        for point in client.get_metric_history(run_id, key):
            record_event(folder, "mlflow_metric", key=key, step=point.step, value=point.value)
    artifacts = sorted(artifact_paths(client, run_id, ""))
    record_event(folder, "mlflow", params=run.data.params, tags=run.data.tags, artifacts=artifacts)


def artifact_paths(client: Any, run_id: str, folder: str) -> Iterable[str]:
    for each in client.list_artifacts(run_id, folder):
        yield from artifact_paths(client, run_id, each.path) if each.is_dir else [each.path]


def child(folder: Path, variant: dict[str, Any]) -> None:
    """The process of one variant."""
    for name in ("events", "out", "cwd", "tmp"):
        (folder / name).mkdir(parents=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder / "cwd")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    warnings.simplefilter("always")
    warnings.showwarning = partial(on_warning, folder)
    torch.manual_seed(0)
    try:
        train(folder, variant)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def preload() -> None:
    """Import everything that each run imports, which is half of its time."""
    torch.set_num_threads(1)
    for name in lp.__all__:
        getattr(lp, name)
    for name in ("jinja2", "memray", "psutil"):
        import_module(name)
    # A garbage collection in a child would copy all inherited pages: a sixth of its time.
    gc.freeze()


def serve() -> None:
    """Fork a process for each line, one after the other."""
    preload()
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        variant = json.loads(line)
        if variant["mlflow"]:
            import mlflow  # noqa: F401  the child's own import would be lost with it
        process = fork.Process(target=child, args=(Path(variant["folder"]), variant))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    serve()
