"""Trainings with faults end as they would without us, and keep every recorded window.

At each fault a profiler has recorded a window and has a second one open: VizTracer and Memray
alone, and PyTorch beside these two, which have recorded a window each.

| faults, each x 3 profilers | what is left of the open window |
|---|---|
| 16 `RAISED`: in the module, in others' callbacks, in a logger; exits and signals | all |
| 4 `KILLED`: none of our code runs afterwards | what the tool leaves, under a hidden name |
| 6 `EARLY`: before the first batch, all three at once | there was none |
| SIGKILL at 8 arbitrary moments, PyTorch only | as above |
| a training without a fault | all |
| a run that ends while a page is made of a recording | all |
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from helpers.faults import (
    BATCH,
    DONE,
    EACH,
    PATIENCE,
    PROFILERS,
    Acting,
    Ended,
    ForkServer,
    Planted,
    Setting,
    await_files,
    files,
    fit,
    hidden,
    profilers,
    raises,
    read,
    whole,
)
from helpers.small import Records, Small, trainer

from lightning_perf import Fixed, Profiler, PyTorch, always_on
from lightning_perf.extend import Names, Recorded, Recording
from lightning_perf.run import context, destination
from lightning_perf.tracking.summary import read_summary

pytestmark = pytest.mark.slow


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def in_step(act: Callable[[], object]) -> Setting:
    return Setting(Acting(act))


def before(hook: str, act: Callable[[], object] = raises, at: int = BATCH) -> Setting:
    """In a callback before ours in the list."""
    return Setting(before=[Planted(hook, act, at)])


def after(hook: str, act: Callable[[], object] = raises, at: int = BATCH) -> Setting:
    """In a callback after ours."""
    return Setting(after=[Planted(hook, act, at)])


class FailingLogger(Records):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        raise OSError("the logger is planted")


class Logging(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def in_logger() -> Setting:
    options = {"log_every_n_steps": BATCH + 1}
    return Setting(Logging(), logger=FailingLogger(), options=options)


class FailingValidation(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("validation is planted")


def in_validation() -> Setting:
    options = {"limit_val_batches": 2, "val_check_interval": BATCH, "num_sanity_val_steps": 0}
    return Setting(FailingValidation(), options=options)


class Twice(Planted):
    """Raises again in `on_exception`: later callbacks are not called."""

    def __init__(self) -> None:
        super().__init__("on_train_batch_start", raises)

    def on_exception(self, *_: Any) -> None:
        raise ValueError("planted once more")


def twice_before() -> Setting:
    return Setting(before=[Twice()])


def twice_after() -> Setting:
    return Setting(after=[Twice()])


Make = Callable[[], Setting]
Each = Callable[..., Iterator[tuple[str, Ended, Path]]]
#: With the batches completed by then. Lightning handles SIGTERM at the end of a batch.
RAISED: dict[str, tuple[Make, int]] = {
    "step raises": (partial(in_step, raises), BATCH),
    "step exits": (partial(in_step, partial(sys.exit, 3)), BATCH),
    "step ends the data": (partial(in_step, partial(next, iter(()))), BATCH),
    "SIGINT": (partial(in_step, partial(send, signal.SIGINT)), BATCH),
    "SIGTERM": (partial(in_step, partial(send, signal.SIGTERM)), BATCH + 1),
    "logger": (in_logger, BATCH + 1),
    "validation": (in_validation, BATCH),
    "before: batch start": (partial(before, "on_train_batch_start"), BATCH),
    "before: backward": (partial(before, "on_after_backward"), BATCH),
    "before: batch end": (partial(before, "on_train_batch_end"), BATCH - 1),
    "before: SIGINT": (
        partial(before, "on_train_batch_start", partial(send, signal.SIGINT)),
        BATCH,
    ),
    "before: on_exception too": (twice_before, BATCH),
    "after: batch start": (partial(after, "on_train_batch_start"), BATCH),
    "after: optimizer step": (partial(after, "on_before_optimizer_step"), BATCH),
    "after: batch end": (partial(after, "on_train_batch_end"), BATCH),
    "after: on_exception too": (twice_after, BATCH),
}
KILLED: dict[str, Callable[[], object]] = {
    "SIGKILL": partial(send, signal.SIGKILL),
    "SIGSEGV": partial(send, signal.SIGSEGV),
    "abort": os.abort,
    "os._exit": partial(os._exit, 5),
}
EARLY: dict[str, Make] = {
    "before: setup": partial(before, "setup", at=0),
    "after: setup": partial(after, "setup", at=0),
    "after: exit in setup": partial(after, "setup", partial(sys.exit, 3), at=0),
    "after: SIGINT in setup": partial(after, "setup", partial(send, signal.SIGINT), at=0),
    "after: fit start": partial(after, "on_fit_start", at=0),
    "after: train start": partial(after, "on_train_start", at=0),
}


def settled(act: Callable[[], object], folder: Path, names: set[str]) -> Setting:
    """Waits until the worker has written its files, which a kill would lose."""
    return in_step(partial(_when_settled, act, folder, names))


def _when_settled(act: Callable[[], object], folder: Path, names: set[str]) -> None:
    await_files(folder, names)
    # A recording is removed a moment after its file has appeared; that of the open window stays.
    until = time.monotonic() + PATIENCE / 2
    while len(hidden(folder)) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    act()


def done(profiler: str) -> set[str]:
    """The files of windows that are closed before the fault."""
    return DONE if profiler == "PyTorch" else EACH[profiler]


@pytest.fixture
def train_all(fork_server: ForkServer, tmp_path: Path) -> Each:
    """Trains once per profiler with an open window, and once without us.

    All run in parallel and must end alike. The fault may depend on the folder of the training
    and its files.
    """

    def run(
        happens: Callable[[Path, set[str]], Make], names: Sequence[str] = PROFILERS
    ) -> Iterator[tuple[str, Ended, Path]]:
        children = {}
        for name in ("", *names):
            place = tmp_path / (name or "without")
            ours = profilers(name, alone=name != "PyTorch") if name else []
            make = happens(place, done(name) if ours else set())
            process = place.with_suffix(".process")
            children[name] = fork_server.start(process, fit, place, make, ours=ours)
        without, *others = (child.wait() for child in children.values())
        for name, ended in zip(names, others, strict=True):
            assert ended.ended == without.ended, (name, ended.stderr)
            yield name, ended, tmp_path / name

    return run


@pytest.mark.parametrize("fault", RAISED)
def test_recordings_are_kept_after_an_exception(train_all: Each, fault: str) -> None:
    """The run ends with the user's exception; the open window is closed and complete, too."""
    make, batches = RAISED[fault]
    for profiler, ended, folder in train_all(lambda *_: make):
        assert whole(folder) == done(profiler) | files(profiler, batches)
        assert not hidden(folder)
        # A failing logger does not affect our metrics in other loggers; VizTracer has none.
        assert bool(ended.said) == (fault == "logger" and profiler != "VizTracer")


