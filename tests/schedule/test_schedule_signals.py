"""Capture on demand: the handler, and who else it minds."""

import os
import signal
import threading

import pytest

from lightning_perf.core.progress import Moment, Timestamp
from lightning_perf.errors import ConfigError, PerfWarning
from lightning_perf.schedule import Context, OnSignal

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs POSIX signals")
START = Moment("train", Timestamp(), Timestamp())


@pytest.fixture
def before():
    """A handler that was there first, which counts; the one of the test process comes back."""
    received = []
    original = signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    yield received
    signal.signal(signal.SIGUSR2, original)


def send():
    os.kill(os.getpid(), signal.SIGUSR2)


def windows(schedule, batches):
    found = {}
    for batch in batches:
        moment = START.ahead(batch)
        schedule.observe(moment)
        found[batch] = schedule.window(moment)
    return {batch: window for batch, window in found.items() if window is not None}


def test_a_signal_opens_a_window(before):
    """A signal during batch 2 is seen after it, and opens the window one batch later."""
    schedule = OnSignal(lasting="2ba")
    schedule.setup(Context())
    assert windows(schedule, range(3)) == {}
    send()
    assert windows(schedule, range(3, 9)) == {4: 1, 5: 1}
    schedule.close()


def test_a_signal_during_a_window_opens_another(before):
    """Nobody's request is lost, and two in one window are one."""
    schedule = OnSignal(lasting="2ba")
    schedule.setup(Context())
    send()
    assert windows(schedule, range(2)) == {1: 1}
    send()
    send()
    assert windows(schedule, range(2, 9)) == {2: 1, 4: 2, 5: 2}
    schedule.close()


def test_a_handler_that_was_there_is_called_and_put_back(before):
    """We chain to the handler before us, and leave it as we found it."""
    first = signal.getsignal(signal.SIGUSR2)
    schedule = OnSignal()
    schedule.setup(Context())
    send()
    assert before == [1]
    schedule.close()
    schedule.close()
    assert signal.getsignal(signal.SIGUSR2) is first


def test_a_handler_that_came_later_stays(before):
    """What was installed over ours is not ours to remove."""
    schedule = OnSignal()
    schedule.setup(Context())
    ours = signal.getsignal(signal.SIGUSR2)
    later = lambda *arguments: ours(*arguments)  # noqa: E731
    signal.signal(signal.SIGUSR2, later)
    schedule.close()
    assert signal.getsignal(signal.SIGUSR2) is later
    send()
    assert before == [1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_schedules_share_a_signal(before, order):
    """Both hear it, and whichever closes first, the handler before them is back at the end."""
    first = signal.getsignal(signal.SIGUSR2)
    schedules = [OnSignal(lasting="1ba"), OnSignal(lasting="2ba")]
    for schedule in schedules:
        schedule.setup(Context())
    send()
    assert [list(windows(schedule, range(4))) for schedule in schedules] == [[1], [1, 2]]
    for index in order:
        schedules[index].close()
    assert signal.getsignal(signal.SIGUSR2) is first
    send()
    assert before == [1, 1]


def test_a_released_handler_that_others_put_back_only_passes_on(before):
    """Lightning restores at the end of a run what it found; another run is not troubled by it."""
    first = signal.getsignal(signal.SIGUSR2)
    schedule = OnSignal(lasting="1ba")
    schedule.setup(Context())
    found_by_lightning = signal.getsignal(signal.SIGUSR2)
    schedule.close()
    signal.signal(signal.SIGUSR2, found_by_lightning)
    send()
    assert before == [1]
    schedule.setup(Context())
    assert windows(schedule, range(3)) == {}
    schedule.close()
    assert signal.getsignal(signal.SIGUSR2) is first


def test_the_default_action_comes_back_for_a_released_handler():
    """Where nothing was there before, a released handler steps aside, and the default acts."""
    original = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        schedule = OnSignal("SIGCHLD")
        schedule.setup(Context())
        ours = signal.getsignal(signal.SIGCHLD)
        schedule.close()
        signal.signal(signal.SIGCHLD, ours)
        os.kill(os.getpid(), signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, original)


def test_outside_the_main_thread_it_warns_and_never_holds(before):
    """Only the main thread can take a signal; elsewhere training goes on without it."""
    schedule, caught = OnSignal(), []

    def work():
        with pytest.warns(PerfWarning, match="main thread") as warned:
            schedule.setup(Context())
        caught.extend(warned)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1
    send()
    assert windows(schedule, range(4)) == {}
    schedule.close()


@pytest.mark.parametrize(
    "name", ["SIGNOTHING", "usr2", "SIGKILL", "SIGTERM", "SIGINT", "SIG_DFL", 12]
)
def test_refuses(name):
    """Unknown signals, and those that end a process or training, are refused at construction."""
    with pytest.raises(ConfigError, match="SIGUSR2"):
        OnSignal(name)


def test_refuses_a_fraction():
    """How long a window lasts must not depend on a length of training that may be unknown."""
    with pytest.raises(ConfigError, match="lasting"):
        OnSignal(lasting="0.1dur")
