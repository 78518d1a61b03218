"""The CPUs and the memory that this process may use: Linux control groups, version 2.

psutil is not used, because `Diagnosis` works without it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def usable_cpus() -> int:
    """CPUs that this process may use, as its affinity and its container allow."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = Cgroup().quota()
    return count if quota is None else max(min(count, round(quota[0])), 1)


@dataclass(frozen=True)
class Cgroup:
    """The control group (version 2) of this process and its parents, which limit a container."""

    root: Path = Path("/sys/fs/cgroup")
    #: The file that names the group.
    membership: Path = Path("/proc/self/cgroup")

    def quota(self) -> tuple[float, Callable[[], float]] | None:
        """Return the smallest CPU quota in cores, and a function for the CPU seconds used of it."""
        quotas = []
        for folder in self._folders():
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            if quota not in ("", "max"):
                quotas.append((int(quota) / int(period or 100_000), folder / "cpu.stat"))
        if not quotas:
            return None
        cores, file = min(quotas)
        return cores, lambda: _stat(file, "usage_usec") / 1e6

    def cpus(self) -> set[int]:
        """Return the CPUs that the group is limited to; empty for all."""
        texts = (_text(folder / "cpuset.cpus.effective") for folder in self._folders())
        cpus: set[int] = set()
        for part in next(filter(None, texts), "").split(","):  # such as 0-3,8
            if part:
                first, _, last = part.partition("-")
                cpus.update(range(int(first), int(last or first) + 1))
        return cpus

    def memory(self) -> Callable[[], float] | None:
        """Return a function for the bytes left below the limits; None without a limit.

        Inactive file pages, which the kernel can drop, count as free.
        """
        texts = [(folder, _text(folder / "memory.max")) for folder in self._folders()]
        limits = [(folder, int(limit)) for folder, limit in texts if limit not in ("", "max")]
        if not limits:
            return None
        return lambda: min(limit - _used_memory(folder) for folder, limit in limits)

    def _folders(self) -> list[Path]:
        """Return the folders of the group and of its parents, which also limit it."""
        lines = _text(self.membership).splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "")
        group = self.root / path.strip("/")
        if ".." in group.parts or not group.is_dir():
            group = self.root  # in a container, its own group is the root
        return [each for each in (group, *group.parents) if each.is_relative_to(self.root)]


def _used_memory(folder: Path) -> float:
    used = float(_text(folder / "memory.current") or 0)
    return used - _stat(folder / "memory.stat", "inactive_file")


def _stat(file: Path, name: str) -> float:
    """Return one number from a file of names and numbers; 0 if the name is missing."""
    numbers = dict(line.split() for line in _text(file).splitlines())
    return float(numbers.get(name, 0))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
