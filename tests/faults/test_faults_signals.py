"""Signals at any moment of a training: it ends as without us, and what was recorded is named.

A moment is a number of Python's calls, so that it is the same in each run. Set
``LIGHTNING_PERF_MOMENTS`` to sweep more of them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.command import until
from helpers.faults import Acting, Ended, ForkServer, Planted, raises
from helpers.hanging import Samples
from helpers.small import Records, Small, trainer
from torch.utils.data import DataLoader

from lightning_perf import Diagnosis, Flops, PerfWarning, Profiler, SpeedMonitor, always_on
from lightning_perf.extend import Names, Recorded, Recording
from lightning_perf.run import termination
from lightning_perf.run.termination import hurried, signals_held
from lightning_perf.tracking.summary import read_summary

pytestmark = pytest.mark.slow

#: Moments per signal, with our callbacks.
MOMENTS = int(os.environ.get("LIGHTNING_PERF_MOMENTS", "8"))
SIGNALS = {
    "SIGINT": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
    "SIGINT, SIGTERM": [signal.SIGINT, signal.SIGTERM],
    "SIGALRM": [signal.SIGALRM],
}
#: Calls between two signals.
APART = 1000


class Plain(Profiler):
    """Records a constant, and completes each file slowly on the worker thread."""

    further_files = {"page": Names("rank{rank}.{batch}.html", None)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__("every 4ba", folder="plain", filename="rank{rank}.{batch}.json")

    def record(self, path: Path, context: Any, warmup: int) -> Recording:
        path.write_text("recorded")
        yield None
        return Recorded(lambda: time.sleep(0.05), further={"page": _draw})


def _draw(page: Path) -> None:
    time.sleep(0.05)
    page.write_text("drawn</html>")


class Counts(L.Callback):
    """Writes a byte per batch that has ended."""

    def __init__(self) -> None:
        self.file = os.open("batches", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def on_train_batch_end(self, *_: Any) -> None:
        os.write(self.file, b".")


class Sender:
    """Sends signals to this process at some numbers of calls, and notes what must follow."""

    def __init__(self, signals: list[int], first: int, run: L.Trainer) -> None:
        self.due = {first + APART * at: number for at, number in enumerate(signals)}
        self.calls, self.run = 0, run
        #: Exit codes, and where the first signal came.
        self.codes: list[int] = []
        self.where = ""
        #: The first call of these functions.
        self.marks = dict.fromkeys(("setup", "on_train_batch_end", "_teardown"), 0)

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event != "call":  # there Python handles signals, not where a function in C returns
            return
        self.calls += 1
        if not self.marks.get(frame.f_code.co_name, 1):
            self.marks[frame.f_code.co_name] = self.calls
        if self.calls in self.due:
            number = self.due.pop(self.calls)
            self.note(frame, number)
            os.kill(os.getpid(), number)

    def note(self, frame: Any, number: int) -> None:
        stack, files = [], set()
        while frame is not None:
            stack.append(frame.f_code.co_name)
            files.add(Path(frame.f_code.co_filename).name)
            frame = frame.f_back
        self.where = self.where or " < ".join(stack[:8])
        if number == signal.SIGALRM:
            self.codes += [1, 0] if "emit" in stack else [1]  # logging drops what it meets
        elif number == signal.SIGINT:
            self.codes.append(1 if "_call_and_handle_interrupt" in stack else -number)
        else:
            handled = bool(self.run._signal_connector._original_handlers)
            changing = "signal_connector.py" in files
            self.codes += [0, -number] if changing else [0 if handled else -number]
        Path("sent").write_text(json.dumps([self.codes, self.where]))


def limit(*_: object) -> None:
    """Ends a job that has used up its time."""
    raise TimeoutError("the time is up")


def train(signals: list[int], first: int, with_ours: bool) -> None:
    """Train in this process, and send signals to it."""
    ours = [Plain(), always_on(show_summary=False)] if with_ours else []
    options = {"max_epochs": 2, "limit_val_batches": 2, "enable_checkpointing": True}
    run = trainer(Path("out"), *ours, Counts(), logger=Records(), **options)
    model = Small()
    send = Sender(signals, first, run)
    signal.signal(signal.SIGALRM, limit)
    sys.setprofile(send)
    run.fit(model)
    sys.setprofile(None)
    Path("calls").write_text(json.dumps([1, *send.marks.values(), send.calls]))


def check(folder: Path, ended: Ended, with_ours: bool) -> None:
    """The process ended as Lightning alone would have, and nothing recorded is lost."""
    codes, where = [0], ""
    if (folder / "sent").exists():
        codes, where = json.loads((folder / "sent").read_text())
    said = where, ended.stderr[-1500:]
    if "Exception ignored in" in ended.stderr:  # by Python, where it deletes an object
        codes = [*codes, 0]
    assert ended.code in codes, (ended.code, codes, said)
    if not with_ours:
        return
    out = folder / "out"
    spools = [path for path in out.rglob(".spool*") if path.stat().st_size]
    assert not spools, (spools, said)
    batches = folder / "batches"
    if batches.exists() and batches.stat().st_size:
        summary = out / "records-version_0" / "summary.json"
        assert summary.exists(), said
        assert read_summary(summary)["status"] != "running", said


@pytest.fixture(scope="module")
def marks_of(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], list[int]]:
    """The first and last calls, and those between parts, of a training without signals."""

    @cache
    def marks(with_ours: bool) -> list[int]:
        folder = tmp_path_factory.mktemp("whole")
        check(folder, fork_server.run(folder, train, [], 0, with_ours), with_ours)
        return list(json.loads((folder / "calls").read_text()))

    return marks


def sweep(
    server: ForkServer, folder: Path, signals: list[int], moments: int, marks: list[int],
    with_ours: bool,
) -> None:  # fmt: skip
    parts = pairwise(marks)
    # As many during imports, set-up, training and the end.
    each = moments // (len(marks) - 1)
    calls = [a + (b - a) * number // each for a, b in parts for number in range(each)]
    for some in batched(calls, 4):
        at_once = [server.start(folder / str(at), train, signals, at, with_ours) for at in some]
        for child in at_once:
            check(child.folder, child.wait(), with_ours)


def batched(values: list[int], size: int) -> list[list[int]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_at_any_moment_loses_nothing(
    fork_server: ForkServer, tmp_path: Path, marks_of: Callable[[bool], list[int]], name: str
) -> None:
    """The exit code is Lightning's, the summary is there, and no recording lacks its name."""
    sweep(fork_server, tmp_path, SIGNALS[name], MOMENTS, marks_of(True), True)


