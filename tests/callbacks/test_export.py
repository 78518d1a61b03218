"""Metrics in a real Prometheus, in textfiles and in OTLP requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from helpers.command import until
from helpers.configuration import parse
from helpers.servers import free_port
from helpers.small import RANKS, Records, Small, ours, trainer
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import DataLoader, TensorDataset

from lightning_perf import (
    ConfigError,
    OpenTelemetry,
    PerfWarning,
    Prometheus,
    SpeedMonitor,
    Suite,
    SystemMetrics,
    Timings,
    WindowCallback,
)
from lightning_perf.callbacks import export
from lightning_perf.callbacks.export import LAST_STEP, PREFIX, named

DOCS = Path(__file__).parent.parent.parent / "docs" / "configuration.md"
#: A series: its name and its labels.
Key = tuple[str, frozenset[tuple[str, str]]]


def read(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """The labels and the value of each metric in Prometheus' format; each has one series."""
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    assert len({sample.name for sample in samples}) == len(samples) == len(families)
    return {each.name: (dict(each.labels), each.value) for each in samples}


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


class AtEnd(L.Callback):
    """Calls a function after the last batch, and keeps what it returns."""

    def __init__(self, function: Any) -> None:
        self.function, self.found = function, None

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.found = self.function()


# -- names and labels -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "name", "labels"),
    [
        ("mfu", "mfu", {}),
        ("validate/throughput/samples_per_sec", "validate_throughput_samples_per_sec", {}),
        ("diagnosis/input-bound", "diagnosis_input_bound", {}),
        ("system/node_12/cpu_iowait", "system_node_cpu_iowait", {"node": "12"}),
        ("system/node_1/gpu_0/ofu", "system_node_gpu_ofu", {"node": "1", "gpu": "0"}),
        ("my_node_3/x", "my_node_3_x", {}),
        ("größe\n{a=\"b\"} 1", "gr__e__a__b___1", {}),
    ],
)  # fmt: skip
def test_keys_become_names_and_labels(key: str, name: str, labels: dict[str, str]) -> None:
    """Numbers of nodes and GPUs are labels, so that one name has all of them."""
    assert (named(key)[0], dict(named(key)[2])) == (PREFIX + name, labels)


def test_a_long_key_is_cut() -> None:
    """OpenTelemetry takes 255 characters."""
    assert len(named("k" * 1000)[0]) == 255


class Fixed(WindowCallback):
    """Logs what no callback of ours would on one node."""

    columns = ("progress/batches",)

    def on_window(self, window: Any) -> dict[str, float]:
        return {"system/node_1/gpu_3/gpu_power": 300.0, "a/b": 1.0, "a_b": 2.0, "nan": float("nan")}


def test_a_scrape_has_what_loggers_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last values, each with its labels; a second key of one name replaces the first."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("POD_NAME", "trainer-0")
    port, records = free_port(), Records()
    look = AtEnd(lambda: (scrape(port), {*records.keys}, dict(records.rows[-1][1]), time.time()))
    parts = Suite([SpeedMonitor(2), Timings(), SystemMetrics(0.1), Fixed(), Prometheus(port)])
    trainer(tmp_path, parts, look, logger=records).fit(Small())
    text, keys, last, now = look.found
    found = read(text)
    assert set(found) == {named(key)[0] for key in keys} | {
        f"{PREFIX}step", PREFIX + LAST_STEP,
    }  # fmt: skip
    for key, value in last.items():
        assert found[named(key)[0]][1] == (2.0 if key == "a/b" else value), key
    common = {"run": "records-version_0", "rank": "0", "slurm_job": "4711", "pod": "trainer-0"}
    power = found["lightning_perf_system_node_gpu_gpu_power"]
    assert power == ({**common, "node": "1", "gpu": "3"}, 300.0)
    assert found["lightning_perf_step"] == ({**common, "node": "0"}, 16.0)
    assert now - 60 < found[PREFIX + LAST_STEP][1] <= now
    with pytest.raises(OSError, match="refused"):
        scrape(port)  # the run has ended


