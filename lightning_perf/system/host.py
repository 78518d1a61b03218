"""Sensors of the host, of its container and of the training processes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import psutil

from lightning_perf.cgroup import Cgroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    _Counters = Mapping[Any, Mapping[str, float]]


class Sensor(Protocol):
    """Something that can be sampled repeatedly."""

    #: Its name, for messages.
    name: str

    def __call__(self, now: float, /) -> Mapping[str, float]:
        """Return values by name: current values, and rates since the last call."""
        ...


def host_sensors(processes: Set[int]) -> list[Sensor]:
    """The sensors of this machine, for these and all processes."""
    cgroup = Cgroup()
    swap = Reading("swap", lambda _: {"swap_used": float(psutil.swap_memory().used)})
    return [Cpu(cgroup), memory(cgroup), swap, *traffic(), Processes(processes)]


@dataclass(eq=False)
class Reading:
    """A sensor that is a function of the time."""

    name: str
    read: Callable[[float], Mapping[str, float]]

    def __call__(self, now: float, /) -> Mapping[str, float]:
        """Return the values."""
        return self.read(now)


class Rates:
    """Rates from counters that only grow, summed over the devices that have them.

    A device counts from its second reading on. A counter that decreased has wrapped or was reset:
    its quantity has no rate in that interval.
    """

    def __init__(self) -> None:
        self._last: _Counters = {}
        self._then = 0.0

    def __call__(self, counters: _Counters, now: float) -> dict[str, float]:
        """Return by name what was counted per second since the last reading."""
        last, seconds = self._last, now - self._then
        self._last, self._then = counters, now
        common = [device for device in counters if device in last]
        if not common or seconds <= 0:
            return {}
        rates = {}
        for name in counters[common[0]]:
            grown = [counters[device][name] - last[device][name] for device in common]
            if min(grown) >= 0:
                rates[name] = sum(grown) / seconds
        return rates


#: Maximum share of a CPU spent on listing child processes.
_SHARE = 0.01
#: Seconds by which the CPU time of a process may shrink when it becomes that of its parent's
#: children: the kernel rounds each to ticks.
_ROUNDING = 0.05
#: The children of a thread, in kernels that list them.
_CHILDREN = Path("/proc/thread-self/children")


class Processes:
    """Memory and CPU time of processes, whose set may grow, and their descendants."""

    name = "processes"

    def __init__(self, roots: Set[int]) -> None:
        self._roots = roots
        self._tree: dict[int, psutil.Process] = {}
        #: The first samples of processes, and their sum in the first reading.
        self._first: WeakKeyDictionary[psutil.Process, int] = WeakKeyDictionary()
        self._start = 0.0
        self._peak = 0.0
        #: CPU seconds of all of them so far, when they were read, and whether the next reading
        #: replaces them in any case.
        self._spent, self._read, self._anew = inf, 0.0, True
        self._listed, self._until = 0, 0.0

    def __call__(self, now: float, /) -> dict[str, float]:
        """Return current memory, and CPU time since the last call in percent of one CPU.

        A process that ended is in the CPU time of its parent's children once that waited for it.
        """
        if len(self._roots) > self._listed:  # the past of a new root does not count
            self._spent, self._anew = inf, True
        if now >= self._until or len(self._roots) > self._listed:
            self._list(now)
        rss = grown = spent = 0.0
        for pid, process in list(self._tree.items()):  # parents first: none counts twice
            try:
                with process.oneshot():
                    size = process.memory_info().rss
                    times = process.cpu_times()
            except psutil.Error:  # the process has ended
                del self._tree[pid]
                continue
            spent += times.user + times.system + times.children_user + times.children_system
            rss += size
            grown += size - self._first.setdefault(process, size)
        self._peak, self._start = max(self._peak, rss, _high_water()), self._start or rss
        figures = {
            "process_rss": rss, "process_peak_rss": self._peak,
            "process_rss_level": self._start + grown,
        }  # fmt: skip
        if known := spent >= self._spent - _ROUNDING:
            used = max(0.0, spent - self._spent)
            figures["process_cpu"] = 100 * used / (now - self._read)
        if known or self._anew:
            self._spent, self._read, self._anew = spent, now, False
        else:  # one was waited for between both readings, or by nobody: the next call knows
            self._anew = True
        return figures

    def _list(self, now: float) -> None:
        # Not the wall time: this thread mostly waits for Python's lock.
        roots, start = list(self._roots), time.thread_time()
        tree: dict[int, psutil.Process] = {}
        for pid in (each for root in roots for each in _family(root)):
            with suppress(psutil.Error):
                tree[pid] = self._tree.get(pid) or psutil.Process(pid)
        self._tree, self._listed = tree, len(roots)
        self._until = now + (time.thread_time() - start) / _SHARE


def _family(root: int) -> list[int]:
    """Ids of a process and its descendants, parents first."""
    family = [root]
    if not _CHILDREN.exists():
        with suppress(psutil.Error):  # reads all processes of the machine
            family += [each.pid for each in psutil.Process(root).children(recursive=True)]
        return family
    for pid in family:
        with suppress(OSError):  # the process has ended
            for thread in [*Path(f"/proc/{pid}/task").iterdir()]:
                with suppress(OSError):
                    family += map(int, (thread / "children").read_text().split())
    return family


def _high_water() -> float:
    """Return the peak memory of this process in bytes; 0 if unknown."""
    with suppress(OSError), Path("/proc/self/status").open() as lines:
        return next((1024.0 * int(each.split()[1]) for each in lines if "VmHWM" in each), 0.0)
    return 0.0


Times = dict[int, tuple[float, float, float]]


class Cpu:
    """Utilization and I/O wait, in percent of the CPUs that this container may use."""

    name = "CPU use"

    def __init__(self, cgroup: Cgroup) -> None:
        self._quota = cgroup.quota()
        self._cpus = cgroup.cpus()
        self._rates = Rates()
        self._last: Times = {}

    def __call__(self, now: float, /) -> dict[str, float]:
        """Return percentages since the last call."""
        times = self._times()
        last, self._last = self._last or times, times
        spent = {
            cpu: [now - then for now, then in zip(times[cpu], last[cpu], strict=True)]
            for cpu in times
            if cpu in last
        }
        spent = {cpu: each for cpu, each in spent.items() if sum(each) > 0 and min(each) >= 0}
        total = sum(sum(each) for each in spent.values())
        if not total:
            return self._quota_use(now)
        return {
            "cpu_util_simple": 100 * sum(busy for busy, _, _ in spent.values()) / total,
            "cpu_util_max": max(100 * each[0] / sum(each) for each in spent.values()),
            "cpu_iowait": 100 * sum(waited for _, waited, _ in spent.values()) / total,
        } | self._quota_use(now)

    def _times(self) -> Times:
        """Return seconds busy, waiting for I/O and idle, by CPU."""
        times = dict(enumerate(psutil.cpu_times(percpu=True)))
        allowed = self._cpus & times.keys() or times.keys()
        return {cpu: _split(times[cpu]) for cpu in allowed}

    def _quota_use(self, now: float) -> dict[str, float]:
        if self._quota is None:
            return {}
        cores, used = self._quota
        rates = self._rates({"": {"cpu_util_simple": 100 * used() / cores}}, now)
        return {name: min(value, 100.0) for name, value in rates.items()}


def _split(times: Any) -> tuple[float, float, float]:
    waited, idle = getattr(times, "iowait", 0.0), times.idle
    # Guest time is included in user time.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - guests - waited - idle, waited, idle


def memory(cgroup: Cgroup) -> Reading:
    """Free memory in bytes: of the machine or below the container's limit, the smaller one."""
    left = cgroup.memory()

    def read(_now: float) -> dict[str, float]:
        free = float(psutil.virtual_memory().available)
        return {"free_memory": free if left is None else min(free, left())}

    return Reading("memory", read)


