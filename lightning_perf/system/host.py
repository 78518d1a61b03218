"""Sensors of the machine and of the training's processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lightning_perf.system.cgroup import Cgroup
from lightning_perf.system.sampler import Rates

if TYPE_CHECKING:
    from collections.abc import Callable, Set


#: Listing children reads every process of the machine: it may take this part of the time.
_SHARE = 0.01


class Processes:
    """Memory and CPU time of some processes and of all that they started.

    Args:
        roots: Ids of the processes; more may be added to it while this is in use.
    """

    name = "processes"

    def __init__(self, roots: Set[int]) -> None:
        self._roots = roots
        self._tree: dict[int, psutil.Process] = {}
        self._rates = Rates[int]()
        self._peak = 0.0
        self._listed, self._until = 0, 0.0

    def __call__(self, now: float, /) -> dict[str, float]:
        """The present memory, and CPU time since the last call in percent of one CPU."""
        if now >= self._until or len(self._roots) > self._listed:
            self._list(now)
        rss, cpu = 0.0, {}
        for pid, process in list(self._tree.items()):
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    times = process.cpu_times()
            except psutil.Error:  # it has ended
                del self._tree[pid]
                continue
            cpu[pid] = {"process_cpu": 100 * (times.user + times.system)}
        self._peak = max(self._peak, rss, _high_water())
        return {"process_rss": rss, "process_peak_rss": self._peak, **self._rates(cpu, now)}

    def _list(self, now: float) -> None:
        roots, start = list(self._roots), time.perf_counter()
        found: dict[int, psutil.Process] = {}
        for root in roots:
            if root in found:  # a process that another rank started
                continue
            try:
                process = psutil.Process(root)
                children = process.children(recursive=True)
            except psutil.Error:
                continue
            found |= {each.pid: each for each in (process, *children)}
        self._tree = {pid: self._tree.get(pid, each) for pid, each in found.items()}
        self._listed = len(roots)
        self._until = now + (time.perf_counter() - start) / _SHARE


def _high_water(status: Path = Path("/proc/self/status")) -> float:
    """The most memory that this process ever had, in bytes; 0 where the system does not tell."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0.0)


Times = dict[int, tuple[float, float, float]]


class Cpu:
    """Busy and waiting for disks, in percent of the CPUs that this container may use."""

    name = "CPU use"

    def __init__(self, cgroup: Cgroup | None = None) -> None:
        cgroup = cgroup or Cgroup()
        self._quota = cgroup.quota()
        self._cpus = cgroup.cpus()
        self._rates = Rates[str]()
        self._last: Times = {}

    def __call__(self, now: float, /) -> dict[str, float]:
        """Percent since the last call."""
        times = self._times()
        last, self._last = self._last or times, times
        spent = {cpu: _grown(times[cpu], last[cpu]) for cpu in times if cpu in last}
        spent = {cpu: each for cpu, each in spent.items() if sum(each) > 0 and min(each) >= 0}
        total = sum(sum(each) for each in spent.values())
        if not total:
            return self._of_quota(now)
        overrides = sum(each[0] for each in spent.values())
        waited = sum(each[1] for each in spent.values())
        return {
            "cpu_util_simple": 100 * overrides / total,
            "cpu_util_max": max(100 * each[0] / sum(each) for each in spent.values()),
            "cpu_iowait": 100 * waited / total,
        } | self._of_quota(now)

    def _times(self) -> Times:
        """Seconds busy, waiting for disks and idle, by CPU."""
        times = dict(enumerate(psutil.cpu_times(percpu=True)))
        allowed = self._cpus & times.keys() or times.keys()
        return {cpu: _split(times[cpu]) for cpu in allowed}

    def _of_quota(self, now: float) -> dict[str, float]:
        if self._quota is None:
            return {}
        cores, used = self._quota
        grown = self._rates({"": {"cpu_util_simple": 100 * used() / cores}}, now)
        return {name: min(value, 100.0) for name, value in grown.items()}


def _split(times: Any) -> tuple[float, float, float]:
    waited, idle = getattr(times, "iowait", 0.0), times.idle
    # Guests' time is in the user's as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - guests - waited - idle, waited, idle


def _grown(
    now: tuple[float, float, float], then: tuple[float, float, float]
) -> tuple[float, float, float]:
    return now[0] - then[0], now[1] - then[1], now[2] - then[2]


class Memory:
    """Bytes that are left, to the machine or below the container's limit."""

    name = "memory"

    def __init__(self, cgroup: Cgroup | None = None) -> None:
        self._left: Callable[[], float] | None = (cgroup or Cgroup()).memory()

    def __call__(self, _now: float, /) -> dict[str, float]:
        """The present state."""
        free = float(psutil.virtual_memory().available)
        return {"free_memory": min(free, self._left()) if self._left else free}


class Swap:
    """Bytes that were moved from memory to disks."""

    name = "swap"

    def __call__(self, _now: float, /) -> dict[str, float]:
        """The present state."""
        return {"swap_used": float(psutil.swap_memory().used)}


class Network:
    """Bytes a second over all interfaces, the loopback included."""

    name = "network"

    def __init__(self) -> None:
        self._rates = Rates[str]()

    def __call__(self, now: float, /) -> dict[str, float]:
        """Rates since the last call."""
        counters = {
            interface: {
                "net_throughput_sent": count.bytes_sent,
                "net_throughput_recv": count.bytes_recv,
            }
            for interface, count in psutil.net_io_counters(pernic=True, nowrap=False).items()
        }
        return self._rates(counters, now)


class Disks:
    """Operations and bytes a second over all physical disks."""

    name = "disks"

    def __init__(self) -> None:
        self._rates = Rates[str]()

    def __call__(self, now: float, /) -> dict[str, float]:
        """Rates since the last call."""
        counters = {
            disk: {
                "disk_iops": count.read_count + count.write_count,
                "disk_throughput_read": count.read_bytes,
                "disk_throughput_write": count.write_bytes,
            }
            for disk, count in (psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).items()
            if physical(disk)
        }
        return self._rates(counters, now)


def physical(disk: str, blocks: Path = Path("/sys/block")) -> bool:
    """Whether a block device is a disk and no part of one, nor something that lies on others.

    Args:
        disk: Its name, as ``sda`` or ``sda1``.
        blocks: Where Linux lists disks; elsewhere psutil knows only disks.
    """
    # A "!" stands for the slash of names such as cciss/c0d0.
    return not blocks.exists() or (blocks / disk.replace("/", "!") / "device").exists()
