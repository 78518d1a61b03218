"""System metrics compared with load that the test creates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.small import Records, Small, trainer
from lightning import Callback

from lightning_perf import SystemMetrics
from lightning_perf.system.host import physical

pytestmark = pytest.mark.slow

STEPS = 12
MB = 1_000_000


class Working(Small):
    """Runs a function in every step."""

    def __init__(self, work: Callable[[int], None]) -> None:
        super().__init__()
        self.work = work

    def training_step(self, batch: list[Any], batch_idx: int) -> torch.Tensor:
        self.work(batch_idx)
        return super().training_step(batch, batch_idx)


class Window(Callback):
    """The time from set-up, when sampling begins, to the end of training."""

    def setup(self, *_: Any, stage: str) -> None:
        self.start = time.monotonic()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.monotonic() - self.start


def run(folder: Path, work: Callable[[int], None]) -> tuple[dict[str, float], float]:
    """Train with some work in each step.

    Returns:
        The one report of the run, averaged over all of it, and the seconds that it covers.
    """
    records, window = Records(), Window()
    callbacks = SystemMetrics(interval=0.2), window
    options = {"logger": records, "log_every_n_steps": 10_000, "max_steps": STEPS}
    trainer(folder, *callbacks, **options).fit(Working(work))
    (row,) = [row for _, row in records.rows if "system/node_0/free_memory" in row]
    return {key.rpartition("/")[2]: value for key, value in row.items()}, window.seconds


def disk_of(folder: Path) -> str:
    """A physical disk whose counters move when this folder is written to."""

    def written() -> dict[str, int]:
        counters = psutil.disk_io_counters(perdisk=True) or {}
        return {disk: count.write_bytes for disk, count in counters.items() if physical(disk)}

    before = written()
    write(folder / "probe", 8 * MB)
    grown = {disk: after - before.get(disk, 0) for disk, after in written().items()}
    disk = max(grown, key=grown.__getitem__, default="")
    if not disk or grown[disk] < 8 * MB:
        pytest.skip(f"what is written to {folder} shows on no disk: {grown}")
    return disk


def write(file: Path, size: int) -> None:
    """Write bytes and wait until they are on the disk."""
    with file.open("wb") as stream:
        stream.write(os.urandom(size))
        stream.flush()
        os.fsync(stream.fileno())


def test_disk_throughput_equals_the_bytes_written(tmp_path: Path) -> None:
    """Rate times time equals the synced bytes plus those of other processes."""
    disk = disk_of(tmp_path)

    def counted() -> int:
        return psutil.disk_io_counters(perdisk=True)[disk].write_bytes

    def work(step: int) -> None:
        write(tmp_path / f"{step}", 10 * MB)
        time.sleep(0.1)

    before = counted()
    found, seconds = run(tmp_path, work)
    everybody = counted() - before
    measured = found["disk_throughput_write"] * seconds
    assert 0.8 * STEPS * 10 * MB < measured < 1.2 * everybody
    assert found["disk_iops"] * seconds > 0.8 * STEPS


def test_network_throughput_equals_the_bytes_sent(tmp_path: Path) -> None:
    """Rate times time equals the bytes of a loopback socket, in both directions."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
    payload = os.urandom(5 * MB)

    def read() -> None:
        left = len(payload)
        while left:
            left -= len(into.recv(left))

    def work(step: int) -> None:
        reader = threading.Thread(target=read)
        reader.start()
        out.sendall(payload)
        reader.join()
        time.sleep(0.1)

    before = psutil.net_io_counters()
    with out, into:
        found, seconds = run(tmp_path, work)
    after = psutil.net_io_counters()
    for name, everybody in (
        ("net_throughput_sent", after.bytes_sent - before.bytes_sent),
        ("net_throughput_recv", after.bytes_recv - before.bytes_recv),
    ):
        assert 0.8 * STEPS * 5 * MB < found[name] * seconds < 1.2 * everybody


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_cpu_use_equals_the_process_time(tmp_path: Path) -> None:
    """CPU utilization matches the process's own CPU clock."""
    before = time.process_time()

    def work(step: int) -> None:
        burn(0.1)
        time.sleep(0.05)

    found, seconds = run(tmp_path, work)
    used = time.process_time() - before
    assert 0.8 * STEPS * 0.1 < found["process_cpu"] / 100 * seconds < 1.2 * used
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 0.8 * STEPS * 0.1 / seconds / cores < found["cpu_util_simple"] / 100 <= 1
    assert found["cpu_util_simple"] <= found["cpu_util_max"] <= 100


def test_cpu_use_includes_workers(tmp_path: Path) -> None:
    """A busy child process, like a DataLoader worker, is included."""
    code = "import time\nwhile time.process_time() < 60: pass"
    child = subprocess.Popen([sys.executable, "-c", code])
    worker = psutil.Process(child.pid)
    try:
        own, before = time.process_time(), worker.cpu_times()
        found, seconds = run(tmp_path, lambda step: time.sleep(0.15))
        own, after = time.process_time() - own, worker.cpu_times()
    finally:
        child.kill()
        child.wait()
    burnt = after.user + after.system - before.user - before.system
    assert 0.7 * burnt < found["process_cpu"] / 100 * seconds < 1.2 * (burnt + own)


def resident() -> int:
    """RSS of this process and its descendants, as the sensor measures it."""
    me = psutil.Process()
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


def test_memory_has_an_average_and_a_peak(tmp_path: Path) -> None:
    """300 MB held for a part of the time add some of that to the average, and all to the peak."""
    held: list[bytes] = []
    base = resident()

    def work(step: int) -> None:
        if step == 0:
            held.append(b"\x01" * (300 * MB))
        elif step == STEPS // 2:
            held.clear()
        time.sleep(0.15)

    found, _ = run(tmp_path, work)
    after = resident()
    growth = after - base  # from all other causes during the run
    # The share depends on the machine.
    assert base < found["process_rss"] < base + 300 * MB + growth
    assert found["peak_rss"] == pytest.approx(base + 300 * MB, abs=75 * MB + growth)
    assert found["rss"] == pytest.approx(after, rel=0.1)
    assert 0 < found["free_memory"] < psutil.virtual_memory().total