def test_no_credential_is_in_a_label(tmp_path: Path) -> None:
    """Some loggers name a run by its address."""
    port = free_port()
    records = Records()
    type(records).name = property(lambda _: "http://me:hunter2@host/x?key=hunter2")  # type: ignore
    look = AtEnd(lambda: scrape(port))
    try:
        trainer(tmp_path, Prometheus(port), look, logger=records).fit(Small())
    finally:
        type(records).name = property(lambda _: "records")  # type: ignore
    assert "host/x" in look.found
    assert "hunter2" not in look.found


# -- the port -------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_warning(tmp_path: Path) -> None:
    """It says what to do, and the training is complete."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = trainer(tmp_path, Prometheus(port), SpeedMonitor(2))
        with pytest.warns(PerfWarning) as caught:
            run.fit(Small())
    (message,) = ours(caught)
    assert re.search(rf"127\.0\.0\.1:{port} .*in use.*try port={port + 1}", message)
    assert run.global_step == 16


def test_an_address_that_is_not_here_is_one_warning(tmp_path: Path) -> None:
    """As of another machine, or misspelt."""
    with pytest.warns(PerfWarning, match="cannot read this run at 192.0.2.1:") as caught:
        trainer(tmp_path, Prometheus(free_port(), address="192.0.2.1")).fit(Small())
    assert len(ours(caught)) == 1


@pytest.mark.slow
def test_the_next_run_gets_the_port_though_workers_live(tmp_path: Path) -> None:
    """Workers of a data loader have a copy of the socket."""
    port, kept = free_port(), []
    for _ in range(2):
        look = AtEnd(lambda: (scrape(port), iter(DataLoader([1, 2, 3], num_workers=1))))
        trainer(tmp_path, Prometheus(port), look, SpeedMonitor(2)).fit(Small())
        text, workers = look.found
        assert "lightning_perf_step" in text
        kept.append(workers)


@pytest.mark.slow
def test_one_rank_exports(tmp_path: Path) -> None:
    """Two ranks of a node do not compete for the port, and labels are rank 0's."""
    port = free_port()

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_rank == 1:
                (tmp_path / "found").write_text(scrape(port))
            trainer.strategy.barrier()

    callbacks = [Prometheus(port), SpeedMonitor(2), Look()]
    trainer(tmp_path, *callbacks, **RANKS).fit(Small())
    labels, _ = read((tmp_path / "found").read_text())["lightning_perf_throughput_samples_per_sec"]
    assert (labels["rank"], labels["node"]) == ("0", "0")


# -- a real Prometheus ----------------------------------------------------------------------------

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.small import Small, trainer
from lightning_perf import Prometheus, SpeedMonitor, Suite

class Waits(Small):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        while Path("hold").exists():
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)

