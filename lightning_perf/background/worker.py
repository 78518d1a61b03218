"""One background thread that never holds up the thread which feeds it."""

from __future__ import annotations

import heapq
import os
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lightning_perf.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@dataclass(order=True, slots=True)
class _Entry:
    #: On `time.monotonic`.
    due: float
    number: int
    label: str = field(compare=False)
    job: Callable[[], object] = field(compare=False)


def _warn(label: str, error: BaseException) -> None:
    warn(f"{label} failed in the background ({type(error).__name__}: {error})")


class Worker:
    """Runs jobs one after the other on a daemon thread that is started by the first of them.

    After a fork, the child begins with an empty queue and a thread of its own: what the parent
    queued, the parent does.

    Args:
        name: The thread's name.
        capacity: How many jobs may wait.
        on_error: Called on the worker thread with a job's label and what the job raised; by
            default that becomes a warning. The thread lives on.

    Example:
        >>> worker = Worker("example")
        >>> worker.call(lambda: 6 * 7, timeout=10.0)
        42
        >>> worker.close(timeout=10.0)
        True
    """

    def __init__(
        self,
        name: str,
        capacity: int = 256,
        on_error: Callable[[str, BaseException], None] = _warn,
    ) -> None:
        self._name, self._capacity, self._on_error = name, capacity, on_error
        self._reset()

    @property
    def pending(self) -> int:
        """How many jobs wait or run, those that are delayed included."""
        with self._guard():
            return len(self._queue) + self._running

    def submit(self, job: Callable[[], object], label: str, delay: float = 0.0) -> bool:
        """Queue a job; never waits.

        Args:
            job: What to run; it handles its own errors, and `on_error` hears of those that it
                does not.
            label: What to call the job in messages.
            delay: Seconds to wait before it may run. Closing cuts that short.

        Returns:
            False if it was not queued: the queue is full or closed, or no thread can be started.
        """
        with self._guard():
            if self._closed or len(self._queue) >= self._capacity or not self._start():
                return False
            self._count += 1
            heapq.heappush(self._queue, _Entry(time.monotonic() + delay, self._count, label, job))
            self._changed.notify_all()
            return True

    def call(self, fn: Callable[[], T], timeout: float) -> T:
        """Run a function on the worker and wait for its result.

        Args:
            fn: What to run, after all that is due before it.
            timeout: The longest wait, in seconds.

        Returns:
            What it returned.

        Raises:
            TimeoutError: If there is no result in time or the job was not taken. A function that
                has not begun by then never does.
            Exception: Whatever the function raised.
        """
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn())
                except BaseException as error:
                    future.set_exception(error)

        if not self.submit(job, getattr(fn, "__name__", "call")):
            raise TimeoutError(f"{self._name} takes no more jobs")
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def drain(self, timeout: float, progress: Callable[[int], None] | None = None) -> bool:
        """Wait until there is nothing left to do.

        Args:
            timeout: The longest wait, in seconds.
            progress: Called with the number of jobs left, at first and whenever it changes; what
                it raises goes to `on_error`.

        Returns:
            Whether all was done in time.
        """
        deadline = time.monotonic() + timeout
        told = -1
        while True:
            if (left := self.pending) != told and progress is not None:
                self._perform("progress", partial(progress, left), Exception)
            told = left
            seconds = deadline - time.monotonic()
            if not left or seconds <= 0:
                return not left
            self._await_change(left, seconds)

    def close(self, timeout: float, progress: Callable[[int], None] | None = None) -> bool:
        """Refuse new jobs, run the delayed ones at once, and wait; closing twice is harmless.

        Args:
            timeout: The longest wait, in seconds. What is still waiting then goes on in the
                background for as long as the process lives.
            progress: As for `drain`.

        Returns:
            Whether all was done in time.
        """
        with self._guard():
            self._closed = True
            self._changed.notify_all()
        return self.drain(timeout, progress)

    @contextmanager
    def local(self) -> Iterator[None]:
        """What a job does within needs this machine alone: ``abandon`` waits until it is done."""
        with self._guard():
            self._local += 1
        try:
            yield
        finally:
            with self._guard():
                self._local -= 1
                self._changed.notify_all()

    def abandon(self, timeout: float) -> bool:
        """Begin no further job, and let the present one finish what is local.

        Args:
            timeout: The longest wait, in seconds.

        Returns:
            Whether nothing local was cut off.
        """
        with self._guard():
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._local, timeout)

    def _await_change(self, seen: int, timeout: float) -> None:
        with self._guard():
            self._changed.wait_for(lambda: self.pending != seen, timeout)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        self._queue: list[_Entry] = []
        self._running = self._local = 0
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def _guard(self) -> threading.Condition:
        """The lock of this process: the parent's may have been held while it forked."""
        if self._pid != os.getpid():
            self._reset()
        return self._changed

    def _start(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down, or there are too many threads
                return False
            self._thread = thread
        return True

    def _loop(self) -> None:
        while (entry := self._take()) is not None:
            self._perform(entry.label, entry.job, BaseException)
            del entry  # or an idle worker would keep alive what its last job held
            with self._changed:
                self._running = 0
                self._changed.notify_all()

    def _take(self) -> _Entry | None:
        """The next job that is due; None when the queue is closed and empty."""
        with self._changed:
            while self._queue or not self._closed:
                wait = self._queue[0].due - time.monotonic() if self._queue else None
                if wait is not None and (self._closed or wait <= 0):
                    self._running = 1
                    return heapq.heappop(self._queue)
                self._changed.wait(wait)
            return None

    def _perform(self, label: str, job: Callable[[], object], caught: type[BaseException]) -> None:
        try:
            job()
        except caught as error:
            # A handler that raises, as warning does where warnings are errors, must not end the
            # thread.
            with suppress(Exception):
                self._on_error(label, error)
