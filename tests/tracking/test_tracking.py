"""Metrics, params and artifacts in MLflow, with a real server and without one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers.command import call
from helpers.recordings import PATIENCE
from helpers.servers import free_port
from helpers.small import Records, Small, ours, trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from mlflow import MlflowClient
from mlflow.utils.validation import _validate_metric_name

from lightning_perf import Flops, PerfWarning, PyTorch, SpeedMonitor, always_on
from lightning_perf.background import Worker
from lightning_perf.cli.runs import _show_run
from lightning_perf.errors import describe
from lightning_perf.terminal import new_console
from lightning_perf.traces.uploads import PendingUpload, append_pending
from lightning_perf.tracking import runs
from lightning_perf.tracking.mlflow import MlflowMetrics, MlflowRun, clean_key
from lightning_perf.tracking.runs import Run


def watched(folder: Path, logger: Any, **options: Any) -> Any:
    run = trainer(
        folder,
        SpeedMonitor(window_size=4),
        Flops(),
        PyTorch(schedule="first 2ba"),
        logger=logger,
        **options,
    )
    run.fit(Small())
    return run


@pytest.mark.slow
def test_a_run_is_read_back_from_mlflow(tmp_path: Path, mlflow_server: str) -> None:
    """MLflow has metrics with their steps, params, and the trace as an artifact."""
    logger = MLFlowLogger("perf", run_name="a run/with a slash", tracking_uri=mlflow_server)
    watched(tmp_path, logger)
    client = MlflowClient(mlflow_server)
    run = client.get_run(logger.run_id)
    assert {"mfu", "batch_flops", "throughput/device/mfu", "time/total"} <= set(run.data.metrics)
    assert [m.step for m in client.get_metric_history(logger.run_id, "mfu")] == [4, 9, 14]
    # One param, so that the user's own come first; of settings, those that are not the defaults.
    param = json.loads(run.data.params["lightning_perf"])
    assert param["world_size"] == 1
    assert param["callbacks"]["SpeedMonitor"] == {"window_size": 4}
    assert not [name for name in run.data.params if name.startswith("lightning_perf/")]
    path = client.download_artifacts(
        logger.run_id, "a run_with a slash/torch_traces/rank0.2.pt.trace.json.gz", str(tmp_path)
    )
    assert json.loads(gzip.decompress(Path(path).read_bytes()))["rank"] == 0


@pytest.mark.slow
def test_other_loggers_get_the_same_metrics(tmp_path: Path, mlflow_database: str) -> None:
    """All loggers of the trainer get the metrics, at the same steps."""
    records, csv = Records(), CSVLogger(tmp_path)
    mlflow = MLFlowLogger("perf", tracking_uri=mlflow_database, prefix="left")
    watched(tmp_path, [records, csv, mlflow])
    stored = MlflowClient(mlflow_database).get_run(mlflow.run_id).data.metrics
    assert {f"left-{key}" for key in records.keys} <= set(stored)
    table = (Path(csv.log_dir) / "metrics.csv").read_text()
    assert all(key in table.splitlines()[0] for key in records.keys)


@pytest.mark.slow
def test_an_unreachable_server_does_not_delay_training(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues with one warning per kind, and the trace stays on the disk."""
    logger = MLFlowLogger("perf", tracking_uri=mlflow_database)
    assert logger.run_id
    monkeypatch.setattr(logger, "_tracking_uri", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(logger, "finalize", lambda status: None)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = watched(tmp_path, logger)
    assert run.global_step == 16
    assert time.monotonic() - start < 120  # without us, MLflow's own retries take 247 s
    warned = [str(w.message) for w in caught if "lightning_perf" in str(w.message)]
    assert sum("metrics wait" in text for text in warned) == 1
    assert sum("did not reach MLflow" in text for text in warned) == 1
    assert list(tmp_path.rglob("rank0.2.pt.trace.json.gz"))


@pytest.mark.slow
def test_failed_metrics_are_sent_again(
    mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics that the server refused arrive later, in order and once each."""
    client = MlflowClient(mlflow_database)
    experiment = client.create_experiment(f"retry-{time.time_ns()}")
    run = MlflowRun(mlflow_database, client.create_run(experiment).info.run_id)
    worker = Worker("test")
    sink = MlflowMetrics(run, worker)
    failures, send = 2, MlflowClient.log_batch

    def log_batch(*args: Any, **kwargs: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError("not now")
        send(*args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5):
            sink.log({"x/y": float(step)}, step)
            time.sleep(0.02)
        deadline = time.monotonic() + 120
        while worker.pending and time.monotonic() < deadline:
            time.sleep(0.05)
    worker.close(60)
    history = client.get_metric_history(run.run_id, "x/y")
    assert [(m.step, m.value) for m in history] == [(s, float(s)) for s in range(5)]


@pytest.mark.slow
def test_reports_share_calls(
    tmp_path: Path, mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports at every batch are sent in few calls, and all arrive."""
    calls, send = [], MlflowClient.log_batch

    def log_batch(self: MlflowClient, run_id: str, metrics: Any = (), **options: Any) -> None:
        if metrics:
            calls.append(len(metrics))
        send(self, run_id, metrics, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    logger = MLFlowLogger("shared", tracking_uri=mlflow_database)
    run = trainer(tmp_path, Flops(schedule="1ba", peak_flops=1e9), logger=logger, max_epochs=12)
    run.fit(Small())
    client = MlflowClient(mlflow_database)
    steps = [m.step for m in client.get_metric_history(logger.run_id, "batch_flops")]
    assert steps == list(range(192))
    # Hundreds of reports in one or two seconds: the first is sent at once, the last at the end.
    assert 2 <= len(calls) <= 12
    assert sum(calls) > 1500


@pytest.mark.parametrize(
    ("key", "clean"),
    [
        ("throughput/device/mfu", "throughput/device/mfu"),
        ("//a//b", "a/b"),
        ("f(x)@1", "f_x_1"),
        ("k" * 300, "k" * 250),
        ("k" * 249 + "/b", "k" * 249),
        ("./exp-loss", "exp-loss"),
        ("a/../b/./c", "a/b/c"),
        ("..x", "_x"),
        ("./..x", "_x"),
        ("..", "_"),
        ("", "_"),
        (".x", ".x"),
    ],
)
def test_keys_are_valid_in_mlflow(key: str, clean: str) -> None:
    """Invalid characters are replaced: one invalid key would reject the whole call."""
    assert clean_key(key) == clean
    _validate_metric_name(clean_key(key))


def test_a_metric_that_the_server_refuses_is_left_out_alone(
    mlflow_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others arrive, also later ones, with one warning; a deleted run keeps all waiting."""
    client = MlflowClient(mlflow_database)
    experiment = client.create_experiment(f"refused-{time.time_ns()}")
    run = MlflowRun(mlflow_database, client.create_run(experiment).info.run_id)
    worker = Worker("test")
    metrics = MlflowMetrics(run, worker)
    monkeypatch.setattr("lightning_perf.tracking.mlflow.clean_key", lambda key: key)

    def log_thrice() -> None:
        for step in range(3):
            metrics.log({"a": 1.0, "a/./b": 2.0, "../c": 3.0, "d": 4.0, "e": 5.0}, step)
            metrics.flush()
            assert worker.drain(60)

    def log_to_the_deleted_run() -> None:
        metrics.log({"a": 6.0}, 3)
        metrics.flush()
        worker.call(lambda: None, 60)

    with pytest.warns(PerfWarning, match="the metric '../c' is refused and left out") as caught:
        log_thrice()
    assert len(ours(caught)) == 1
    assert client.get_run(run.run_id).data.metrics == {"a": 1.0, "d": 4.0, "e": 5.0}
    assert len(client.get_metric_history(run.run_id, "d")) == 3
    client.delete_run(run.run_id)
    with pytest.warns(PerfWarning, match=r"metrics wait for the server .* deleted"):
        log_to_the_deleted_run()
    client.restore_run(run.run_id)
    assert worker.close(60)
    assert client.get_run(run.run_id).data.metrics["a"] == 6.0


def test_an_artifact_has_its_remote_name(tmp_path: Path, mlflow_database: str) -> None:
    """The remote name sets the folder and the file name."""
    client = MlflowClient(mlflow_database)
    experiment = client.create_experiment(f"files-{time.time_ns()}")
    run = MlflowRun(mlflow_database, client.create_run(experiment).info.run_id)
    local = tmp_path / "here.txt"
    local.write_text("content")
    target = run.target
    target.send(local, "far/away/there.txt")
    target.send(local, "here.txt")
    assert [a.path for a in client.list_artifacts(run.run_id, "far/away")] == ["far/away/there.txt"]
    assert "here.txt" in [a.path for a in client.list_artifacts(run.run_id)]


def test_a_report_has_no_password_of_an_artifact_store() -> None:
    """MLflow documents ftp://user:password@host as an artifact store."""
    info = SimpleNamespace(
        run_id="1", run_name="owl", artifact_uri="ftp://bob:hunt/er2@host/1/artifacts",
        status="FINISHED", experiment_id="1",
    )  # fmt: skip
    run = SimpleNamespace(info=info, data=SimpleNamespace(metrics={}, params={}, tags={}))
    entry = SimpleNamespace(path="a.json.gz", is_dir=False)
    client: Any = SimpleNamespace(
        list_artifacts=lambda *_: [entry], tracking_uri="sqlite:///mlflow.db"
    )
    assert runs._read(client, run).files == ("ftp://host/1/artifacts/a.json.gz",)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://ml:hunt/er2@db/mlflow",
        "mysql+pymysql://ml:hunt#er2?x@db/mlflow",
        "postgresql://ml:hunt er2@db/mlflow",
        "postgresql://db/mlflow?user=ml&password=hunter2",
        "http://bob:hunt/er2@host",
    ],
)
def test_no_text_has_the_password_of_a_tracking_address(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of uploads, errors, doctor and report have the address without it."""
    run = MlflowRun(address, "x")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    texts = [*run.address.values(), str(run.problem()), repr(run)]
    with pytest.raises(Exception) as caught:  # noqa: PT011  of MLflow, or of a driver
        run.client()
    texts.append(describe(caught.value))
    # The address in the place of a run is a mistake of the user.
    for command in (["doctor"], ["report"], ["report", address]):
        texts += map(str, call(capsys, *command))
    summary = {"version": 1, "run": "r", "status": "finished", "stages": {}}
    _show_run(Run("r", summary, (), address), new_console())
    texts += capsys.readouterr()
    assert not [text for text in texts if "hunt" in text or "er2" in text]


@pytest.mark.slow
@pytest.mark.parametrize("run_name", ["\N{OWL}" * 64, "../../etc", "50% #2"])
def test_all_files_of_a_run_with_any_name_arrive(
    tmp_path: Path, mlflow_server: str, run_name: str
) -> None:
    """A name that is too long for a folder, or that MLflow refuses as a path, loses no file."""
    logger = MLFlowLogger("names", run_name=run_name, tracking_uri=mlflow_server)
    watched(tmp_path, logger, callbacks=[always_on(False), PyTorch(schedule="first 2ba")])
    client = MlflowClient(mlflow_server)
    (folder,) = (each.path for each in client.list_artifacts(logger.run_id))
    assert (tmp_path / folder / "summary.json").is_file()
    for below in ("", "torch_traces"):
        here = {path.name for path in (tmp_path / folder / below).glob("[!.]*")}
        here -= {"attempts"}  # only the run's own folder has them
        there = client.list_artifacts(logger.run_id, f"{folder}/{below}".rstrip("/"))
        assert here == {each.path.rpartition("/")[2] for each in there}
        assert here


# -- servers of strangers -------------------------------------------------------------------------


class Strange(BaseHTTPRequestHandler):
    """Answers without end, in one of several ways."""

    protocol_version = "HTTP/1.1"
    mode: ClassVar[str] = ""
    requests: ClassVar[int] = 0

    def do_GET(self) -> None:
        Strange.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.mode == "memory":
            self._answer(b"[", headers={"Content-Length": str(1 << 40)})
            with suppress(OSError):  # until the client is gone
                while True:
                    self.wfile.write(b" " * (1 << 20))
        elif self.mode == "patience":
            self._answer(b"slow down", 429, {"Retry-After": "100000"})
        elif "experiments/search" in self.path:
            found = {"experiment_id": str(self.requests), "lifecycle_stage": "active"}
            token = {"next_page_token": f"{self.requests}"} if self.mode == "pages" else {}
            self._answer({"experiments": [found], **token})
        elif "runs/search" in self.path or "runs/get" in self.path:
            place = f"mlflow-artifacts:/0/{'a' * 32}/artifacts"
            info = {"run_id": "a" * 32, "status": "RUNNING", "start_time": 1, "artifact_uri": place}
            tags = [{"key": "lightning_perf_summary", "value": "summary.json"}]
            run = {"info": info, "data": {"tags": tags}}
            self._answer({"runs": [run], "run": run})
        elif "path=" in self.path or self.path.endswith("artifacts"):
            name = "summary.json" if self.mode in ("large", "drops") else "folder"
            entries = [{"path": name, "is_dir": name == "folder", "file_size": 3}] * 2
            listed = "summary.json" not in self.path and self.mode != "pages"
            self._answer({"files": entries if listed else []})
        elif "mlflow-artifacts/artifacts" not in self.path:
            self._answer({})
        else:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            piece = b"x" * (1 << 16 if self.mode == "large" else 1)
            with suppress(OSError):  # until the client is gone
                while True:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    time.sleep(0.2 if self.mode == "drops" else 0)

    do_POST = do_GET  # noqa: N815

    def _answer(self, content: Any, code: int = 200, headers: Mapping[str, str] = {}) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("pages", 0, ""),
        ("folders", 0, ""),
        ("patience", 2, "has not answered in full within 4 s"),
        ("drops", 2, "has not answered in full within 4 s"),
        ("large", 2, "File too large"),
        ("memory", 2, "failed with exception"),
    ],
)
def test_no_server_makes_a_report_endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, code: int, said: str
) -> None:
    """Pages, folders, bytes, memory and waiting are limited, and the process ends."""
    monkeypatch.setattr(Strange, "mode", mode)
    monkeypatch.setattr(Strange, "requests", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    server.daemon_threads, server.block_on_close = True, False
    Thread(target=server.serve_forever, daemon=True).start()
    program = """
import sys
from lightning_perf.cli import main
from lightning_perf.tracking import runs
runs.MOST_MEMORY = 1 << 29
runs.SECONDS, runs.MOST_ENTRIES = 4.0 if sys.argv.pop() == "short" else 100.0, 100
main()
"""
    limit = "short" if "4 s" in said else "long"
    address = f"http://127.0.0.1:{server.server_port}"
    done = subprocess.run(
        [sys.executable, "-c", program, "report", "--tracking-uri", address, limit],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert Strange.requests < 250


@pytest.mark.slow
def test_no_server_makes_an_upload_wait_for_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's own waits count, not those that a server asks for."""
    monkeypatch.setattr(Strange, "mode", "patience")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    server.daemon_threads, server.block_on_close = True, False
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "a.json").touch()
    target = {"tracking_uri": address, "run_id": "a" * 32}
    path = str(tmp_path / "a.json")
    append_pending(tmp_path, PendingUpload(path, "a.json", "r", "away", target))
    command = [sys.executable, "-m", "lightning_perf", "upload", "--tracking-uri", address]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    server.shutdown()
    server.server_close()
    assert done.returncode == 1
    assert "0 uploaded, 1 left" in done.stdout