suite = Suite([SpeedMonitor(2), Prometheus({port}, "{{run_name}}.prom")])
trainer(Path("."), suite, max_epochs=-1).fit(Waits())
"""


def rules() -> list[dict[str, str]]:
    """The alert rules of the documentation."""
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (found,) = [yaml.safe_load(block) for block in blocks if "- alert:" in block]
    return [*found["groups"][0]["rules"]]


def ask(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
        return json.load(answer)["data"]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A real Prometheus with the alert rules, sooner than in the documentation; two ports.

    It scrapes the second one.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    port, training = free_port(), free_port()
    alerts = [each | {"expr": each["expr"].replace("> 600", "> 4")} for each in rules()]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "lightning_perf", "rules": alerts}]})
    )
    (block,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    config = yaml.safe_load(block) | {"rule_files": ["rules.yml"]}
    config["global"] = {"evaluation_interval": "1s"}
    config["scrape_configs"][0] |= {"scrape_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{training}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program, "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.path=data",
    ]  # fmt: skip
    with (tmp_path / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        yield port, training
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_prometheus_alerts_on_a_training_that_was_stopped(
    tmp_path: Path, prometheus: tuple[int, int]
) -> None:
    """It scrapes a training, alerts when this hangs or is stopped, and no longer when it goes on.

    A process that is stopped, or has ended, does not answer: the second rule alone sees it. The
    textfile of a stopped one stays as it was.
    """
    server, port = prometheus
    tests = str(Path(__file__).parent.parent)
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=tests, port=port))
    training = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def value(expression: str) -> float | None:
        try:
            found = ask(server, f"query?query={urllib.parse.quote(expression)}")["result"]
        except OSError:  # it starts
            return None
        return float(found[0]["value"][1]) if found else None

    def firing() -> dict[str, dict[str, str]]:
        alerts = ask(server, "alerts")["alerts"]
        return {each["labels"]["alertname"]: each["labels"] for each in alerts}

    try:
        until(lambda: (value("lightning_perf_step") or 0) > 5)
        rate = value("lightning_perf_throughput_batches_per_sec")
        assert rate is not None
        assert 1 < rate < 50  # a batch takes 20 ms at least
        assert firing() == {}
        (tmp_path / "hold").touch()  # the training hangs, and its process answers
        assert until(firing).keys() == {"TrainingStuck"}
        (tmp_path / "hold").unlink()
        until(lambda: not firing())
        training.send_signal(signal.SIGSTOP)
        labels = until(lambda: firing().get("TrainingSilent"))
        assert labels["run"].startswith("run-")
        assert labels["instance"] == f"127.0.0.1:{port}"
        assert value("up") == 0
        assert firing().keys() == {"TrainingSilent"}
        (file,) = tmp_path.glob("run-*.prom")
        assert read(file.read_text())[PREFIX + LAST_STEP][1] < time.time() - 4
        training.send_signal(signal.SIGCONT)
        until(lambda: not firing())
        training.send_signal(signal.SIGINT)
        assert training.wait(60) is not None
        assert list(tmp_path.glob("*.prom")) == []
        until(firing)
        assert firing().keys() == {"TrainingSilent"}
    finally:
        training.kill()
        training.wait()


# -- textfiles ------------------------------------------------------------------------------------


def test_a_textfile_is_there_while_the_run_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renewed, has the content of a scrape, and is removed at the end."""
    monkeypatch.setattr(export, "INTERVAL", 0.01)
    path = tmp_path / "below" / "records-version_0.prom"
    step = f"{PREFIX}step"
    look = AtEnd(lambda: until(lambda: (found := read(path.read_text()))[step][1] == 16 and found))
    callback = Prometheus(None, str(tmp_path / "below" / "{run_name}.prom"))
    trainer(tmp_path, callback, SpeedMonitor(2), look, logger=Records()).fit(Small())
    assert look.found["lightning_perf_throughput_batches_per_sec"][1] > 0
    assert list(path.parent.iterdir()) == []


def test_a_file_of_another_is_not_replaced(tmp_path: Path) -> None:
    """One warning says so, and the file stays as it is."""
    path = tmp_path / "node.prom"
    path.write_text("node_cpu 1\n")
    with pytest.warns(PerfWarning, match="name a new one") as caught:
        trainer(tmp_path, Prometheus(None, str(path))).fit(Small())
    assert len(ours(caught)) == 1
    assert path.read_text() == "node_cpu 1\n"


def test_the_file_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    """A restarted job continues with the file that it has left."""
    path = tmp_path / "job.prom"
    path.write_text("# HELP lightning_perf_step step\nlightning_perf_step 3\n")
    look = AtEnd(lambda: until(lambda: "last_step" in path.read_text()))
    trainer(tmp_path, Prometheus(None, str(path)), look).fit(Small())
    assert not path.exists()


