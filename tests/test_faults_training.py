"""Trainings that end badly end as they would without us, and leave every window that was recorded.

Each fault meets a training in which PyTorch, VizTracer and Memray have recorded a window each, and
one of them, each in its turn, has a second window open.

| faults | x profilers | what is left of the open window |
|---|---|---|
| 16 `RAISED`: in the module, in others' callbacks, in a logger; exits and signals | 48 | all |
| 4 `KILLED`: no code of ours runs any more | 12 | what the tool leaves, under a hidden name |
| 6 `EARLY`: before the first batch | 18 | there was none |
| SIGKILL at 8 moments that nobody chose | 8, PyTorch alone | as above |
| a training that nothing happens to | 3 | all |
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import (
    BATCH,
    DONE,
    PROFILERS,
    READMES,
    Acting,
    Child,
    Ended,
    Nursery,
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
from small import Records, Small

from lightning_perf import PyTorch

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
    """Fails again when it is told that it has failed: callbacks after it hear of nothing."""

    def __init__(self) -> None:
        super().__init__("on_train_batch_start", raises)

    def on_exception(self, *_: Any) -> None:
        raise ValueError("planted once more")


def twice_before() -> Setting:
    return Setting(before=[Twice()])


def twice_after() -> Setting:
    return Setting(after=[Twice()])


Make = Callable[[], Setting]
#: With the batches that have ended by then. Lightning heeds SIGTERM at the end of a batch.
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
    """Waits until the worker has done what it was given, which a kill would take from it."""
    return in_step(partial(_when_settled, act, folder, names))


def _when_settled(act: Callable[[], object], folder: Path, names: set[str]) -> None:
    await_files(folder, names)
    act()


class Trainings:
    """Every training once; those of one fault run side by side."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self._children: dict[tuple[str, str], Child] = {}
        self._ended: dict[tuple[str, str], Ended] = {}

    def __call__(self, fault: str, profiler: str) -> tuple[Ended, Path]:
        """How the training with this profiler ended, and where its files are."""
        key = fault, profiler
        if key not in self._children:
            for name in ("", *PROFILERS):
                self._children[fault, name] = self._start(fault, name)
        if key not in self._ended:
            self._ended[key] = self._children[key].wait()
        return self._ended[key], self._place(*key)

    def _place(self, fault: str, profiler: str) -> Path:
        return self._folder / fault.replace(": ", "-") / (profiler or "without")

    def _start(self, fault: str, profiler: str) -> Child:
        place, ours = self._place(fault, profiler), profilers(profiler) if profiler else []
        make = RAISED[fault][0] if fault in RAISED else EARLY.get(fault, Setting)
        if fault in KILLED:
            make = partial(settled, KILLED[fault], place, DONE if profiler else set())
        return self._nursery.start(place.with_suffix(".process"), fit, place, make, ours=ours)


@pytest.fixture(scope="module")
def trainings(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(nursery, tmp_path_factory.mktemp("trainings"))


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("fault", RAISED)
def test_all_that_was_recorded_outlives_what_is_raised(
    trainings: Trainings, fault: str, profiler: str
) -> None:
    """The end is the user's own, and the open window is closed and whole as the others are."""
    ended, folder = trainings(fault, profiler)
    assert ended.ended == trainings(fault, "")[0].ended, ended.stderr
    assert whole(folder) == DONE | files(profiler, RAISED[fault][1])
    assert not hidden(folder)
    # A logger that fails takes none of our metrics either.
    assert ("lightning_perf:" in ended.stderr) == (fault == "logger")


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("fault", KILLED)
def test_what_was_recorded_outlives_a_kill(trainings: Trainings, fault: str, profiler: str) -> None:
    """Finished windows are whole; one cut short has a hidden name, and memray still reads it."""
    ended, folder = trainings(fault, profiler)
    assert ended.ended == trainings(fault, "")[0].ended, ended.stderr
    assert whole(folder) == DONE
    left = hidden(folder)
    assert all(path.name.startswith(".spool-rank0-") for path in left)
    if profiler == "Memray":
        (capture,) = left
        read(capture)


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("fault", EARLY)
def test_before_the_first_batch_there_is_nothing_to_keep(
    trainings: Trainings, fault: str, profiler: str
) -> None:
    """A run that does not begin ends as it would without us, and leaves no file."""
    ended, folder = trainings(fault, profiler)
    assert ended.ended == trainings(fault, "")[0].ended, ended.stderr
    assert ended.code != 0
    assert not whole(folder)
    assert not hidden(folder)


@pytest.mark.parametrize("profiler", PROFILERS)
def test_where_nothing_goes_wrong_nothing_differs(trainings: Trainings, profiler: str) -> None:
    """The cases above are not told from one another by faults of their own."""
    ended, folder = trainings("none", profiler)
    assert ended.ended == trainings("none", "")[0].ended
    assert ended.code == 0
    assert whole(folder) == DONE | files(profiler, 12, 14)
    assert "lightning_perf:" not in ended.stderr


def endless(flag: Path) -> Setting:
    """Trains until it is killed; the flag says that it has begun."""
    return Setting(after=[Planted("on_train_batch_end", flag.touch)], options={"max_epochs": -1})


@pytest.mark.parametrize("milliseconds", range(0, 400, 50))
def test_files_are_whole_at_any_moment(nursery: Nursery, tmp_path: Path, milliseconds: int) -> None:
    """Whatever a SIGKILL finds us at, a file with its final name is complete."""
    flag, every = tmp_path / "begun", PyTorch(schedule="every 1ba", batches_per_trace=1)
    child = nursery.start(tmp_path / "process", fit, tmp_path / "out", endless, flag, ours=[every])
    await_files(tmp_path, {f"{tmp_path.name}/begun"})
    time.sleep(milliseconds / 1000)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().code == -signal.SIGKILL
    assert len(whole(tmp_path / "out") - READMES) > 1
