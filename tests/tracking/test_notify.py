"""Events reach a function or a web server, and neither can delay or fail a training run."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.small import Small, ours, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import ConfigError, Diagnosis, PerfWarning, Verdict
from lightning_perf.tracking import notify
from lightning_perf.tracking.notify import Notifier, post

SECRET = "T0-hunter2-B1"
EVENT = {"event": "hang", "run": "owl", "seconds": 312.0, "mfu": float("nan")}


class Hook(ThreadingHTTPServer):
    """A webhook that keeps what it gets, and hangs or refuses if it is told to."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/services/{SECRET}"
        self.got: list[tuple[str, Any]] = []
        self.credentials: list[str | None] = []
        self.answer, self.released = 200, threading.Event()
        self.released.set()


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.credentials.append(self.headers["Authorization"])
        self.server.got.append((self.headers["Content-Type"], json.loads(body)))
        self.server.released.wait(60)
        self.send_response(self.server.answer)
        self.send_header("Content-Length", "0")
        self.send_header("Location", "/moved")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing in the output of the tests."""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


def send(notifier: Notifier, times: int = 1) -> None:
    for _ in range(times):
        notifier(EVENT)


def send_all(notifier: Notifier, times: int = 1) -> None:
    send(notifier, times)
    notifier.close()


def test_an_event_is_posted_as_json(hook: Hook) -> None:
    """Without numbers that JSON does not have; also by a copy, as spawned processes have it."""
    first = Notifier(hook.url)
    for notifier in (first, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
        send_all(notifier)
    assert hook.got == 3 * [("application/json", {"event": "hang", "run": "owl", "seconds": 312.0})]


def test_a_user_in_the_url_is_sent_as_credentials(hook: Hook) -> None:
    """Decoded, as curl does; a refusal names neither."""
    url = hook.url.replace("://", "://me%40home:hunter%3A2@")
    send_all(Notifier(url))
    send_all(Notifier(hook.url))
    assert hook.credentials == [f"Basic {b64encode(b'me@home:hunter:2').decode()}", None]
    hook.answer = 401
    with pytest.warns(PerfWarning) as caught:
        send_all(Notifier(url))
    (text,) = ours(caught)
    assert "HTTPError 401" in text
    assert not any(word in text for word in ("hunter", "me@", SECRET))


def test_a_server_that_hangs_delays_nothing(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events beyond those that may wait are dropped, and the end waits for a limited time."""
    monkeypatch.setattr(notify, "_TIMEOUT", 0.5)
    hook.released.clear()
    notifier = Notifier(hook.url)
    before = time.monotonic()
    with pytest.warns(PerfWarning) as caught:
        send(notifier, 100)
    assert time.monotonic() - before < 0.4
    with pytest.warns(PerfWarning, match="more events for notify"):
        notifier.close()
    assert time.monotonic() - before < 5
    shown = ours(caught)
    assert shown[0].endswith(
        "an event did not arrive (the receiver is too slow). Training continues."
    )
    assert SECRET not in "".join(shown)
    assert 1 <= len(hook.got) < 10
    hook.released.set()
    send_all(notifier)  # of a later run
    assert hook.got[-1][1]["event"] == "hang"


@pytest.mark.parametrize("answer", [301, 302, 303, 404, 500])
def test_a_refused_event_is_one_warning_without_the_address(hook: Hook, answer: int) -> None:
    """It has the answer; further failures are counted at the end."""
    hook.answer = answer
    notifier = Notifier(hook.url)
    with pytest.warns(PerfWarning) as caught:
        send_all(notifier, 3)
    assert [text.removeprefix("lightning_perf: ") for text in ours(caught)] == [
        f"notify: an event did not arrive (HTTPError {answer}). Training continues.",
        "2 more events for notify did not arrive.",
    ]


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("http://127.0.0.1:9/" + SECRET, id="closed"),
        pytest.param("http://[" + SECRET, id="not a URL"),
        pytest.param("https://127.0.0.1:9/ " + SECRET, id="with a space"),
    ],
)
def test_an_address_that_cannot_be_reached(target: str) -> None:
    """It is a warning without the address."""
    notifier = Notifier(target)
    with pytest.warns(PerfWarning, match="did not arrive") as caught:
        send_all(notifier)
    assert SECRET not in str(ours(caught))


