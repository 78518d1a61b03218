"""Trainings that hang in different ways, each in a process of its own that is killed at the end."""

from __future__ import annotations

import ctypes
import io
import os
import pdb
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from helpers.small import WIDTH, Records, Small, trainer
from lightning_perf import Hang, Suite, Timings

#: The batch in which trainings hang.
BATCH = 5


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """64 samples, of which one may take forever."""

    def __init__(self, hang: Callable[[], object] = int) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40:
            self.hang()
        return torch.ones(WIDTH), torch.ones(1)


class FewerOnRank0(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples for 6 batches on rank 0, and for 10 on other ranks."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = 10 if torch.distributed.get_rank() else 6
        yield from [(torch.ones(WIDTH), torch.ones(1))] * (4 * batches)


class Hangs(Small):
    """Calls a function in one batch, on one rank."""

    def __init__(self, hang: Callable[[], object] = int, rank: int = 0) -> None:
        super().__init__()
        self.hang, self.rank = hang, rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == BATCH and self.global_rank == self.rank:
            self.hang()
        return super().training_step(batch, batch_idx)


class HangsElsewhere(Small):
    """Sleeps in one batch of a stage other than training."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == BATCH:
            sleep()

    test_step = predict_step = validation_step


class Slow(Small):
    """Takes a tenth of a second per batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)


class TrainsAnother(Small):
    """Trains with a Trainer of its own in one batch, for longer than the limit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == BATCH:
            trainer(self.folder, max_epochs=3).fit(Slow(), DataLoader(Samples(), 4))
        return super().training_step(batch, batch_idx)


class FreezesInValidation(Small):
    """Slow batches of training; in one of validation, C code holds the GIL for three seconds."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 1:
            hold_gil(3)
            time.sleep(0.5)  # as below


class BlockedLogger(Records):
    """Waits for the answer of a server that accepts connections, and never answers."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None and step >= BATCH:
            with socket.create_server(("127.0.0.1", 0)) as server:
                socket.create_connection(server.getsockname()).recv(1)  # socket


def sleep() -> None:
    time.sleep(1000)  # sleep


def sleep_with_child() -> None:
    with subprocess.Popen(["sleep", "1000"]):
        sleep()


def read_pipe() -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)  # pipe


def deadlock() -> None:
    first, second = threading.Lock(), threading.Lock()
    held = threading.Event()

    def other() -> None:
        with second:
            held.set()
            first.acquire()

    with first:
        threading.Thread(target=other, daemon=True).start()
        held.wait()
        second.acquire()  # deadlock


def barrier() -> None:
    torch.distributed.barrier()  # barrier


def sleep_in_c(seconds: Path) -> None:
    began = time.monotonic()
    ctypes.CDLL(None).usleep(4_000_000)  # in C
    seconds.write_text(str(time.monotonic() - began))


def hold_gil(seconds: int = 1000) -> None:
    ctypes.PyDLL(None).sleep(seconds)  # gil


def hold_gil_until(fifo: Path) -> None:
    pipe, buffer = os.open(fifo, os.O_RDWR), ctypes.create_string_buffer(1)
    ctypes.PyDLL(None).read(pipe, buffer, 1)  # gil until
    time.sleep(0.5)  # the watch's thread runs before what follows, on a busy machine, too


def work(folder: Path, parts: int = 18) -> None:
    """1.8 seconds that do not pass while the process is stopped."""
    (folder / "works").touch()
    for _ in range(parts):
        time.sleep(0.1)


def run_python(folder: Path) -> None:
    """Call functions and generators, and execute code, until this may go on."""
    while not (folder / "go on").exists():
        for _ in range(100):
            sum(_called(each % 8) for each in range(20))
            exec("def made(depth): return depth\nmade(1)", {})


def _called(depth: int) -> int:
    return depth and 1 + _called(depth - 1)


class SlowUser:
    """The input of a debugger, which goes on after three seconds."""

    def readline(self) -> str:
        time.sleep(3.0)
        return "c\n"


def debug() -> None:
    debugger = pdb.Pdb(stdin=SlowUser(), stdout=io.StringIO())  # type: ignore[arg-type]
    debugger.set_trace()
    time.sleep(0.3)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("planted")


def line(marker: str) -> str:
    """The place of a line with this comment, as reports have it."""
    lines = Path(__file__).read_text().splitlines()
    found = next(n for n, text in enumerate(lines, 1) if text.endswith(f"  # {marker}"))
    return f"`{lines[found - 1].strip()}`, hanging.py:{found}"


def fit(
    folder: Path, module: Small, samples: Dataset[Any] | None = None, workers: int = 0,
    after: str = "1s", action: str = "report", stage: str = "fit", also: Sequence[Any] = (),
    **options: Any,
) -> None:  # fmt: skip
    """Train with a small limit."""
    suite = Suite([Timings(), *also, Hang(after, action)])
    loader = DataLoader(samples or Samples(), 4, num_workers=workers)
    getattr(trainer(folder, suite, **options), stage)(module, loader)


@contextmanager
def training(folder: Path, *args: Any, **options: Any) -> Iterator[Any]:
    """The process of a training, which is killed with all of its own processes."""
    process = get_context("fork").Process(target=_train, args=(folder, args, options))
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # they have ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _train(folder: Path, args: Any, options: Any) -> None:
    os.setsid()
    with (folder / "output").open("w", buffering=1) as sys.stderr:
        sys.stdout = sys.stderr
        warnings.simplefilter("default")
        # pytest keeps warnings otherwise.
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
        if options.pop("thread", False):
            thread = threading.Thread(target=fit, args=(folder, *args), kwargs=options)
            thread.start()
            thread.join()
            return
        try:
            fit(folder, *args, **options)
        except BaseException:  # multiprocessing prints it once this file is closed
            traceback.print_exc()
            raise
