"""A forked child counts what it must not change here."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from helpers.small import Records, Small, trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_perf import Flops, PerfWarning
from lightning_perf.background import wait_until
from lightning_perf.flops.child import in_child
from lightning_perf.run import flop_meter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


class Slots:
    __slots__ = ("calls", "mask")


SLOTS, LOCAL, CONTEXT = Slots(), threading.local(), ContextVar[float]("context")
VOCABULARY = dict.fromkeys(range(30_000), 1.0)
NUMBERS = iter(float(number) for number in range(1000))


class Elsewhere(Small):
    """A compiled layer, and a step that keeps tensors and counts in many places."""

    def __init__(self) -> None:
        super().__init__()
        SLOTS.calls, SLOTS.mask, LOCAL.mask = 0, None, None
        CONTEXT.set(1.0)
        self.compiled = torch.compile(nn.Linear(8, 8), backend="eager")
        self.large = np.zeros(1 << 18)

    def training_step(self, batch, batch_idx):
        loss = self.compiled(torch.ones(2, 8)).square().mean()
        if SLOTS.mask is None:
            SLOTS.mask = LOCAL.mask = torch.full((1,), 0.5)
        SLOTS.calls += 1
        CONTEXT.set(CONTEXT.get() * 1.01)
        VOCABULARY[len(VOCABULARY)] = VOCABULARY[0] = VOCABULARY[0] * 1.01
        self.large[0] += 1.0
        factor = SLOTS.calls * CONTEXT.get() * VOCABULARY[0] * next(NUMBERS) * self.large[0]
        print("step", batch_idx)
        return loss * factor * SLOTS.mask.mean() * LOCAL.mask.mean()


def fit(folder: Path, *callbacks: L.Callback) -> list[torch.Tensor]:
    global NUMBERS
    NUMBERS = iter(float(number) for number in range(1000))
    VOCABULARY.clear()
    VOCABULARY.update(dict.fromkeys(range(30_000), 1.0))
    L.seed_everything(0)
    module = Elsewhere()
    trainer(folder, *callbacks, logger=Records()).fit(module)
    return [each.detach().clone() for each in module.parameters()]


def test_a_step_with_state_elsewhere_trains_as_without_us(tmp_path, capsys):
    """Weights are equal bit by bit, and prints come once, while FLOPs are counted."""
    expected = fit(tmp_path / "bare")
    printed = capsys.readouterr().out.count("step")
    flops = Flops("every 2ba")
    actual = fit(tmp_path / "ours", flops)
    assert capsys.readouterr().out.count("step") == printed > 0
    assert all(map(torch.equal, actual, expected))
    assert flops.metrics["batch_flops"] > 0


def test_files_and_connections_stay_with_the_parent(tmp_path):
    """What the function writes to an open file is lost, and the result arrives."""
    with (tmp_path / "log").open("w", buffering=1) as file:
        assert in_child(lambda: (file.write("child\n"), os.getpid())[1]) != os.getpid()
        file.write("parent\n")
    assert (tmp_path / "log").read_text() == "parent\n"


def test_a_failure_is_an_error_here():
    """An exception, an exit and a crash of the child have a text."""

    def fails():
        raise ValueError("no shapes")

    with pytest.raises(RuntimeError, match=r"^no shapes$"):
        in_child(fails)
    for end in (os.abort, lambda: os._exit(3), lambda: sys.exit(3)):
        with pytest.raises(RuntimeError, match=r"^its process ended$"):
            in_child(end)


def sleeps_shortly() -> None:
    while True:
        time.sleep(0.01)


def computes() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (threading.Event().wait, "it waits"),
        (sleeps_shortly, "it waits"),
        (computes, "it took more than 1 s"),
    ],
)
def test_a_child_that_would_not_end_is_ended(work, why):
    """A thread is not in the child, which waits for it in vain."""
    before = psutil.Process().children()
    with pytest.raises(RuntimeError, match=why):
        in_child(work, 1.0)
    assert psutil.Process().children() == before


def test_a_child_may_sleep():
    """A step may wait for a short time, and its own threads may compute meanwhile."""

    def adds(_):
        return sum(range(1 << 22))

    def works():
        time.sleep(0.5)
        with ThreadPoolExecutor(1) as pool:
            return len([*pool.map(adds, range(20))])

    assert in_child(works, 60.0) == 20


POOL = ThreadPoolExecutor(1)


class Waits(Small):
    """A compiled layer, and a step that takes what a thread of the process makes."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(8, 8), backend="eager")
        POOL.submit(float, 2).result()  # its thread has started

    def training_step(self, batch, batch_idx):
        return self.compiled(batch[0]).square().mean() * POOL.submit(float, 2).result()


