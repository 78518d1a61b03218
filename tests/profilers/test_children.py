"""Child processes record when their parent does, and are otherwise left as they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lightning_perf.profilers import processes
from lightning_perf.profilers.processes import Children

METHODS = ["fork", "spawn", "forkserver"]


def note(path: Path, number: int) -> Generator[None, None, None]:
    """Record nothing but whose recording it was."""
    path.write_text(f"{number} {os.getpid()}")
    yield
    yield


def broken(path: Path, number: int) -> Generator[None, None, None]:
    """A recorder that cannot start."""
    raise RuntimeError("planted")
    yield


def job(inbox: Any, outbox: Any) -> None:
    """Send back what comes, until None does."""
    for item in iter(inbox.get, None):
        outbox.put((item, os.getpid(), signal.getsignal(signal.SIGURG) is not None))


@contextmanager
def child(method: str) -> Iterator[tuple[Any, Callable[[], tuple[int, int, bool]]]]:
    """A process that answers, and how to ask it."""
    context = multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=job, args=(inbox, outbox))
    process.start()

    def ask() -> tuple[int, int, bool]:
        inbox.put(6)
        return outbox.get(timeout=60)

    try:
        yield process, ask
    finally:
        inbox.put(None)
        process.join(60)


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings lie in a folder of the test's."""
    monkeypatch.chdir(tmp_path)


_spools = count(1)


def spool() -> Path:
    """Where the parent of a window's children records."""
    return Path(f".spool-{next(_spools)}.bin")


@contextmanager
def following(record: Any = note) -> Iterator[Children]:
    recorder = Children(record)
    try:
        yield recorder
    finally:
        recorder.leave()
        recorder.remove()


def begin(recorder: Children, *asks: Callable[[], object]) -> None:
    """Open a window, and give the children work until they record: idle ones do not begin."""
    recorder.open(spool())
    until = time.monotonic() + 60
    while len(list(recorder._folders[-1].glob("*.on"))) < len(asks):
        assert time.monotonic() < until
        for ask in asks:
            ask()


@pytest.mark.parametrize("method", METHODS)
def test_a_child_records_while_a_window_is_open(method: str) -> None:
    """Each window has its own file, of a child that was there before, however it was started."""
    with following() as recorder, child(method) as (process, ask):
        ask()
        for _ in range(2):
            begin(recorder, ask)
            assert ask()[:2] == (6, process.pid)
            (found,) = recorder.shut().wait().values()
            assert found.read_text() == f"1 {process.pid}"
            assert found.is_relative_to(Path.cwd())  # the system's folder may be small
    assert process.exitcode == 0
    assert list(Path().iterdir()) == []


def test_a_child_that_is_born_in_a_window_records_from_its_beginning() -> None:
    """It need not look first, and what it leaves when it ends is kept."""
    with following() as recorder:
        recorder.open(spool())
        with child("fork") as (process, _):
            pass
        files = recorder.shut()
        assert files.numbers == (1,)
        assert files.wait()[1].read_text() == f"1 {process.pid}"


def test_without_a_window_nothing_is_left() -> None:
    """A run without a recording is one without files."""
    with following() as recorder, child("fork") as (_, ask):
        ask()
        assert list(recorder._marker.parent.iterdir()) == []
    assert list(Path().iterdir()) == []


def test_a_child_that_is_killed_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded, and the other children's files are there."""
    monkeypatch.setattr(processes, "_PATIENCE", 0.5)
    with following() as recorder, child("fork") as (victim, one), child("fork") as (_, other):
        begin(recorder, one, other)
        victim.kill()
        victim.join(60)
        assert set(recorder.shut().wait()) == {2}


@pytest.mark.parametrize("method", METHODS)
def test_a_recorder_that_fails_costs_the_child_nothing(method: str) -> None:
    """The target runs to its end, with what it returns."""
    with following(broken) as recorder, child(method) as (process, ask):
        ask()
        recorder.open(spool())
        time.sleep(0.1)
        assert ask()[:2] == (6, process.pid)
        assert recorder.shut().numbers == ()
    assert process.exitcode == 0


def test_processes_start_as_ever_once_nobody_follows() -> None:
    """The one method that is replaced is put back when the last one leaves, in any order."""
    plain = BaseProcess.start
    first, second = Children(note), Children(note)
    assert BaseProcess.start is not plain
    first.leave()
    assert BaseProcess.start is not plain
    second.leave()
    second.leave()
    assert BaseProcess.start is plain
    for recorder in (first, second):
        recorder.remove()


def test_who_replaced_it_after_us_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stays below theirs and does nothing, and is not put on top of itself the next time."""
    plain = BaseProcess.start
    with following():
        below = BaseProcess.start
        BaseProcess.start = lambda self: below(self)
    try:
        theirs = BaseProcess.start
        with child("fork") as (process, ask):
            assert ask()[0] == 6
        with following() as recorder:
            assert BaseProcess.start is theirs
            recorder.open(spool())
            with child("fork") as (process, ask):
                ask()
            assert set(recorder.shut().wait()) == {1}
        assert process.exitcode == 0
    finally:
        BaseProcess.start = below
        with following():
            pass
    assert BaseProcess.start is plain


def test_two_followers_both_get_their_files() -> None:
    """Two profilers may follow the same child, which records for one at a time."""
    with following() as one, following() as other, child("fork") as (_, ask):
        for recorder in (one, other, one):
            begin(recorder, ask)
            assert set(recorder.shut().wait()) == {1}


def test_a_process_that_cannot_start_is_as_it_was() -> None:
    """The error is the user's own, and a second try has the same target."""
    with following():
        process = multiprocessing.get_context("spawn").Process(target=lambda: None)
        target = process._target
        with pytest.raises((AttributeError, Exception), match=r"pickle|local object"):
            process.start()
        assert process._target is target
