"""Recording on demand: a signal to a real process, and a trace after a slow batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TESTS
from helpers.clocks import FakeClock
from helpers.command import exit_code, until
from helpers.small import Records, Small, trainer
from helpers.torch_traces import steps, traces
from torch import Tensor

from lightning_perf import Moment, OnSignal, OnSlowBatch, PyTorch, Timestamp
from lightning_perf.schedule.base import Context
from lightning_perf.schedule.triggers import records_on

SCRIPT = """
import sys, time
from pathlib import Path
from helpers.small import Small, trainer
from lightning_perf import OnSignal, PyTorch

class Slow(Small):
    def training_step(self, batch, batch_idx):
        Path(sys.argv[1], "training").touch()
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

run = trainer(Path(sys.argv[1]), PyTorch(schedule=OnSignal(lasting="3ba")), max_epochs=-1,
              max_time={"seconds": 60})
run.fit(Slow())
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[int]:
    """The process id of a training that handles SIGUSR2."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(command, cwd=TESTS, stderr=subprocess.DEVNULL)
    until((tmp_path / "training").exists)
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_running_training_records_on_demand(tmp_path: Path, training: int) -> None:
    """The command and the plain signal each give one trace of the scheduled length."""
    assert exit_code("capture", str(training)) == 0
    (first,) = until(lambda: traces(tmp_path)).values()
    assert len(steps(first)) == 3
    os.kill(training, signal.SIGUSR2)
    both = until(lambda: len(found := traces(tmp_path)) == 2 and found)
    assert [len(steps(trace)) for trace in both.values()] == [3, 3]


@pytest.mark.parametrize("children", [[], ["--children"]])
def test_a_process_without_a_handler_is_not_signalled(
    children: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal would end the process; the message says how to add a handler."""
    process = subprocess.Popen(["sleep", "30"])
    try:
        assert exit_code("capture", str(process.pid), *children) == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert "OnSignal" in capsys.readouterr().err


def test_the_signalled_processes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints their ids, and nothing else."""
    schedule = OnSignal()
    schedule.setup(Context())
    try:
        assert exit_code("capture", str(os.getpid()), "--json") == 0
        moment = Moment("train", Timestamp(), Timestamp())
        assert schedule.fired(moment)
    finally:
        schedule.close()
    assert json.loads(capsys.readouterr().out) == {"signalled": [os.getpid()]}


@pytest.mark.parametrize(
    "script",
    [
        ["bash", "-c", "trap 'echo cleanup' EXIT; echo ready; sleep 60; true"],
        ["bash", "--norc", "-i", "-c", "echo ready; sleep 60; true"],
        [
            sys.executable, "-c", "import faulthandler, time; faulthandler.register(12);"
            "print('ready', flush=True); time.sleep(60)",
        ],
    ],
    ids=["trap", "interactive", "another handler"],
)  # fmt: skip
@pytest.mark.parametrize("children", [[], ["--children"]])
def test_a_handler_of_others_is_not_signalled(script: list[str], children: list[str]) -> None:
    """Shells handle the signal, too, and it ends them."""
    with subprocess.Popen(
        script, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert exit_code("capture", str(process.pid), *children) == 1
            os.kill(process.pid, 0)
            assert process.poll() is None
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_marker_of_a_handler_is_that_of_one_process_only() -> None:
    """A forked child that removed the handler is not signalled; nor is a process after `close`."""
    schedule = OnSignal()
    schedule.setup(Context())
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(1))
        time.sleep(60)
        os._exit(0)
    try:
        assert records_on(os.getpid(), signal.SIGUSR2)
        assert not records_on(os.getpid(), signal.SIGUSR1)
        assert not records_on(child, signal.SIGUSR2)
        schedule.close()
        assert not records_on(os.getpid(), signal.SIGUSR2)
    finally:
        schedule.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["999999999"], "there is no process 999999999"),
        (["-5"], "there is no process -5"),
        (["1", "--signal", "SIGNAL"], "SIGNAL is not the name of a signal"),
        (["1", "--signal", "SIGTERM"], "SIGTERM is not the name of a signal, or one that ends"),
        (["1", "--signal", "SIGINT"], "SIGINT is not"),
    ],
)
def test_an_unknown_process_or_signal_is_one_line(
    args: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both give exit code 1 and a message."""
    assert exit_code("capture", *args) == 1
    assert printed in capsys.readouterr().err


def test_a_slow_batch_is_followed_by_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OnSlowBatch records the three batches after a slow one."""
    clock = FakeClock()
    clock.replace_clocks(monkeypatch)

    class Stalling(Small):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            clock.sleep(0.5 if self.trainer.global_step == 40 else 0.005)
            return super().training_step(batch, batch_idx)

    profiler = PyTorch(schedule=OnSlowBatch(factor=10.0, lasting="3ba"))
    trainer(tmp_path, profiler, logger=Records(), max_epochs=4).fit(Stalling())
    (trace,) = traces(tmp_path).values()
    assert steps(trace) == [42, 43, 44]