@pytest.mark.parametrize("fault", KILLED)
def test_finished_recordings_are_kept_after_a_kill(train_all: Each, fault: str) -> None:
    """Finished windows are complete; a truncated one has a hidden name, and memray can read it."""
    for profiler, _, folder in train_all(partial(partial, settled, KILLED[fault])):
        assert whole(folder) == done(profiler)
        left = hidden(folder)
        assert all(path.name.startswith(".spool-rank0-") for path in left)
        if profiler == "Memray":
            (capture,) = left
            read(capture)


@pytest.mark.parametrize("fault", EARLY)
def test_a_fault_before_the_first_batch_leaves_no_file(train_all: Each, fault: str) -> None:
    """A run that does not start ends as without us, and leaves no file."""
    for _, ended, folder in train_all(lambda *_: EARLY[fault], ["PyTorch"]):
        assert ended.code != 0
        assert not whole(folder)
        assert not hidden(folder)


def test_a_training_without_a_fault_is_unchanged(train_all: Each) -> None:
    """All trainings end alike, so that the faults alone explain the cases above."""
    for profiler, ended, folder in train_all(lambda *_: Setting):
        assert ended.code == 0
        assert whole(folder) == done(profiler) | files(profiler, 12, 14)
        assert not ended.said


def endless(flag: Path) -> Setting:
    """Trains until it is killed; the flag file says that it has started."""
    return Setting(after=[Planted("on_train_batch_end", flag.touch)], options={"max_epochs": -1})


