"""The background worker, and the waits at the end of a run."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.small import Small, left_in, trainer
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient

from lightning_perf import PerfWarning, PyTorch, SpeedMonitor
from lightning_perf.background import URGENT, Worker
from lightning_perf.profilers.base import Recorded
from lightning_perf.run import context, destination
from lightning_perf.terminal import waiting
from lightning_perf.tracking.mlflow import MlflowRun

PATIENCE = 60.0
FOREVER = 3600.0


@pytest.fixture
def worker():
    worker = Worker("test worker", capacity=3)
    yield worker
    assert worker.close(PATIENCE)


@pytest.fixture
def gate(worker):
    """An event that blocks the worker until it is set."""
    gate, held = threading.Event(), threading.Event()
    worker.submit(lambda: (held.set(), gate.wait(PATIENCE)), "gate")
    assert held.wait(PATIENCE)
    yield gate
    gate.set()


def test_jobs_run_in_order_on_one_daemon_thread(worker):
    """Jobs run in sequence on a thread that does not keep the process alive."""
    seen = []
    for number in range(3):
        worker.submit(lambda n=number: seen.append((n, threading.current_thread())), "job")
    assert worker.drain(PATIENCE)
    assert [number for number, _ in seen] == [0, 1, 2]
    (thread,) = {thread for _, thread in seen}
    assert thread.daemon
    assert thread.name == "test worker"


def test_a_python_profiler_of_the_user_is_not_on_the_thread(worker):
    """threading.setprofile is for the user's threads."""
    seen = []
    threading.setprofile(lambda *event: None)
    try:
        worker.submit(lambda: seen.append(sys.getprofile()), "job")
        assert worker.drain(PATIENCE)
    finally:
        threading.setprofile(None)
    assert seen == [None]


def test_no_thread_before_the_first_job():
    """A worker without jobs starts no thread."""
    before = threading.active_count()
    idle = Worker("idle")
    assert threading.active_count() == before
    assert idle.drain(0.0)
    assert idle.close(0.0)


def test_a_full_queue_refuses_at_once(worker, gate):
    """Beyond its capacity a job is refused without waiting and never run."""
    seen = []
    taken = [worker.submit(lambda n=number: seen.append(n), "job") for number in range(5)]
    assert taken == [True, True, True, False, False]
    assert worker.pending == 4
    gate.set()
    assert worker.drain(PATIENCE)
    assert seen == [0, 1, 2]
    assert worker.pending == 0


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit("boom")])
@pytest.mark.parametrize("how", ["warning", "exception"])
def test_a_failing_job_does_not_stop_the_worker(worker, error, how, monkeypatch, caplog):
    """The failure is a warning with its label, which may raise itself, and the next job runs."""
    seen, said = [], []

    def fail():
        raise error

    def show(message, *_):
        said.append(str(message))
        if how == "exception":
            raise ValueError

    monkeypatch.setattr("warnings.showwarning", show)
    warnings.simplefilter("always")  # until the end of the test
    worker.submit(fail, "failing")
    worker.submit(lambda: seen.append(1), "next")
    assert worker.close(PATIENCE)
    (text,) = said
    assert text.endswith(f"failing failed in the background ({type(error).__name__}: boom)")
    assert seen == [1]
    assert (text in caplog.text) == (how == "exception")
    caplog.clear()


def test_call_returns_the_result(worker):
    """`call` returns the function's result from the worker thread."""
    assert worker.call(lambda: threading.current_thread().name, PATIENCE) == "test worker"


def test_call_raises_the_exception_of_the_function(worker):
    """The caller gets the exception, and there is no warning."""
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0, PATIENCE)


def test_call_times_out(worker, gate):
    """After the timeout, a function that has not started never runs."""
    seen = []
    with pytest.raises(TimeoutError):
        worker.call(lambda: seen.append(1), 0.01)
    gate.set()
    assert worker.drain(PATIENCE)
    assert seen == []


def test_call_on_a_closed_worker_times_out_at_once(worker):
    """A closed worker accepts no jobs, so that the caller does not wait."""
    worker.close(PATIENCE)
    with pytest.raises(TimeoutError, match="accepts no more"):
        worker.call(lambda: 1, FOREVER)


def test_a_delayed_job_does_not_block_others(worker):
    """Later jobs run before a delayed one, for which nobody waits until the worker is closed."""
    seen = []
    worker.submit(lambda: seen.append("late"), "late", delay=FOREVER)
    worker.submit(lambda: seen.append("now"), "now")
    assert worker.drain(PATIENCE)
    assert seen == ["now"]


def test_closing_runs_delayed_jobs_at_once(worker):
    """Closing ends all delays."""
    seen = []
    worker.submit(lambda: seen.append(1), "late", delay=FOREVER)
    assert worker.drain(PATIENCE)
    assert seen == []
    assert worker.close(PATIENCE)
    assert seen == [1]


def test_a_closed_worker_refuses_jobs(worker):
    """After closing once or twice no job is accepted, including those of the last job."""
    retried = []
    worker.submit(lambda: retried.append(worker.submit(lambda: None, "again")), "job", FOREVER)
    assert worker.close(PATIENCE)
    assert worker.close(PATIENCE)
    assert retried == [False]
    assert not worker.submit(lambda: None, "late")


def test_drain_and_close_time_out(worker, gate):
    """Both return False after the timeout while a job hangs."""
    assert not worker.drain(0.01)
    assert not worker.close(0.01)
    assert worker.pending == 1


