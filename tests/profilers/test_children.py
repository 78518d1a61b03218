"""Child processes record in the windows of their parent, and are otherwise unchanged."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from math import inf
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_perf import background
from lightning_perf.profilers.processes import Children

pytestmark = pytest.mark.slow

METHODS = ["fork", "spawn", "forkserver"]


def note(path: Path, number: int) -> Generator[None, None, None]:
    """A recorder that writes the number and the id of its process."""
    path.write_text(f"{number} {os.getpid()}")
    yield
    yield


def broken(path: Path, number: int) -> Generator[None, None, None]:
    """A recorder that cannot start."""
    raise RuntimeError("planted")
    yield


def job(inbox: Any, outbox: Any) -> None:
    """Send back each item, until None."""
    for item in iter(inbox.get, None):
        outbox.put((item, os.getpid(), signal.getsignal(signal.SIGURG) is not None))


@contextmanager
def child(method: str) -> Iterator[tuple[Any, Callable[[], tuple[int, int, bool]]]]:
    """A process that sends back items, and a function that sends it one."""
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
    """Use the test's folder for recordings."""
    monkeypatch.chdir(tmp_path)


_spools = count(1)


def spool() -> Path:
    """The path of a parent's recording."""
    return Path(f".spool-{next(_spools)}.bin")


@contextmanager
def recording_children(record: Any = note) -> Iterator[Children]:
    recorder = Children(record)
    try:
        yield recorder
    finally:
        recorder.leave()
        recorder.remove()


def begin(recorder: Children, *sends: Callable[[], object]) -> Path:
    """Open a window, and send items to the children until they record; idle ones do not start."""
    folder = recorder.open(spool())
    until = time.monotonic() + 60
    while len(list(folder.glob("*.on"))) < len(sends):
        assert time.monotonic() < until
        for send in sends:
            send()
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_child_records_while_a_window_is_open(method: str) -> None:
    """A child that was started before leaves one file per window, for all start methods."""
    with recording_children() as recorder, child(method) as (process, ask):
        ask()
        for _ in range(2):
            begin(recorder, ask)
            assert ask()[:2] == (6, process.pid)
            (found,) = recorder.shut().wait().values()
            assert found.read_text() == f"1 {process.pid}"
            assert found.is_relative_to(Path.cwd())  # the system's folder may be small
    assert process.exitcode == 0
    assert list(Path().iterdir()) == []


def test_a_slow_disk_does_not_end_a_recording_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that the watching thread read before the start does not count as the window's end."""

    def slowed(read: Any) -> Any:
        def slow(path: Path, *args: Any, **options: Any) -> Any:
            content = read(path, *args, **options)
            if threading.current_thread() is threading.main_thread():
                time.sleep(0.1)
            return content

        return slow

    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, slowed(getattr(Path, name)))
    with recording_children() as recorder, child("fork") as (_, ask):
        ask()
        folder = begin(recorder, ask)
        for _ in range(5):
            time.sleep(0.02)
            ask()
        assert not (folder / "1").exists()
        assert recorder.shut().wait()


def test_a_child_started_in_a_window_records_at_once() -> None:
    """Its file exists when it ends within the window."""
    with recording_children() as recorder:
        recorder.open(spool())
        with child("fork") as (process, _):
            pass
        files = recorder.shut()
        assert files.numbers == (1,)
        assert files.wait()[1].read_text() == f"1 {process.pid}"


def test_without_a_window_there_are_no_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording needs an open window."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with recording_children(), child("fork") as (_, ask):
        ask()
        assert list(temporary.glob("lightning_perf-*/*")) == []
    assert list(Path().iterdir()) == []


def test_the_wait_for_a_killed_child_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the wait, the files of the other children are returned."""

    def clock() -> float:
        """The wait is over once the other child has written its file."""
        return inf if (folder / "2").exists() else 0.0

    patched = SimpleNamespace(monotonic=clock, sleep=time.sleep)
    with (
        recording_children() as recorder,
        child("fork") as (victim, one),
        child("fork") as (_, other),
    ):
        folder = begin(recorder, one, other)
        victim.kill()
        victim.join(60)
        files = recorder.shut()
        monkeypatch.setattr(background, "time", patched)
        assert set(files.wait()) == {2}


def test_a_failing_recorder_does_not_change_the_child() -> None:
    """The target runs to its end."""
    with recording_children(broken) as recorder, child("fork") as (process, ask):
        ask()
        recorder.open(spool())
        time.sleep(0.1)
        assert ask()[:2] == (6, process.pid)
        assert recorder.shut().numbers == ()
    assert process.exitcode == 0


def test_the_patch_is_removed_with_the_last_profiler() -> None:
    """BaseProcess.start is restored, in any order of removal."""
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


def test_a_later_patch_of_another_library_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our patch stays below and inactive, and is not applied twice."""
    plain = BaseProcess.start
    with recording_children():
        below = BaseProcess.start
        BaseProcess.start = lambda self: below(self)
    try:
        theirs = BaseProcess.start
        with child("fork") as (process, ask):
            assert ask()[0] == 6
        with recording_children() as recorder:
            assert BaseProcess.start is theirs
            recorder.open(spool())
            with child("fork") as (process, ask):
                ask()
            assert set(recorder.shut().wait()) == {1}
        assert process.exitcode == 0
    finally:
        BaseProcess.start = below
        with recording_children():
            pass
    assert BaseProcess.start is plain


def test_two_profilers_get_files_of_the_same_child() -> None:
    """The child records for one of them at a time."""
    with recording_children() as one, recording_children() as other, child("fork") as (_, ask):
        for recorder in (one, other, one):
            begin(recorder, ask)
            assert set(recorder.shut().wait()) == {1}


def test_a_process_that_cannot_start_is_unchanged() -> None:
    """The error is that of multiprocessing, and the target is the user's."""
    with recording_children():
        process = multiprocessing.get_context("spawn").Process(target=lambda: None)
        target = process._target
        with pytest.raises((AttributeError, Exception), match=r"pickle|local object"):
            process.start()
        assert process._target is target
