"""HasTag: a run is recorded while it has a tag, and a silent server delays nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.small import Small, ours, trainer
from helpers.torch_traces import steps, traces
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from torch import Tensor

from lightning_perf import HasTag, Moment, PerfWarning, PyTorch
from lightning_perf.background import Worker
from lightning_perf.tracking import mlflow
from lightning_perf.tracking.mlflow import MlflowRun


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_tag_set_while_training_starts_a_recording(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window starts some batches after the tag is set and ends after it is deleted."""
    monkeypatch.setattr(mlflow, "INTERVAL", 0.05)
    logger = MLFlowLogger("tags", tracking_uri=mlflow_database)
    client = MlflowClient(mlflow_database)

    class Watched(HasTag):
        """Keeps its answers, with the number of the batch."""

        def window(self, moment: Moment) -> Any:
            found = super().window(moment)
            within[moment.timestamp.batch] = found is not None
            return found

    class Tagging(Small):
        """Ends training after the tag was seen to be set and deleted."""

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(0.01)  # this is not a time limit: it gives the CPU to the worker
            step, seen = self.trainer.global_step, [n for n, each in within.items() if each]
            if step == 10:
                client.set_tag(logger.run_id, "profile", "now")
            elif seen and not deleted and step >= seen[0] + 5:
                client.delete_tag(logger.run_id, "profile")
                deleted.append(step)
            elif deleted and seen[-1] + 5 < step:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    within: dict[int, bool] = {}
    deleted: list[int] = []
    profiler = PyTorch(schedule=Watched("profile=now"), batches_per_trace=10_000)
    trainer(tmp_path, profiler, logger=logger, max_epochs=500).fit(Tagging())
    (trace,) = traces(tmp_path).values()
    assert 10 < steps(trace)[0] < deleted[0] <= steps(trace)[-1] < max(within)


def test_reading_tags_never_blocks(silent_server: str) -> None:
    """A thousand reads from a silent server return at once and send one request."""
    worker = Worker("test")
    reader = mlflow.TagReader(MlflowRun(silent_server, "run"), worker)
    assert all(reader.read() == {} for _ in range(1000))
    assert worker.pending == 1  # the first request still waits for its answer


def test_an_unreachable_server_means_no_tag(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached tags are discarded when the server cannot be reached."""
    client = MlflowClient(mlflow_database)
    run = client.create_run(client.create_experiment(f"gone-{time.time_ns()}"))
    client.set_tag(run.info.run_id, "profile", "now")
    worker = Worker("test")
    monkeypatch.setattr(mlflow, "INTERVAL", 0.0)
    reader = mlflow.TagReader(MlflowRun(mlflow_database, run.info.run_id), worker)

    def read() -> dict[str, str]:
        reader.read()
        worker.drain(60.0)
        return dict(reader._tags)

    assert read()["profile"] == "now"

    def gone(*args: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(mlflow, "check_reachable", gone)
    assert read() == {}


def test_without_mlflow_there_are_no_tags(tmp_path: Path) -> None:
    """HasTag is never true without an MLflow run: one warning at set-up says so."""
    with pytest.warns(PerfWarning, match="is never true: add an MLFlowLogger") as caught:
        trainer(tmp_path, PyTorch(schedule=HasTag("profile"))).fit(Small())
    assert len(ours(caught)) == 1
    assert not traces(tmp_path)


def test_an_absent_tag_does_not_warn(tmp_path: Path, mlflow_database: str) -> None:
    """A run may end without the tag, and so without a window."""
    logger = MLFlowLogger("tags", tracking_uri=mlflow_database)
    trainer(tmp_path, PyTorch(schedule=HasTag("profile", "always")), logger=logger).fit(Small())


def test_a_trial_run_does_not_warn_of_missing_tags(tmp_path: Path) -> None:
    """`fast_dev_run` replaces the loggers."""
    trainer(tmp_path, PyTorch(schedule=HasTag("profile")), fast_dev_run=True).fit(Small())
