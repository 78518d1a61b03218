"""A background thread that never blocks the thread that submits jobs, and bounded waits."""

from __future__ import annotations

import heapq
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_perf.errors import warn
from lightning_perf.terminal import new_console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")
Job = Callable[[], object]
#: Seconds between two looks at what may end a wait.
_POLL = 0.1


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

    def drain(
        self,
        timeout: float,
        progress: Callable[[int], None] | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait at most ``timeout`` seconds until all jobs are done; return whether they are.

        ``progress`` is called with the number of jobs left, first and at each change. When
        ``until`` is true, the wait ends.
        """
        deadline, shown = time.monotonic() + timeout, -1
        while True:
            if (left := self.pending) != shown and progress is not None:
                self._perform("progress", partial(progress, left), Exception)
            shown, seconds = left, deadline - time.monotonic()
            if not left or seconds <= 0 or until():
                return not left
            with self._guard():
                self._changed.wait_for(lambda: self.pending != shown, min(seconds, _POLL))  # noqa: B023

    def close(
        self,
        timeout: float,
        progress: Callable[[int], None] | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Refuse new jobs, run delayed ones now, and wait as `drain` does. May be called again.

        Jobs left after `timeout` seconds continue in the background.
        """
        with self._guard():
            self._closed = True
            self._changed.notify_all()
        return self.drain(timeout, progress, until)

    def abandon(self, timeout: float) -> bool:
        """Refuse new jobs, drop all that wait, and wait as `drain` does for the running one."""
        with self._guard():
            self._closed = True
            self._queue.clear()
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
            self._perform(*entry, BaseException)
            del entry  # an idle worker must not keep the objects of its last job alive
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

    def _perform(self, label: str, job: Job, caught: type[BaseException]) -> None:
        try:
            job()
        except caught as error:
            warn(f"{label} failed in the background ({type(error).__name__}: {error})")


def wait_until(done: Callable[[], bool], timeout: float) -> None:
    """Poll `done`, at least once, until it is true or `timeout` seconds have passed."""
    until = time.monotonic() + timeout
    while not done() and time.monotonic() < until:
        time.sleep(0.001)


@contextmanager
def waiting(what: str, jobs: int, timeout: float) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar for ``jobs`` on a terminal, and one line elsewhere.

    Yields a function to call with the number of jobs left when it changes; None without a bar.
    """
    from rich.progress import Progress

    def text(left: int) -> str:
        return f"lightning_perf: {what}: {left} left (at most {timeout:.0f} s)"

    console = new_console(stderr=True)
    if not console.is_terminal:
        print(text(jobs), file=sys.stderr)  # noqa: T201
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(text(jobs), total=jobs)
        yield lambda left: bar.update(task, completed=jobs - left, description=text(left))