@pytest.mark.parametrize("milliseconds", range(0, 400, 50))
def test_files_are_whole_at_any_moment(
    fork_server: ForkServer, tmp_path: Path, milliseconds: int
) -> None:
    """A file with its final name is complete at any moment of a SIGKILL."""
    flag, every = tmp_path / "begun", PyTorch(schedule="every 1ba", batches_per_trace=1)
    child = fork_server.start(
        tmp_path / "process", fit, tmp_path / "out", endless, flag, ours=[every]
    )
    await_files(tmp_path, {f"{tmp_path.name}/begun"})
    await_files(tmp_path / "out", files("PyTorch", 2, 3))
    time.sleep(milliseconds / 1000)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().code == -signal.SIGKILL
    assert whole(tmp_path / "out") >= files("PyTorch", 2, 3)


class Paged(Profiler):
    """Its page takes longer than the end of a run waits for the worker."""

    further_files = {"page": Names("rank{rank}.{batch}.html", None)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(Fixed(0, 1), folder="paged", filename="rank{rank}.{batch}.json")
        self.begun, self.trained = Event(), Event()

    def record(self, path: Path, context: Any, warmup: int) -> Recording:
        path.write_text("recorded")
        yield None
        return Recorded(further={"page": partial(self._draw, path)})

    def await_page(self) -> None:
        self.begun.wait(PATIENCE)
        self.trained.set()

    def _draw(self, path: Path, page: Path) -> None:
        self.begun.set()
        self.trained.wait(PATIENCE)
        time.sleep(0.5)  # the run ends
        page.write_text(path.read_text())


def test_a_run_that_ends_while_a_page_is_made_keeps_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording is not moved while the worker makes its page."""
    monkeypatch.setattr(destination, "SILENT", 0.0)
    monkeypatch.setattr(context, "UPLOAD_TIMEOUT", {"teardown": 0.0})
    paged = Paged()
    wait = Planted("on_train_end", paged.await_page, 16)
    trainer(tmp_path, wait, paged).fit(Small())
    await_files(tmp_path, {"paged/rank0.1.html"})  # which the worker is making
    found = {path.name: path.read_text() for path in (tmp_path / "paged").glob("[!.]*")}
    assert found == {"rank0.1.json": "recorded", "rank0.1.html": "recorded"}


class Plain(Profiler):
    """Records a constant. ``finish`` completes each file on the worker thread."""

    def __init__(self, schedule: str, finish: Callable[[], None] = lambda: None) -> None:
        super().__init__(schedule, folder="plain", filename="rank{rank}.{batch}.json")
        self.finish = finish

    def record(self, path: Path, context: Any, warmup: int) -> Recording:
        path.write_text("recorded")
        yield None
        return Recorded(self.finish)


def test_ctrl_c_during_the_final_wait_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the wait; recordings, the summary, the diagnosis and the times are placed."""
    monkeypatch.setattr(destination, "SILENT", 0.0)
    trained, pressed = Event(), Event()

    def press() -> None:
        trained.wait(PATIENCE)
        time.sleep(0.3)
        if not pressed.is_set():
            pressed.set()
            send(signal.SIGINT)
            time.sleep(0.5)

    end = Planted("on_train_end", trained.set, 16)
    run = trainer(
        tmp_path, end, Plain("every 4ba", press), always_on(show_summary=False), logger=Records()
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(Small())
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    left = {"/".join(path.parts[-2:]) for path in tmp_path.rglob("[!.]*") if path.is_file()}
    assert {f"plain/rank0.{batch}.json" for batch in (5, 9, 13)} <= left
    assert {"records-version_0/summary.json", "records-version_0/report.html"} <= left
    assert not list(tmp_path.rglob(".spool*"))


class Forks(Small):
    """Forks a child in a batch; it leaves `fit` by an exception, as `sys.exit` raises."""

    def training_step(self, batch: list[Any], batch_idx: int) -> Any:
        if batch_idx == 8:
            child = os.fork()
            if child == 0:
                raise SystemExit(0)
            os.waitpid(child, 0)
        return super().training_step(batch, batch_idx)


def test_a_forked_child_that_exits_leaves_the_run_alone(tmp_path: Path) -> None:
    """The parent's recording, summary and diagnosis are those of a run without the child."""
    parent = os.getpid()
    try:
        run = trainer(
            tmp_path, Plain("at 5ba for 6ba"), always_on(show_summary=False), logger=Records()
        )
        run.fit(Forks())
    finally:
        if os.getpid() != parent:
            os._exit(0)
    left = {path.name for path in tmp_path.rglob("[!.]*") if path.is_file()}
    assert "rank0.11.json" in left
    assert not {name for name in left if name.startswith(("summary-", "report-", "rank0.9"))}
    summary = read_summary(tmp_path / "records-version_0" / "summary.json")
    assert summary["status"] == "finished"
