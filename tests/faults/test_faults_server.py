"""A failing tracking server does not affect training, and no file is lost.

| faults | x endings | cases |
|---|---|---|
| `STAYING` from the first batch on: nine kinds | ends | 9 |
| from the first batch on: down, hang, 500 | raises | 3 |
| from the middle on: down, hang, 500 | ends | 3 |
| passing: down, drop, 500, 403 from batch 3 to 12 | ends | 4 |
| down or 500 before there is a run | raises | 2 |

Each is compared with the same training without us. Files that were not uploaded are listed, and
`lightning-perf upload` sends them after the server has recovered.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.faults import (
    BATCH,
    DONE,
    Acting,
    Child,
    Ended,
    ForkServer,
    Planted,
    Setting,
    await_files,
    files,
    fit,
    profilers,
    raises,
    whole,
)
from helpers.faults_proxy import Proxy, switch
from helpers.small import Small
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf.cli import main
from lightning_perf.profilers.base import Profiler
from lightning_perf.run import context

pytestmark = pytest.mark.slow

#: Secrets in the address and in the environment, which must not appear elsewhere.
SECRETS = ("hunter-in-the-address", "hunter-in-the-environment")
LIST = "pending_uploads.jsonl"
STAYING = ("down", "hang", "drop", "cut", "garbage", "500", "503", "403", "413")
ALL = DONE | files("PyTorch", 12, 14)
RAISED = DONE | files("PyTorch", BATCH)


def served(
    place: Path, port: int, modes: dict[int, str], failing: bool, name: str, flag: Path
) -> Setting:
    """A training that logs to a server, whose fault changes at some batches."""
    # MLflow's own retries take twenty minutes, with and without us.
    os.environ |= {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "AWS_SECRET_ACCESS_KEY": SECRETS[1],
    }
    context.UPLOAD_TIMEOUT = {"teardown": 2.0, "exception": 2.0}
    address = f"http://me:{SECRETS[0]}@127.0.0.1:{port}"
    turns = [
        Planted("on_train_batch_start", partial(switch, place, port, mode), at)
        for at, mode in modes.items()
    ]
    return Setting(
        Acting(raises) if failing else Small(),
        before=turns,
        after=[Planted("on_train_end", flag.touch, 16), Planted("on_exception", flag.touch)],
        logger=MLFlowLogger(name, tracking_uri=address, run_name="faulty"),
    )


class Served:
    """Runs trainings against a real server, each through a proxy of its own."""

    def __init__(self, fork_server: ForkServer, server: str, folder: Path, name: str) -> None:
        self._fork_server, self._server, self._name = fork_server, server, name
        self.folder, self._proxies = folder, list[Proxy]()
        self.files = folder / "ours" / "out"

    def pair(self, modes: dict[int, str], failing: bool = False, first: str = "pass") -> Ended:
        """Train with us, and compare with the same training without us."""
        pair = [
            self._start(kind, modes, failing, ours, first)
            for kind, ours in (("ours", profilers("PyTorch")), ("without", []))
        ]
        if "hang" in modes.values():
            self._let_go()
        ended, without = (child.wait() for child in pair)
        assert _same(ended) == _same(without)
        self._no_secrets(ended)
        return ended

    def _start(
        self, kind: str, modes: dict[int, str], failing: bool, ours: list[Profiler], first: str
    ) -> Child:
        place, port = self.folder / kind, urlsplit(self._server).port
        assert port is not None
        self._proxies.append(proxy := Proxy(place / "proxy", port, first))
        return self._fork_server.start(
            place / "process", fit, place / "out", served, place / "proxy", proxy.port, modes,
            failing, f"{self._name} {kind}", place / "trained", ours=ours,
        )  # fmt: skip

    def _let_go(self) -> None:
        """All batches are done, and remaining uploads are listed, while requests still hang."""
        await_files(self.folder, {"ours/trained", "without/trained", f"out/{LIST}"})
        assert (self.folder / "ours" / "proxy" / "seen-hang").exists()
        for proxy in self._proxies:
            proxy.recover()

    def upload(self) -> None:
        """Upload the listed files after the server has recovered."""
        self._proxies[0].recover()
        with pytest.raises(SystemExit) as done:
            main(["upload", str(self.files), "--tracking-uri", self._server])
        assert done.value.code in (0, None)
        assert not (self.files / LIST).exists()

    @property
    def artifacts(self) -> set[str]:
        client = MlflowClient(self._server)
        experiment = client.get_experiment_by_name(f"{self._name} ours")
        (run,) = client.search_runs([experiment.experiment_id])
        folders = client.list_artifacts(run.info.run_id, "faulty")
        found = (f.path for d in folders for f in client.list_artifacts(run.info.run_id, d.path))
        return {path.removeprefix("faulty/") for path in found}

    def _no_secrets(self, ended: Ended) -> None:
        lines = [line for line in ended.stderr.splitlines() if "lightning_perf:" in line]
        paths = [path for path in self.files.rglob("*") if path.is_file()]
        texts = [path.read_bytes() for path in paths] + ["\n".join(lines).encode()]
        for text in texts:
            plain = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
            assert not any(secret.encode() in plain for secret in SECRETS)

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()


def _same(ended: Ended) -> tuple[int, str]:
    """Without ids, ports and addresses of objects, which differ between runs."""
    return ended.code, re.sub(
        r"[0-9a-f]{32}|0x[0-9a-f]{8,}|port=\d+|:\d{4,5}|ours|without", "", str(ended.outcome)
    )


@pytest.fixture
def served_by(
    fork_server: ForkServer, mlflow_server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Served]:
    served = Served(fork_server, mlflow_server, tmp_path, request.node.name)
    yield served
    served.close()


@pytest.mark.parametrize(
    ("mode", "at", "failing"),
    [
        *((mode, 0, False) for mode in STAYING),
        *((mode, at, at == 0) for mode in ("down", "hang", "500") for at in (0, 7)),
    ],
)
def test_files_that_a_failing_server_refused_are_uploaded_later(
    served_by: Served, mode: str, at: int, failing: bool
) -> None:
    """All files are complete on the disk; those that did not arrive are listed and sent."""
    ended = served_by.pair({at: mode}, failing)
    made = RAISED if failing else ALL
    assert whole(served_by.files) == made | {LIST}, ended.stderr
    assert "`lightning-perf upload` sends" in ended.stderr
    served_by.upload()
    assert served_by.artifacts == made


def dies(out: Path) -> None:
    """Wait until the last trace is listed, and end as the kernel does when memory is short."""
    until = time.monotonic() + 60
    while not any(b"rank0.14." in each.read_bytes() for each in out.glob(f"{LIST}*")):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(place: Path, port: int, name: str, out: Path) -> Setting:
    """A training whose server hangs from batch 7 on, and that is killed at its end."""
    setting = served(place, port, {7: "hang"}, False, name, out / "unused")
    setting.after = [Planted("on_train_end", partial(dies, out), 16)]
    return setting


def test_files_that_wait_at_a_sigkill_are_uploaded_later(
    served_by: Served, fork_server: ForkServer, mlflow_server: str, tmp_path: Path
) -> None:
    """Nobody can write a list then: it is on the disk before, and `upload` sends what it has."""
    port = urlsplit(mlflow_server).port
    assert port is not None
    served_by._proxies.append(proxy := Proxy(tmp_path / "proxy", port))
    name = f"{served_by._name} ours"
    ended = fork_server.run(
        tmp_path / "process", fit, served_by.files, killed, tmp_path / "proxy", proxy.port, name,
        served_by.files, ours=profilers("PyTorch"),
    )  # fmt: skip
    assert ended.code == -signal.SIGKILL, ended.stderr
    assert {each for each in whole(served_by.files) if LIST not in each} == ALL
    served_by.upload()
    assert not list(served_by.files.glob(f"{LIST}*"))
    assert served_by.artifacts == ALL


@pytest.mark.parametrize("mode", ["down", "drop", "500", "403"])
def test_a_server_that_recovers_gets_all_files(served_by: Served, mode: str) -> None:
    """Failed uploads are retried without any action of the user."""
    ended = served_by.pair({3: mode, 12: "pass"})
    assert whole(served_by.files) == ALL, ended.stderr
    assert served_by.artifacts == ALL


@pytest.mark.parametrize("mode", ["down", "500"])
def test_a_server_that_is_unavailable_from_the_start_gives_lightning_s_error(
    served_by: Served, mode: str
) -> None:
    """Lightning asks the logger for its run before it sets up callbacks; the error is the same."""
    ended = served_by.pair({}, first=mode)
    assert ended.code == 1
    assert not served_by.files.exists() or not whole(served_by.files)