@pytest.mark.parametrize("error", [ValueError(SECRET), SystemExit(SECRET), KeyboardInterrupt()])
def test_a_function_that_fails_is_a_warning(error: BaseException) -> None:
    """Its message may have the URL, and is not shown."""

    def fails(event: dict[str, Any]) -> None:
        raise error

    notifier = Notifier(fails)
    with pytest.warns(PerfWarning, match=rf"\({type(error).__name__}\)") as caught:
        send_all(notifier)
    assert SECRET not in str(ours(caught))


@pytest.mark.parametrize("target", [f"hooks.example.com/{SECRET}", f"file:///{SECRET}", 7, b"x"])
def test_other_targets_are_refused_without_showing_them(target: Any) -> None:
    """A webhook whose URL lacks its beginning is a secret, too."""
    with pytest.raises(ConfigError, match="neither a function nor a URL") as refused:
        Diagnosis(notify=target)
    assert SECRET not in str(refused.value)


class Rule:
    """Finds what it is told to."""

    code = "mine"

    def __call__(self, signals: Any) -> list[Verdict]:
        culprits = ("Plots", "Plots", "Tables") if signals.batches > 40 else ("Plots",)
        found = [
            Verdict("mine", "critical", 0.3, culprit=name, advice="Plot less often.")
            for name in culprits
        ]
        return [*found, Verdict("mine", "warning", 0.1, culprit="Texts")]


def test_each_new_critical_verdict_is_posted_once(
    hook: Hook, tmp_path: Path, mlflow_database: str
) -> None:
    """Under no verdict is it posted again, and no file, param or checkpoint has the URL."""
    logger = MLFlowLogger("notify", "owl", tracking_uri=mlflow_database)
    diagnosis = Diagnosis("every 40ba", rules=[Rule()], terminal=False, notify=hook.url)
    run = trainer(tmp_path, diagnosis, logger=logger, max_epochs=8, log_every_n_steps=10)
    run.fit(Small())
    run.save_checkpoint(tmp_path / "last.ckpt")
    events = [event for _, event in hook.got]
    assert [(each["code"], each["culprit"]) for each in events] == [
        ("mine", "Plots"), ("mine", "Tables"),
    ]  # fmt: skip
    assert {each["event"] for each in events} == {"verdict"}
    assert events[0]["text"] == (
        "owl: mine (critical): Plots, 30% of the time, 1.43x faster without it. Plot less often."
    )
    found = MlflowClient(mlflow_database).get_run(str(logger.run_id))
    assert SECRET not in str(found.to_dictionary())
    assert "summary.json" in {path.name for path in tmp_path.rglob("*")}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_run_does_not_wait_for_a_server_that_hangs(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches are trained while the first post hangs; the end waits for a limited time."""
    hook.released.clear()
    monkeypatch.setattr(notify, "_TIMEOUT", 0.5)
    seen: list[int] = []

    class Sees(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(len(hook.got))

    diagnosis = Diagnosis("every 40ba", rules=[Rule()], terminal=False, notify=hook.url)
    with pytest.warns(PerfWarning, match="did not arrive"):
        trainer(tmp_path, diagnosis, Sees(), max_epochs=8, log_every_n_steps=10).fit(Small())
    assert len(seen) == 128
    assert (tmp_path / "summary.json").exists() or list(tmp_path.glob("*/summary.json"))


def test_post_raises_for_its_caller(hook: Hook) -> None:
    """A function of the user's that posts another format gets the error, and `Notifier` warns."""
    post(hook.url, {"text": "hello"})
    hook.answer = 500
    with pytest.raises(OSError, match="500"):
        post(hook.url, {"text": "hello"})
    assert [event for _, event in hook.got] == 2 * [{"text": "hello"}]