# -- OpenTelemetry --------------------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """Keeps the series of each OTLP request, in order, and the attributes of their source."""

    daemon_threads = True

    def __init__(self) -> None:
        self.requests: list[dict[Key, float]] = []
        self.resource: dict[str, str] = {}
        self.headers: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert (self.path, self.headers["Content-Type"]) == (
            "/v1/metrics", "application/x-protobuf",
        )  # fmt: skip
        request = ExportMetricsServiceRequest.FromString(body)
        found: dict[Key, float] = {}
        for resource in request.resource_metrics:
            attributes = resource.resource.attributes
            self.server.resource = {each.key: each.value.string_value for each in attributes}
            for scope in resource.scope_metrics:
                if scope.scope.name == "lightning_perf":
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            labels = {(a.key, a.value.string_value) for a in point.attributes}
                            assert (metric.name, frozenset(labels)) not in found
                            found[metric.name, frozenset(labels)] = point.as_double
        self.server.requests.append(found)
        self.server.headers.append(self.headers["X-Team"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver to which the SDK sends, as its environment variables say."""
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=vision")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    yield server
    server.shutdown()
    server.server_close()


class Slow(Small):
    """A model whose data loader has a worker, with batches longer than the export's interval."""

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.zeros(64, 8), torch.zeros(64, 1))
        return DataLoader(data, 4, num_workers=1, persistent_workers=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_collector_gets_what_loggers_get(tmp_path: Path, receiver: Receiver) -> None:
    """The last request has the last values; processes of data loaders send nothing of their own."""
    records = Records()
    callbacks = [Suite([SpeedMonitor(2), Timings(), Fixed(), OpenTelemetry()])]
    trainer(tmp_path, *callbacks, logger=records, max_epochs=2).fit(Slow())
    *_, last = receiver.requests
    by_name = {name: value for (name, _), value in last.items()}
    expected: dict[str, float] = {}
    for _, row in records.rows:
        expected |= {named(key)[0]: value for key, value in row.items()}
    assert by_name.keys() - expected.keys() == {f"{PREFIX}step", PREFIX + LAST_STEP}
    assert {name: by_name[name] for name in expected} == expected
    labels = {("run", "records-version_0"), ("rank", "0"), ("node", "1"), ("gpu", "3")}
    assert last["lightning_perf_system_node_gpu_gpu_power", frozenset(labels)] == 300.0
    for name in ("step", LAST_STEP):  # a fork would repeat old values
        seen = [
            value for each in receiver.requests for (n, _), value in each.items()
            if n == PREFIX + name
        ]  # fmt: skip
        assert len(seen) > 8
        assert seen == sorted(seen)
    assert all(receiver.requests)
    assert receiver.resource["service.name"] == "lightning_perf"
    assert set(receiver.headers) == {"vision"}


def test_the_users_service_name_takes_precedence(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's variables are the user's own settings."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    trainer(tmp_path, OpenTelemetry()).fit(Small())
    assert receiver.resource["service.name"] == "my-training"
    assert receiver.resource["team"] == "vision"


@pytest.mark.slow
def test_a_collector_that_hangs_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits for a bounded time, and one warning says so."""
    monkeypatch.setattr(export, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        run = trainer(tmp_path, OpenTelemetry(), SpeedMonitor(2))
        with pytest.warns(PerfWarning, match="did not take the last metrics") as caught:
            run.fit(Small())
    assert len(ours(caught)) == 1
    assert run.global_step == 16


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": 0}, "port=0 is not valid"),
        ({"port": 70000}, "port=70000 is too large"),
        ({"port": None}, "port=None needs a textfile"),
        ({"textfile": "metrics.txt"}, "does not end in .prom"),
        ({"address": ""}, "is not the address of a network"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """At construction, with a value that works."""
    with pytest.raises(ConfigError, match=message):
        Prometheus(**arguments)


def test_they_are_written_in_yaml(tmp_path: Path) -> None:
    """Alone and in a Suite."""
    nodes = [
        {"class_path": "lightning_perf.Prometheus", "init_args": {"port": 9000}},
        {
            "class_path": "lightning_perf.Suite",
            "init_args": {"callbacks": [{"class_path": "lightning_perf.OpenTelemetry"}]},
        },
    ]
    prometheus, suite = parse(tmp_path, nodes).trainer.callbacks[:2]  # type: ignore[attr-defined]
    assert (prometheus.port, prometheus.address) == (9000, "127.0.0.1")
    assert isinstance(suite.callbacks[0], OpenTelemetry)


def test_a_trial_run_exports_nothing(tmp_path: Path) -> None:
    """As `fast_dev_run` replaces loggers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:  # which would be a warning
        port = taken.getsockname()[1]
        trainer(tmp_path, Prometheus(port), fast_dev_run=True).fit(Small())