def traffic() -> list[Reading]:
    """Bytes and operations per second of all networks, including loopback, and physical disks."""
    of_networks, of_disks = Rates(), Rates()

    def networks(now: float) -> dict[str, float]:
        counts = psutil.net_io_counters(pernic=True, nowrap=False)
        sums = {
            name: {"net_throughput_sent": each.bytes_sent, "net_throughput_recv": each.bytes_recv}
            for name, each in counts.items()
        }
        return of_networks(sums, now)

    def disks(now: float) -> dict[str, float]:
        counts = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        sums = {
            disk: {
                "disk_iops": each.read_count + each.write_count,
                "disk_throughput_read": each.read_bytes,
                "disk_throughput_write": each.write_bytes,
            }
            for disk, each in counts.items()
            if physical(disk)
        }
        return of_disks(sums, now)

    return [Reading("network", networks), Reading("disks", disks)]


def physical(disk: str, blocks: Path = Path("/sys/block")) -> bool:
    """Whether a block device is a physical disk, and not a partition or a virtual device.

    ``blocks`` is Linux's list of disks. On other systems psutil lists physical disks only.
    """
    # A "!" replaces the slash in names such as cciss/c0d0.
    return not blocks.exists() or (blocks / disk.replace("/", "!") / "device").exists()