def test_a_step_that_waits_for_a_thread_is_not_counted(tmp_path):
    """A warning says why there is no MFU."""
    flops = Flops("every 2ba")
    with pytest.warns(PerfWarning, match=r"it waits, and .* Define flops_per_batch"):
        trainer(tmp_path, flops, logger=Records()).fit(Waits())
    assert "batch_flops" not in flops.metrics


@contextmanager
def handled(*numbers, by):
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


NUMBERED = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM


@pytest.mark.parametrize("where", ["main", "thread"])
def test_handlers_of_signals_run_in_this_process_alone(where, tmp_path):
    """A signal to all processes of a job reaches the child, too, where nothing happens."""

    def note(number, frame):
        with (tmp_path / "calls").open("a") as file:
            file.write(f"{number} {os.getpid()}\n")

    def work():
        for number in NUMBERED:
            os.kill(os.getpid(), number)
        time.sleep(0.1)
        # A program that the step starts is ended by SIGTERM, as without us.
        return subprocess.run(["sh", "-c", "kill $$"], check=False).returncode

    with handled(*NUMBERED, by=note), ThreadPoolExecutor(1) as pool:
        result = in_child(work) if where == "main" else pool.submit(in_child, work).result()
        assert result == -signal.SIGTERM
        assert not (tmp_path / "calls").exists()
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*NUMBERED}
        signal.raise_signal(signal.SIGUSR1)
    assert (tmp_path / "calls").read_text() == f"{int(signal.SIGUSR1)} {os.getpid()}\n"


def test_a_handler_that_raises_ends_the_child():
    """Ctrl-C while the child runs."""
    before = psutil.Process().children()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))

    def stop(number, frame):
        raise KeyboardInterrupt

    with handled(signal.SIGUSR1, by=stop):
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            in_child(computes, 60.0)
    assert psutil.Process().children() == before


def test_a_child_ends_with_its_parent(tmp_path):
    """A training that is killed leaves no process."""
    path = tmp_path / "pid"
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from lightning_perf.flops.child import in_child\n"
        "def work():\n"
        "    Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "    while True: pass\n"
        "in_child(work, 600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, path])
    wait_until(lambda: path.exists() and path.read_text(), 120.0)
    child = psutil.Process(int(path.read_text()))
    try:
        parent.kill()
        parent.wait()
        wait_until(lambda: not running(child), 10.0)
        assert not running(child)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def running(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Signals(Small):
    """A compiled layer, and a step that sends a signal while it is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(8, 8), backend="eager")

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], FakeTensor):
            signal.raise_signal(signal.SIGUSR1)
        return self.compiled(batch[0]).square().mean()


def test_a_handler_saves_weights_and_no_shapes(tmp_path, monkeypatch):
    """Counts in this process, as with several ranks, hold back signals until they are done."""
    monkeypatch.setattr(flop_meter, "can_fork", lambda _: False)
    module, saved = Signals(), []

    def save(number, frame):
        torch.save(module.compiled.weight.detach() * 1, tmp_path / "last.pt")
        saved.append(torch.load(tmp_path / "last.pt"))

    flops = Flops("every 2ba")
    with handled(signal.SIGUSR1, by=save):
        trainer(tmp_path, flops, logger=Records()).fit(module)
    assert saved
    assert all(type(each) is torch.Tensor for each in saved)
    assert flops.metrics["batch_flops"] > 0
