"""The sampler: one thread for all subscribers, and its behaviour on errors."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from helpers.small import ours

from lightning_perf.system import Sampler

LONG = 60.0


class Ticks:
    """Counts its reads and their threads."""

    name = "ticks"

    def __init__(self, fault: Exception | None = None) -> None:
        self.reads, self.fault, self.closed = 0, fault, threading.Event()
        self.threads: set[str] = set()

    def __call__(self, now: float, /) -> Mapping[str, float]:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        if self.fault is not None:
            raise self.fault
        return {self.name: float(self.reads)}


def of(*sensors: Ticks) -> Callable[[set[int]], contextmanager[Sequence[Ticks]]]:
    @contextmanager
    def open_sensors(processes: set[int]) -> Iterator[Sequence[Ticks]]:
        yield list(sensors)
        for sensor in sensors:
            sensor.closed.set()

    return open_sensors


def test_one_thread_reads_for_all_subscribers() -> None:
    """It samples at the shortest interval, and all subscribers get the totals."""
    ticks = Ticks()
    sampler = Sampler(of(ticks))
    sampler.subscribe("often", 30.0)
    sampler.subscribe("rarely", LONG)
    assert sampler.interval == 30.0
    assert sampler.refresh(60)
    assert sampler.refresh(60)
    assert set(sampler.totals()) == {"ticks"}
    assert sampler.latest["ticks"] == ticks.reads
    assert ticks.threads == {"lightning_perf system"}
    sampler.unsubscribe("often")
    assert sampler.interval == LONG
    assert sampler.refresh(60)
    sampler.unsubscribe("rarely")
    assert ticks.closed.wait(60)
    assert not sampler.refresh(60)


def test_a_subscriber_without_an_interval_leaves_the_choice_to_others() -> None:
    """Windows that need sensors start the sampler, and SystemMetrics may want fewer samples."""
    sampler = Sampler(of(Ticks()))
    sampler.subscribe("windows")
    assert sampler.interval == 1.0
    sampler.subscribe("rarely", LONG)
    assert sampler.interval == LONG
    sampler.unsubscribe("rarely")
    assert sampler.interval == 1.0
    sampler.unsubscribe("windows")
    assert not sampler.subscribed


def test_it_samples_by_itself() -> None:
    """It samples at its interval without being asked."""
    ticks = Ticks()
    sampler = Sampler(of(ticks))
    sampler.subscribe("me", 0.01)
    until = time.monotonic() + 60
    while ticks.reads < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert ticks.reads >= 5
    sampler.unsubscribe("me")


def test_leaving_does_not_wait_for_a_hanging_sensor() -> None:
    """A GPU driver that does not answer must not delay the end of a run."""
    hang, entered = threading.Event(), threading.Event()

    class Hangs(Ticks):
        def __call__(self, now: float, /) -> Mapping[str, float]:
            entered.set()
            hang.wait(60)
            return {}

    sensor = Hangs()
    sampler = Sampler(of(sensor))
    sampler.subscribe("me", LONG)
    assert entered.wait(60)
    assert not sampler.refresh(0.01)
    sampler.unsubscribe("me")
    assert not sensor.closed.is_set()
    hang.set()
    assert sensor.closed.wait(60)


def test_a_failing_sensor_warns_once_and_the_others_continue() -> None:
    """The warning names the sensor and the reason."""
    good, bad = Ticks(), Ticks(OSError("gone"))
    sampler = Sampler(of(bad, good))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler.subscribe("me", LONG)
        assert all(sampler.refresh(60) for _ in range(3))
    sampler.unsubscribe("me")
    assert (bad.reads, good.reads >= 3) == (1, True)
    assert ours(caught) == ["lightning_perf: ticks is no longer measured (OSError: gone)."]


def test_a_warning_as_error_does_not_end_the_sampling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With warnings as errors, as in this test, the thread continues."""
    good, bad = Ticks(), Ticks(OSError("gone"))
    sampler = Sampler(of(bad, good))
    sampler.subscribe("me", LONG)
    assert sampler.refresh(60)
    assert sampler.refresh(60)
    sampler.unsubscribe("me")
    assert good.closed.wait(60)
    assert "ticks is no longer measured" in caplog.text
    caplog.clear()


def test_it_can_start_again() -> None:
    """A trainer that fits and then tests samples both times."""
    sampler = Sampler(of(Ticks()))
    for _ in range(2):
        sampler.subscribe("me", LONG)
        assert sampler.refresh(60)
        assert sampler.refresh(60)
        assert sampler.totals()
        sampler.unsubscribe("me")


def test_an_unreferenced_sampler_is_freed_and_its_thread_ends() -> None:
    """The thread references no trainer: one that is dropped without teardown is freed."""
    ticks = Ticks()
    sampler = Sampler(of(ticks))
    sampler.subscribe("me", 0.05)
    assert sampler.refresh(60)
    ref = weakref.ref(sampler)
    gc.disable()  # so that no reference cycle needs a collector
    try:
        del sampler
        assert ticks.closed.wait(60)
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_can_sample() -> None:
    """The child of a process that samples has its own thread and locks."""
    sampler = Sampler()
    sampler.subscribe("parent", 0.01)
    assert sampler.refresh(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, because this process has threads
        pid = os.fork()
    if pid == 0:
        mine = Sampler()
        mine.subscribe("child", LONG)
        sampled = mine.refresh(60) and mine.refresh(60) and "free_memory" in mine.totals()
        os._exit(0 if sampled and mine.processes == {os.getpid()} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert sampler.refresh(60)
    sampler.unsubscribe("parent")
