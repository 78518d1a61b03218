"""A background thread that never blocks the thread that submits jobs, and bounded waits."""

from __future__ import annotations

import heapq
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_perf.errors import warn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

T = TypeVar("T")
Job = Callable[[], object]
#: Seconds between two looks at what may end a wait.
_POLL = 0.1
#: The delay of a job that runs before all others, and that `Worker.abandon` does not drop.
URGENT = -inf


class Worker:
    """Runs jobs in sequence on a daemon thread of this name, which the first job starts.

    At most ``capacity`` jobs may wait. A job that raises is a warning with its label. After a fork,
    the child has an empty queue and its own thread; the parent runs its own jobs.

    Example:
        >>> worker = Worker("example")
        >>> worker.call(lambda: 6 * 7, timeout=10.0)
        42
        >>> worker.close(timeout=10.0)
        True
    """

    def __init__(self, name: str, capacity: int = 256) -> None:
        self._name, self._capacity = name, capacity
        self._reset()

    @property
    def pending(self) -> int:
        """The number of jobs that wait or run, including delayed ones."""
        with self._guard():
            return len(self._queue) + self._running

    def submit(self, job: Job, label: str, delay: float = 0.0) -> bool:
        """Queue a job, to be run after ``delay`` seconds or when the worker is closed; never waits.

        A job with the delay `URGENT` is run before all that wait, and is not dropped.

        Returns False if it was not queued: the queue is full or closed, or the thread cannot be
        started.
        """
        with self._guard():
            if self._closed or len(self._queue) >= self._capacity or not self._start():
                return False
            due = time.monotonic() + delay
            heapq.heappush(self._queue, (due, next(self._numbers), label, job))
            self._changed.notify_all()
            return True

    def call(self, fn: Callable[[], T], timeout: float) -> T:
        """Run a function on the worker, after all earlier jobs, and return its result.

        Raises:
            TimeoutError: There is no result after ``timeout`` seconds, or the job was not queued.
                A function that has not started by then is cancelled.
            Exception: The exception of the function.
        """
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn())
                except BaseException as error:
                    future.set_exception(error)

        if not self.submit(job, getattr(fn, "__name__", "call")):
            raise TimeoutError(f"{self._name} accepts no more jobs")
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def drain(self, timeout: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait at most ``timeout`` seconds until all jobs are done; return whether they are.

        Those that are delayed beyond now are waited for after `close` only. When ``until`` is
        true, the wait ends.
        """
        began = time.monotonic()
        deadline = began + timeout
        while not self._done(began) and (left := deadline - time.monotonic()) > 0 and not until():
            with self._guard():
                self._changed.wait_for(lambda: self._done(began), min(left, _POLL))
        return self._done(began)

    def _done(self, until: float) -> bool:
        """Whether no job runs, and none waits that was due by a time; or none at all, if closed."""
        with self._guard():
            waits = bool(self._queue) and (self._closed or self._queue[0][0] <= until)
            return not (self._running or waits)

    def close(self, timeout: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new jobs, run delayed ones now, and wait as `drain` does. May be called again.

        Jobs left after `timeout` seconds continue in the background.
        """
        with self._guard():
            self._closed = True
            self._changed.notify_all()
        return self.drain(timeout, until)

    def abandon(self, timeout: float) -> bool:
        """Refuse new jobs, drop all that wait but urgent ones, and wait as `drain` does."""
        with self._guard():
            self._closed = True
            self._queue[:] = [entry for entry in self._queue if entry[0] == URGENT]
        return self.close(timeout)

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Entered itself: Ctrl-C can raise in the methods of a Condition, which then stays locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: When they are due, their number (so that no jobs are compared), labels and jobs.
        self._queue: list[tuple[float, int, str, Job]] = []
        self._numbers = count()
        self._running = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def _guard(self) -> AbstractContextManager[Any]:
        """The lock of this process; after a fork the parent's may stay locked."""
        if self._pid != os.getpid():
            self._reset()
        return self._lock

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # at interpreter shutdown, or with too many threads
                return False
            self._thread = thread
        return True

    def _loop(self) -> None:
        # A Python profiler of the user has no use for this thread, and VizTracer (1.1.1) would
        # crash, because psutil, which the sampler imports here, calls C functions without a self.
        sys.setprofile(None)
        while (entry := self._take()) is not None:
            label, job = entry
            try:
                job()
            except BaseException as error:
                warn(f"{label} failed in the background ({type(error).__name__}: {error})")
            del entry, job  # an idle worker must not keep the objects of its last job alive
            with self._changed:
                self._running = 0
                self._changed.notify_all()

    def _take(self) -> tuple[str, Job] | None:
        """Wait for the next due job and its label; None when the queue is closed and empty."""
        with self._changed:
            while self._queue or not self._closed:
                wait = self._queue[0][0] - time.monotonic() if self._queue else None
                if wait is not None and (self._closed or wait <= 0):
                    self._running = 1
                    return heapq.heappop(self._queue)[2:]
                self._changed.wait(wait)
            return None


def wait_until(done: Callable[[], bool], timeout: float, pause: float = 0.001) -> None:
    """Poll `done`, at least once, until it is true or `timeout` seconds have passed."""
    until = time.monotonic() + timeout
    while not done() and time.monotonic() < until:
        time.sleep(pause)
