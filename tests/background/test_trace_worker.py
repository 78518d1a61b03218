"""The background worker: order, bounds, errors, delays, closing and forks."""

import os
import threading

import pytest

from lightning_perf.background.worker import Worker
from lightning_perf.errors import PerfWarning

PATIENCE = 30.0
FOREVER = 3600.0


@pytest.fixture
def worker():
    worker = Worker("test worker", capacity=3)
    yield worker
    assert worker.close(PATIENCE)


@pytest.fixture
def gate(worker):
    """An event that holds the worker up until it is set."""
    gate, held = threading.Event(), threading.Event()
    worker.submit(lambda: (held.set(), gate.wait(PATIENCE)), "gate")
    assert held.wait(PATIENCE)
    yield gate
    gate.set()


def test_jobs_run_in_order_on_one_daemon_thread(worker):
    """Jobs run one after the other, on a thread that does not keep the process alive."""
    seen = []
    for number in range(3):
        worker.submit(lambda n=number: seen.append((n, threading.current_thread())), "job")
    assert worker.drain(PATIENCE)
    assert [number for number, _ in seen] == [0, 1, 2]
    (thread,) = {thread for _, thread in seen}
    assert thread.daemon
    assert thread.name == "test worker"


def test_no_thread_before_the_first_job():
    """A worker that is given nothing costs no thread."""
    before = threading.active_count()
    idle = Worker("idle")
    assert threading.active_count() == before
    assert idle.drain(0.0)
    assert idle.close(0.0)


def test_a_full_queue_refuses_at_once(worker, gate):
    """Beyond its capacity a job is refused and never run, and the caller does not wait."""
    seen = []
    taken = [worker.submit(lambda n=number: seen.append(n), "job") for number in range(5)]
    assert taken == [True, True, True, False, False]
    assert worker.pending == 4
    gate.set()
    assert worker.drain(PATIENCE)
    assert seen == [0, 1, 2]
    assert worker.pending == 0


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(1)])
def test_it_survives_what_a_job_raises(error):
    """An error goes to on_error with the job's label, and the next job runs."""
    errors, seen = [], []

    def fail():
        raise error

    worker = Worker("test", on_error=lambda *what: errors.append(what))
    worker.submit(fail, "failing")
    worker.submit(lambda: seen.append(1), "next")
    assert worker.close(PATIENCE)
    assert errors == [("failing", error)]
    assert seen == [1]


def test_an_error_warns_by_default(worker):
    """Without a handler of one's own, what a job raises becomes a warning with its label."""
    worker.submit(lambda: 1 / 0, "division", delay=FOREVER)
    with pytest.warns(PerfWarning, match="division failed .*ZeroDivisionError"):
        assert worker.close(PATIENCE)


def test_it_survives_a_handler_that_raises():
    """A handler's own error, such as a warning turned into one, does not end the thread."""
    seen = []

    def handler(label, error):
        raise RuntimeError(label)

    worker = Worker("test", on_error=handler)
    worker.submit(lambda: 1 / 0, "failing")
    worker.submit(lambda: seen.append(1), "next")
    assert worker.close(PATIENCE)
    assert seen == [1]


def test_call_gives_the_result(worker):
    """A function's result comes back from the worker's thread."""
    assert worker.call(lambda: threading.current_thread().name, PATIENCE) == "test worker"


def test_call_raises_what_the_function_raised(worker):
    """The caller sees the function's own error, and on_error does not."""
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0, PATIENCE)


def test_call_gives_up_in_time(worker, gate):
    """A caller waits no longer than it said, and what it gave up is not run behind its back."""
    seen = []
    with pytest.raises(TimeoutError):
        worker.call(lambda: seen.append(1), 0.01)
    gate.set()
    assert worker.drain(PATIENCE)
    assert seen == []


def test_call_on_a_closed_worker_times_out_at_once(worker):
    """Nobody waits for a worker that takes no jobs."""
    worker.close(PATIENCE)
    with pytest.raises(TimeoutError, match="takes no more"):
        worker.call(lambda: 1, FOREVER)


def test_a_delayed_job_waits_while_others_pass(worker):
    """A delayed job does not hold up those behind it, and counts as pending."""
    seen = []
    worker.submit(lambda: seen.append("late"), "late", delay=0.05)
    worker.submit(lambda: seen.append("now"), "now")
    assert worker.drain(PATIENCE)
    assert seen == ["now", "late"]


def test_closing_runs_delayed_jobs_at_once(worker):
    """A delay is cut short by closing, so that a last attempt is made."""
    seen = []
    worker.submit(lambda: seen.append(1), "late", delay=FOREVER)
    assert not worker.drain(0.01)
    assert worker.close(PATIENCE)
    assert seen == [1]


def test_a_closed_worker_refuses(worker):
    """After closing, which may happen twice, nothing is taken: not even by a last retry."""
    retried = []
    worker.submit(lambda: retried.append(worker.submit(lambda: None, "again")), "job", FOREVER)
    assert worker.close(PATIENCE)
    assert worker.close(PATIENCE)
    assert retried == [False]
    assert not worker.submit(lambda: None, "late")


def test_drain_and_close_are_bounded(worker, gate):
    """Neither waits for a job that hangs."""
    assert not worker.drain(0.01)
    assert not worker.close(0.01)
    assert worker.pending == 1


def test_progress_tells_how_many_jobs_are_left(worker, gate):
    """The number of jobs left is told at first and at the end, and never rises meanwhile."""
    told = []

    def progress(left):
        told.append(left)
        gate.set()

    worker.submit(lambda: None, "job")
    assert worker.close(PATIENCE, progress)
    assert told[0] == 2
    assert told[-1] == 0
    assert told == sorted(told, reverse=True)


def test_progress_that_raises_is_no_error_of_the_run(worker, gate):
    """A broken progress bar becomes a warning, and closing still waits."""

    def progress(left):
        gate.set()
        raise RuntimeError("no terminal")

    with pytest.warns(PerfWarning, match="no terminal"):
        assert worker.close(PATIENCE, progress)


def test_without_a_thread_nothing_is_taken(worker, monkeypatch):
    """Where no thread can be started, as at interpreter shutdown, the caller is told."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert not worker.submit(lambda: None, "job")
    assert worker.pending == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_it_works_again_after_a_fork(worker, gate):
    """A child has a thread of its own and leaves the parent's jobs to the parent."""
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


def test_an_abandoned_worker_finishes_what_is_local_and_begins_nothing():
    """What is being made is made; neither the rest of its job nor the next job is waited for."""
    worker = Worker("test worker")
    begun, made, seen, hang = threading.Event(), threading.Event(), [], threading.Event()

    def job():
        with worker.local():
            begun.set()
            made.wait(PATIENCE)
            seen.append("made")
        hang.wait(PATIENCE)

    worker.submit(job, "job")
    worker.submit(lambda: seen.append("next"), "next")
    assert begun.wait(PATIENCE)
    assert not worker.close(0.0)
    assert not worker.abandon(0.0)
    made.set()
    assert worker.abandon(PATIENCE)
    assert seen == ["made"]
    hang.set()
    assert worker.drain(PATIENCE)
    assert seen == ["made"]