def test_the_exit_codes_are_those_of_lightning_alone(
    fork_server: ForkServer, tmp_path: Path, marks_of: Callable[[bool], list[int]]
) -> None:
    """The codes that the tests expect are right without us."""
    for name in ("SIGINT", "SIGTERM"):
        marks = marks_of(False)
        sweep(fork_server, tmp_path / name, SIGNALS[name], MOMENTS // 2, marks, False)


class TimedOut(Small):
    """Reaches its limit of time while one of our callbacks reads a property of it."""

    @property
    def flops_per_batch(self) -> float:
        if self._trainer is not None and self.trainer.global_step == 3:
            signal.raise_signal(signal.SIGALRM)
        return 1e6


@pytest.mark.parametrize("with_handler", [True, False])
def test_what_a_handler_raises_in_our_code_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_handler: bool
) -> None:
    """It is no failure of ours. An error of the property itself is, and does not end it."""
    run = trainer(tmp_path, Flops(peak_flops=1e12))
    if with_handler:
        before = signal.signal(signal.SIGALRM, limit)
        with pytest.raises(TimeoutError, match="the time is up"):
            run.fit(TimedOut())
        signal.signal(signal.SIGALRM, before)
        assert run.global_step < 8
    else:
        monkeypatch.setattr(signal, "raise_signal", limit)
        with pytest.warns(PerfWarning, match="flops_per_batch failed .*the time is up"):
            run.fit(TimedOut())
        assert run.global_step == 16


@pytest.mark.parametrize(("interval", "hurries"), [(0.0, True), (0.001, False)])
def test_a_periodic_timer_is_no_request_to_end(interval: float, hurries: bool) -> None:
    """A time limit is: then the end of a run waits for no files."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with signals_held():
            signal.setitimer(signal.ITIMER_REAL, 0.001, interval)
            until(lambda: signal.SIGALRM in termination._came)
            assert hurried() == hurries
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Collects(Small):
    """Collects many objects, for longer than a timer takes to send a signal."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            gc.disable()
            kept = [[None] for _ in range(2_000_000)]
            signal.signal(signal.SIGPROF, signal.default_int_handler)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 0.01)
            try:
                gc.collect()
            finally:
                Path("seconds").write_text(str(time.process_time() - began))
                kept.clear()
        return super().training_step(batch, batch_idx)


def train_collecting(with_ours: bool) -> None:
    ours = [Diagnosis(terminal=False)] if with_ours else []
    trainer(Path("out"), *ours).fit(Collects())


@pytest.mark.parametrize("with_ours", [False, True])
def test_a_signal_during_a_collection_stops_the_training(
    fork_server: ForkServer, tmp_path: Path, with_ours: bool
) -> None:
    """What its handler raises is not dropped, as it would be in a Python callback of `gc`."""
    ended = fork_server.run(tmp_path, train_collecting, with_ours)
    assert float((tmp_path / "seconds").read_text()) > 0.03  # the signal came in the collection
    assert ended.code == 1, ended.stderr  # Lightning's after KeyboardInterrupt
    assert "Exception ignored" not in ended.stderr


class Timed(SpeedMonitor):
    """Reaches its limit of time while it closes after an exception."""

    def close(self, run: Any, reason: str) -> None:
        super().close(run, reason)
        if reason == "exception":
            signal.raise_signal(signal.SIGALRM)


class Told(L.Callback):
    """Records the exceptions that `on_exception` receives."""

    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)


