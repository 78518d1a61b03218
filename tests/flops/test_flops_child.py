"""A forked child counts what it must not change here."""

import os
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from helpers.small import Records, Small, trainer
from torch import nn

from lightning_perf import Flops
from lightning_perf.flops import child
from lightning_perf.flops.child import in_child

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


def test_a_child_that_hangs_is_ended(monkeypatch):
    """A lock that another thread held at the fork is never released in the child."""
    monkeypatch.setattr(child, "_PATIENCE", 0.5)
    before = psutil.Process().children()
    with pytest.raises(RuntimeError, match="took longer than"):
        in_child(threading.Event().wait)
    assert psutil.Process().children() == before
