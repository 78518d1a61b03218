"""OnSignal: its windows, and how its handler works with other handlers."""

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
    """An earlier handler that counts its calls; the original one is restored at the end."""
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
    """A signal during batch 2 is noticed after it and opens a window one batch later."""
    schedule = OnSignal(lasting="2ba")
    schedule.setup(Context())
    assert windows(schedule, range(3)) == {}
    send()
    assert windows(schedule, range(3, 9)) == {4: 1, 5: 1}
    schedule.close()


def test_a_signal_during_a_window_opens_another(before):
    """Signals during a window open one more window after it."""
    schedule = OnSignal(lasting="2ba")
    schedule.setup(Context())
    send()
    assert windows(schedule, range(2)) == {1: 1}
    send()
    send()
    assert windows(schedule, range(2, 9)) == {2: 1, 4: 2, 5: 2}
    schedule.close()


def test_an_earlier_handler_is_called_and_restored(before):
    """The earlier handler is called for each signal and restored by `close`."""
    first = signal.getsignal(signal.SIGUSR2)
    schedule = OnSignal()
    schedule.setup(Context())
    send()
    assert before == [1]
    schedule.close()
    schedule.close()
    assert signal.getsignal(signal.SIGUSR2) is first


def test_a_later_handler_is_kept(before):
    """`close` does not remove a handler that was installed after ours."""
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
    """Both receive it, and the earlier handler is restored whichever closes first."""
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


def test_a_released_handler_that_is_installed_again_only_forwards(before):
    """Lightning may restore our released handler; it then has no effect on another run."""
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


def test_a_released_handler_restores_the_default_action():
    """Without an earlier handler, a released one restores the default action."""
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


def test_outside_the_main_thread_it_warns_and_is_never_true(before):
    """Only the main thread can install a handler; elsewhere one warning is shown."""
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
    "name", ["SIGNOTHING", "usr2", "SIGKILL", "SIGTERM", "SIGINT", "SIGIOT", "SIG_DFL", 12]
)
def test_refuses(name):
    """Unknown signals, and those that end a process or training, are refused."""
    with pytest.raises(ConfigError, match="SIGUSR2"):
        OnSignal(name)


def test_refuses_a_fraction():
    """The length of a window must not depend on the length of the training."""
    with pytest.raises(ConfigError, match="lasting"):
        OnSignal(lasting="0.1dur")
