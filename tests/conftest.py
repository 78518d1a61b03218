"""What all tests share: a small training, and a real MLflow server."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

#: What other sessions of nox run, with packages of their own.
collect_ignore = ["ecosystem"]


@pytest.fixture(autouse=True)
def in_tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own, so that no test writes into the checkout."""
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    return folder


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_mlflow(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A real MLflow server on the loopback, with sqlite behind it; waits until it answers."""
    command = [
        sys.executable, "-m", "mlflow", "server",
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/server.db",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    # What it would start for jobs that nobody gives it takes longer than the server itself.
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                if b"200" in connection.recv(64):
                    return server
        except OSError:
            time.sleep(0.2)
    stop_mlflow(server)
    raise RuntimeError((folder / "server.log").read_text())


def stop_mlflow(server: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started."""
    os.killpg(server.pid, 9)
    server.wait()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow server."""
    port = free_port()
    server = start_mlflow(tmp_path_factory.mktemp("mlflow"), port)
    yield f"http://127.0.0.1:{port}"
    stop_mlflow(server)


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tracking address without a server; its tables are made once."""
    folder = tmp_path_factory.mktemp("mlflow-sqlite")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def worker() -> Iterator[Any]:
    """A worker in which no job may raise."""
    from lightning_perf.background.worker import Worker

    errors: list[Any] = []
    worker = Worker("test worker", on_error=lambda *what: errors.append(what))
    yield worker
    assert worker.close(30.0)
    assert errors == []


@pytest.fixture
def make_writer(tmp_path: Path, worker: Any) -> Any:
    """Makes a trace writer; keyword arguments replace fields of `TraceOptions` and `TraceRun`."""
    from dataclasses import fields, replace

    from lightning_perf.core.progress import Ranks
    from lightning_perf.traces import TraceOptions, TraceRun, TraceWriter

    options = TraceOptions(
        folder="{run_name}/traces",
        filename="rank{rank}.{batch}.json",
        remote_file_name="/{run_name}/traces/rank{rank}.{batch}.json",
    )
    run = TraceRun(
        worker=worker,
        file_worker=worker,
        root=tmp_path,
        ranks=Ranks(),
        run_name="run",
        backoff=(0.0, 0.0, 0.0),
    )

    def make(targets: Any = (), **changes: Any) -> TraceWriter:
        ours = {f.name: changes.pop(f.name) for f in fields(options) if f.name in changes}
        return TraceWriter(replace(options, **ours), replace(run, **changes), targets)

    return make


@pytest.fixture
def records() -> Any:
    """A Lightning logger that keeps what it is given."""
    from helpers.small import Records

    return Records()


@pytest.fixture(autouse=True)
def _no_warning_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Our warnings never raise: one that a test does not expect is an error here."""
    yield
    records = caplog.get_records("call")
    assert not [r.getMessage() for r in records if r.name == "lightning_perf.warnings"]


@pytest.fixture(autouse=True, scope="session")
def _quiet_lightning() -> None:
    """Lightning's notices would bury what a failing test has to say."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Any]:
    """Starts processes that have their imports behind them."""
    from helpers.faults import Nursery

    nursery = Nursery()
    yield nursery
    nursery.close()