def test_submit_returns_false_if_no_thread_can_start(worker, monkeypatch):
    """This is the case at interpreter shutdown."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert not worker.submit(lambda: None, "job")
    assert worker.pending == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_its_own_queue(worker, gate):
    """A child runs its own jobs on its own thread, and none of its parent."""
    reader, writer = os.pipe()
    worker.submit(lambda: os.write(writer, b"parent "), "the parent's")
    child = os.fork()
    if not child:
        try:
            assert worker.pending == 0
            worker.submit(lambda: os.write(writer, b"child "), "the child's")
            os._exit(0 if worker.close(PATIENCE) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert worker.drain(PATIENCE)
    os.close(writer)
    with os.fdopen(reader) as seen:
        assert seen.read().split() == ["child", "parent"]


def test_abandon_waits_for_the_running_job_and_for_urgent_ones_only(worker, gate):
    """The next job is dropped, unless it is urgent: it runs before the others."""
    seen = []
    worker.submit(lambda: seen.append("next"), "next")
    worker.submit(lambda: seen.append("urgent"), "urgent", URGENT)
    assert not worker.close(0.0)
    assert not worker.abandon(0.0)
    gate.set()
    assert worker.abandon(PATIENCE)
    assert seen == ["urgent"]


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar advances as jobs are done, and is removed at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with waiting("uploading", 4, 30.0) as show:
        show(3)
        show(1)
    shown = terminal.getvalue()
    assert "lightning_perf: uploading: 4 left (at most 30 s)" in shown
    assert "75%" in shown
    assert shown.endswith("\x1b[2K")


@pytest.mark.parametrize(("patience", "lines"), [(0.0, 1), (60.0, 0)])
def test_only_a_long_wait_is_shown(
    tmp_path: Path,
    mlflow_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    patience: float,
    lines: int,
) -> None:
    """A wait for an upload is shown after `SILENT` seconds, and not before."""
    gate = threading.Event()

    def slow(*args: Any) -> None:
        gate.wait(60.0)

    def opened(*arguments: Any, **options: Any) -> Any:
        gate.set()
        return waiting(*arguments, **options)

    monkeypatch.setattr(MlflowRun, "upload", slow)
    monkeypatch.setattr(destination, "waiting", opened)
    monkeypatch.setattr(destination, "SILENT", patience)
    if not lines:
        gate.set()
    logger = MLFlowLogger("waiting", tracking_uri=mlflow_database)
    trainer(tmp_path, PyTorch(schedule="first 1ba"), logger=logger).fit(Small())
    shown = capsys.readouterr().err
    line = r"lightning_perf: uploading: \d left \(at most 30 s\)\n"
    assert len(re.findall(line, shown)) == shown.count("uploading") == lines


class Finishing(PyTorch):
    """Calls a function before a recording is finished."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(schedule="first 1ba")
        self.ask = ask

    def save(self, path: Path, timestamp: Any, stage: str, recorded: Any) -> None:
        def finish() -> None:
            self.ask()
            recorded.complete()

        super().save(path, timestamp, stage, Recorded(finish))


def test_an_unfinished_file_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the timeout the file is still finished, and not reported as an upload."""
    abandoning, abandon = threading.Event(), Worker.abandon

    def abandoned(self: Worker, timeout: float) -> bool:
        abandoning.set()
        return abandon(self, timeout)

    monkeypatch.setattr(Worker, "abandon", abandoned)
    monkeypatch.setattr(destination, "SILENT", 0.0)
    monkeypatch.setitem(context.FILE_TIMEOUT, "teardown", 0.0)
    trainer(tmp_path, Finishing(lambda: bool(abandoning.wait(30)))).fit(Small())
    assert len(list(tmp_path.rglob("rank0.1.pt.trace.json.gz"))) == 1
    shown = capsys.readouterr().err
    assert re.search(r"finishing files: \d left \(at most", shown)
    assert "uploading" not in shown


def test_metrics_do_not_wait_for_files(tmp_path: Path, mlflow_database: str) -> None:
    """Metrics arrive in MLflow while a file is being made."""
    logger = MLFlowLogger("waiting", tracking_uri=mlflow_database)
    client, found = MlflowClient(mlflow_database), []

    def until_metrics_arrive() -> None:
        until = time.monotonic() + 60
        while "throughput/batches_per_sec" not in found and time.monotonic() < until:
            time.sleep(0.1)
            found.extend(client.get_run(logger.run_id).data.metrics)

    callbacks = [Finishing(until_metrics_arrive), SpeedMonitor(window_size=2)]
    trainer(tmp_path, *callbacks, logger=logger).fit(Small())
    assert "throughput/batches_per_sec" in found
    sent = client.list_artifacts(logger.run_id)
    assert len(sent) == 1


def test_waiting_pages_are_dropped_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run, waiting pages are dropped with a warning; recordings stay."""
    monkeypatch.setattr(destination, "SILENT", 0.0)
    monkeypatch.setitem(context.FILE_TIMEOUT, "teardown", 0.0)
    gate = threading.Event()
    abandon = Worker.abandon

    def abandoned(self: Worker, timeout: float) -> bool:
        left = abandon(self, 0.0)
        gate.set()
        return left

    class Held(PyTorch):
        def save(self, path: Path, timestamp: Any, stage: str, recorded: Any) -> None:
            assert self._context is not None
            self._context.file_worker.submit(lambda: gate.wait(30), "something else")
            super().save(path, timestamp, stage, recorded)

    monkeypatch.setattr(Worker, "abandon", abandoned)
    options = {"memory_filename": "page.html", "with_stack": True, "record_shapes": True}
    held = Held(schedule="first 1ba", **options)
    with pytest.warns(PerfWarning, match="was not made: the run ended first"):
        trainer(tmp_path, held).fit(Small())
    assert [path.name for path in left_in(tmp_path)] == ["rank0.1.pt.trace.json.gz"]
