"""Resource limits of a container: Linux control groups, v1 and v2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: v1 writes "no limit" as the largest number of whole pages.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Cgroup:
    """The control group of this process and its parents.

    Args:
        root: Mount point of the hierarchies.
        membership: The file that names the group.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def quota(self) -> tuple[float, Callable[[], float]] | None:
        """Return the smallest CPU quota in cores, and a function for the CPU seconds used of it."""
        found = [
            (cores, used)
            for folder in self._folders("cpu")
            if (cores := _quota(folder)) and (used := _used_cpu(folder))
        ]
        return min(found, key=lambda each: each[0], default=None)

    def cpus(self) -> set[int]:
        """Return the CPUs that the group is limited to; empty for all."""
        for folder in self._folders("cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if text := _text(folder / name):
                    return set(_ranges(text))
        return set()

    def memory(self) -> Callable[[], float] | None:
        """Return a function for the bytes left below the limits; None without a limit.

        Inactive file pages, which the kernel can drop, count as free.
        """
        limits = [
            (folder, version, limit)
            for folder in self._folders("memory")
            for version in _MEMORY
            if (limit := _number(folder / version[0])) is not None and limit < _UNLIMITED
        ]
        if not limits:
            return None
        return lambda: min(limit - _used(folder, version) for folder, version, limit in limits)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of a controller's group and of its parents, which also limit it."""
        for line in (_text(self.membership) or "").splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                bases = [self.root / names, self.root / controller]
            elif not names:
                bases = [self.root, self.root / "unified"]
            else:
                continue
            base = next((base for base in bases if (base / "cgroup.procs").exists()), None)
            if base is not None:
                yield from _upward(base, path)


def _upward(base: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not base.joinpath(*parts).is_dir():
        parts = []  # in a container, its own group is the root
    for depth in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")  # v2
    if both is None:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # v1
        both = " ".join(_text(folder / name) or "max" for name in names)
    quota, _, period = both.partition(" ")
    if quota in ("max", "-1"):
        return None
    return float(quota) / float(period or 100_000)


def _stat(file: Path, name: str) -> float:
    """Return one number from a file of names and numbers."""
    for line in (_text(file) or "").splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return 0.0


def _used_cpu(folder: Path) -> Callable[[], float] | None:
    """Return a function for the CPU seconds used, if there is a file with them."""
    v1, v2 = folder / "cpuacct.usage", folder / "cpu.stat"
    if v1.exists():
        return lambda: (_number(v1) or 0.0) / 1e9
    return (lambda: _stat(v2, "usage_usec") / 1e6) if v2.exists() else None


#: File of the limit, file of the usage, and name of the droppable part: v2 and v1.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _used(folder: Path, version: tuple[str, str, str]) -> float:
    _, use, droppable = version
    return (_number(folder / use) or 0.0) - _stat(folder / "memory.stat", droppable)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _number(file: Path) -> float | None:
    text = _text(file)
    return float(text) if text and text != "max" else None


def _ranges(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0-3,8``."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