@pytest.mark.parametrize("tuned", [False, True])
def test_what_a_handler_raises_after_an_exception_waits_for_teardown(
    tmp_path: Path, tuned: bool
) -> None:
    """Other callbacks receive the exception, and Lightning's handlers and workers are gone.

    So too where hooks of ours are not called, because a tuner has replaced the callbacks.
    """
    told, model = Told(), Acting(raises)
    run = trainer(tmp_path, Timed(), told)
    if tuned:
        model.act = lambda: (setattr(run, "callbacks", [told]), raises())
    handlers = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGALRM, limit)
    loader = DataLoader(Samples(), 4, num_workers=1)
    try:
        with pytest.raises(TimeoutError, match="the time is up") as caught:
            run.fit(model, loader)
        assert signal.getsignal(signal.SIGTERM) == handlers[0]
        assert signal.getsignal(signal.SIGALRM) is limit
    finally:
        signal.signal(signal.SIGALRM, handlers[1])
    assert [str(each) for each in told.exceptions] == ["planted"]
    assert caught.value.__context__ is told.exceptions[0]
    assert not active_children()
    run.fit(Small(), loader)  # nothing waits for this one's teardown


class Fails(L.Callback):
    """Raises in its own `on_exception`: Lightning then calls no other one, nor its teardown."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error: type[BaseException] | None = error

    def on_exception(self, *_: Any) -> None:
        if self.error is not None:
            raise self.error("failed, too")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_run_ends_although_another_callback_fails_after_an_exception(
    tmp_path: Path, error: type[BaseException]
) -> None:
    """A process that goes on keeps no thread of it, and no hang is reported later."""
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGTERM)
    fails, ours = Fails(error), always_on(show_summary=False)
    with pytest.raises(error, match="failed, too"):
        trainer(tmp_path, fails, ours, logger=Records()).fit(Acting(raises))
    signal.signal(signal.SIGTERM, handler)  # Lightning's is left
    assert set(threading.enumerate()) <= threads
    assert "on_exception" not in vars(fails)
    (file,) = tmp_path.rglob("summary.json")
    assert read_summary(file)["status"] == "stopped by an exception"


def test_a_handler_that_raises_leaves_the_handlers_of_other_signals_in_place() -> None:
    """Ctrl-C would have no effect otherwise."""
    handlers = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, limit)
    try:
        with pytest.raises(TimeoutError, match="the time is up"), signals_held():
            signal.raise_signal(signal.SIGALRM)
        assert signal.getsignal(signal.SIGINT) is handlers[0]
        with pytest.raises(KeyboardInterrupt) as caught, signals_held():
            [*map(signal.raise_signal, (signal.SIGALRM, signal.SIGINT))]
        assert isinstance(caught.value.__context__, TimeoutError)
    finally:
        signal.signal(signal.SIGALRM, handlers[1])


def test_what_a_handler_raised_does_not_end_a_later_training(tmp_path: Path) -> None:
    """It waits for a teardown that does not come, since another callback fails after ours."""
    fails, model = Fails(OSError), Acting(raises)
    run = trainer(tmp_path, Timed(), fails)
    handlers = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGALRM, limit)
    try:
        with pytest.raises(OSError, match="failed, too"):
            run.fit(model)
        fails.error = None
        run.fit(Small())
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGALRM), handlers, strict=True):
            signal.signal(number, handler)
    assert run.state.finished


class Late(L.Callback):
    """Sends SIGTERM after Lightning has stopped to handle it."""

    def on_fit_end(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class AsRestored(L.Callback):
    """Sends SIGTERM as soon as Lightning has restored the handler before it restores others."""

    def on_train_end(self, *_: Any) -> None:
        original = signal.signal

        def restored(number: int, handler: Any) -> None:
            original(number, handler)
            if number == signal.SIGTERM:
                signal.signal = original
                os.kill(os.getpid(), number)

        signal.signal = restored  # type: ignore[assignment]


def train_late(sender: type[L.Callback]) -> None:
    run = trainer(Path("out"), Plain(), always_on(show_summary=False), sender(), logger=Records())
    run.fit(Small())


@pytest.mark.parametrize("sender", [AsRestored, Late])
def test_sigterm_between_training_and_teardown_loses_nothing(
    fork_server: ForkServer, tmp_path: Path, sender: type[L.Callback]
) -> None:
    """The run ends first, then the process, by the signal."""
    ended = fork_server.run(tmp_path, train_late, sender)
    assert ended.code == -signal.SIGTERM
    assert (tmp_path / "out" / "records-version_0" / "summary.json").exists()
    names = {path.name for path in (tmp_path / "out" / "plain").glob("*")}
    assert {f"rank0.{batch}.json" for batch in (5, 9, 13)} <= names
    assert not [name for name in names if name.startswith(".spool")]


def test_handlers_are_as_before_a_fit(tmp_path: Path) -> None:
    """Neither a fit nor one that raises leaves a handler of ours."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer(tmp_path, always_on(show_summary=False)).fit(Small())
    with pytest.raises(RuntimeError):
        trainer(tmp_path, always_on(show_summary=False), Planted("on_fit_end", raises, 16)).fit(
            Small()
        )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
