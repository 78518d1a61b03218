"""The sensor of this job's own processes on this node, data loading workers included."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lightning_perf.system.averages import Rates

if TYPE_CHECKING:
    from collections.abc import Set

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
