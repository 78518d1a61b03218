"""Host sensors: rates, averages and container limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_perf.cgroup import Cgroup
from lightning_perf.system import Sampler
from lightning_perf.system.host import Cpu, Processes, Rates, _family, memory, physical, traffic

Patch = pytest.MonkeyPatch
GB = 10**9


# -- rates and averages ---------------------------------------------------------------------------


def test_rates_use_the_exact_elapsed_time() -> None:
    """Twice the time for the same difference gives half the rate."""
    rates = Rates()
    assert rates({"eth0": {"sent": 100}}, 10.0) == {}
    assert rates({"eth0": {"sent": 400}}, 11.5) == {"sent": 200}
    assert rates({"eth0": {"sent": 700}}, 14.5) == {"sent": 100}


def test_a_decreasing_counter_has_no_rate_in_that_interval() -> None:
    """After a wrap or reset, only that figure is skipped, once."""
    rates = Rates()
    rates({"sda": {"read": 4_000_000_000, "write": 0}}, 0.0)
    assert rates({"sda": {"read": 10, "write": 5}}, 1.0) == {"write": 5}
    assert rates({"sda": {"read": 40, "write": 5}}, 2.0) == {"read": 30, "write": 0}


def test_devices_come_and_go_without_a_spike() -> None:
    """Neither the first value nor the disappearance of a device counts as traffic."""
    rates = Rates()
    rates({"eth0": {"sent": 10}}, 0.0)
    assert rates({"eth0": {"sent": 20}, "usb0": {"sent": 10**12}}, 1.0) == {"sent": 10}
    assert rates({"eth0": {"sent": 30}, "usb0": {"sent": 10**12 + 7}}, 2.0) == {"sent": 17}
    assert rates({"eth0": {"sent": 40}}, 3.0) == {"sent": 10}
    assert rates({}, 4.0) == {}


def test_totals_weigh_by_time() -> None:
    """A long interval counts for more than a short one; a first reading counts for no time."""
    sums = Sampler()
    sums.receive({"util": 100.0, "first": 1.0}, 0.0)
    assert sums.totals() == {"util": (0.0, 0.0), "first": (0.0, 0.0)}
    sums.receive({"util": 100.0}, 9.0)
    sums.receive({"util": 0.0, "late": 5.0}, 1.0)
    assert sums.totals() == {"util": (900.0, 10.0), "first": (0.0, 0.0), "late": (5.0, 1.0)}


# -- disks and networks ---------------------------------------------------------------------------


def test_only_physical_disks_are_counted(monkeypatch: Patch, tmp_path: Path) -> None:
    """Bytes written through LVM and a loop device count once, for the disk."""
    for disk in ("nvme0n1", "dm-0", "loop0", "md127", "cciss!c0d0"):
        (tmp_path / disk).mkdir()
    for disk in ("nvme0n1", "cciss!c0d0"):
        (tmp_path / disk / "device").mkdir()
    names = ["nvme0n1", "nvme0n1p1", "dm-0", "loop0", "md127", "cciss/c0d0"]
    assert [n for n in names if physical(n, tmp_path)] == ["nvme0n1", "cciss/c0d0"]
    assert physical("PhysicalDrive0", tmp_path / "absent")


def test_a_machine_without_disks_or_networks_lacks_their_metrics(monkeypatch: Patch) -> None:
    """In a sandbox without them, the metrics are absent."""
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: None)
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: {})
    for sensor in traffic():
        assert sensor(0.0) == sensor(1.0) == {}


# -- containers -----------------------------------------------------------------------------------


def tree(root: Path, group: str, files: dict[str, Any]) -> Cgroup:
    """A fake /sys/fs/cgroup."""
    root.mkdir(parents=True)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    membership = root.parent / "membership"
    membership.write_text(group)
    return Cgroup(root, membership)


GROUP = "0::/job/step\n"


def test_it_uses_the_smallest_limit_of_all_parents(tmp_path: Path) -> None:
    """For a step in a job, the job limits the CPUs, and the step limits the memory."""
    group = tree(
        tmp_path / "cgroup",
        GROUP,
        {
            "job/step/cpu.max": "max 100000",
            "job/cpu.max": "250000 100000",
            "job/cpu.stat": "usage_usec 7000000\nuser_usec 1",
            "job/step/cpuset.cpus.effective": "0-2,8",
            "job/step/memory.max": 8 * GB,
            "job/step/memory.current": 5 * GB,
            "job/step/memory.stat": f"anon 1\ninactive_file {2 * GB}",
            "job/memory.max": 20 * GB,
            "job/memory.current": 6 * GB,
        },
    )
    cores, used = group.quota() or (0.0, float)
    assert (cores, used()) == (2.5, 7.0)
    assert group.cpus() == {0, 1, 2, 8}
    left = group.memory()
    assert left is not None
    assert left() == 5 * GB


def test_a_container_finds_its_group_at_the_root(tmp_path: Path) -> None:
    """Docker mounts the container's group as the root, but may name it by its host path."""
    files = {"cpu.max": "400000 100000", "cpuset.cpus.effective": "4-5", "memory.max": 4 * GB}
    group = tree(tmp_path / "cgroup", "1:cpu:/docker/f00\n0::/docker/f00\n", files)
    assert (group.quota() or (0.0,))[0] == 4.0
    assert group.cpus() == {4, 5}
    left = group.memory()
    assert left is not None
    assert left() == 4 * GB


@pytest.mark.parametrize(
    ("group", "files"),
    [
        (GROUP, {"job/step/cpu.max": "max 100000", "job/step/memory.max": "max"}),
        ("4:memory:/docker/f00\n2:cpu,cpuacct:/docker/f00\n", {"cpu/cpu.cfs_quota_us": 100000}),
        ("", {}),
        ("0::/../outside\n", {}),
    ],
)
def test_without_a_limit_there_is_none(tmp_path: Path, group: str, files: dict[str, Any]) -> None:
    """Unlimited groups, those of version 1, an empty tree and a hidden path have no limits."""
    found = tree(tmp_path / "cgroup", group, files)
    assert found.quota() is None
    assert found.cpus() == set()
    assert found.memory() is None


def test_free_memory_is_the_smaller_of_machine_and_container(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """The container's limit applies if it is smaller, else the free memory of the machine."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GB))
    for limit, free in ((8 * GB, 5 * GB), (80 * GB, 10 * GB)):
        files = {"job/step/memory.max": limit, "job/step/memory.current": 3 * GB}
        sensor = memory(tree(tmp_path / str(limit) / "cgroup", GROUP, files))
        assert sensor(0.0) == {"free_memory": free}


Times = namedtuple("Times", "user idle iowait guest guest_nice")


def times(*busy_idle_waited: tuple[float, float, float]) -> list[Times]:
    # A guest's second is part of its host's user time.
    return [
        Times(overrides, idle, waited, overrides / 2, 0.0)
        for overrides, idle, waited in busy_idle_waited
    ]


def cpu_after(monkeypatch: Patch, cgroup: Cgroup, then: list[Any], now: list[Any]) -> Any:
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: then)
    sensor = Cpu(cgroup)
    assert sensor(10.0) == {}
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: now)
    return sensor(12.0)


def test_cpu_use_is_averaged_over_cores(monkeypatch: Patch, tmp_path: Path) -> None:
    """One core is busy, one waits for I/O, two are idle."""
    found = cpu_after(
        monkeypatch,
        Cgroup(tmp_path, tmp_path / "absent"),
        times((5, 5, 5), (5, 5, 5), (5, 5, 5), (5, 5, 5)),
        times((7, 5, 5), (5, 5, 7), (5, 7, 5), (5, 7, 5)),
    )
    assert found == {"cpu_util_simple": 25.0, "cpu_util_max": 100.0, "cpu_iowait": 25.0}


def test_cpu_use_is_relative_to_the_cpus_of_the_container(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """The load of other containers on other cores is excluded."""
    group = tree(tmp_path / "cgroup", GROUP, {"job/step/cpuset.cpus.effective": "2-3"})
    found = cpu_after(
        monkeypatch,
        group,
        times((0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)),
        times((2, 0, 0), (2, 0, 0), (1, 1, 0), (0, 2, 0)),
    )
    assert found == {"cpu_util_simple": 25.0, "cpu_util_max": 50.0, "cpu_iowait": 0.0}


def test_cpu_use_is_relative_to_the_quota_of_the_container(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """Three CPU seconds in two seconds, with a quota of two cores, are 75 %."""
    usage = tmp_path / "cgroup" / "job" / "step" / "cpu.stat"
    files = {"job/step/cpu.max": "200000 100000", "job/step/cpu.stat": "usage_usec 1000000"}
    group = tree(tmp_path / "cgroup", GROUP, files)
    idle = times(*[(0, 0, 0)] * 64), times(*[(0, 2, 0)] * 64)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: idle[0])
    sensor = Cpu(group)
    assert sensor(10.0) == {}
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: idle[1])
    usage.write_text("usage_usec 4000000\n")
    assert sensor(12.0)["cpu_util_simple"] == pytest.approx(75.0)


def test_a_core_with_decreasing_counters_is_excluded(monkeypatch: Patch, tmp_path: Path) -> None:
    """Linux's iowait may decrease: the core is excluded for that interval."""
    found = cpu_after(
        monkeypatch,
        Cgroup(tmp_path, tmp_path / "absent"),
        times((0, 0, 9), (0, 0, 0)),
        times((2, 0, 8), (1, 1, 0)),
    )
    assert found == {"cpu_util_simple": 50.0, "cpu_util_max": 50.0, "cpu_iowait": 0.0}


def test_a_new_process_is_no_growth_of_memory() -> None:
    """It adds its memory to the sum, and what it grows by later to the level."""
    grow = "held = []\nwhile True: held.append(b'x' * 50_000_000); print(flush=True); input()"
    processes = Processes({os.getpid()})
    before = processes(1e6)
    assert before["process_rss_level"] == before["process_rss"]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", grow], stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        late = processes(2e6)
        assert late["process_rss"] - before["process_rss"] > 50e6
        assert late["process_rss_level"] == pytest.approx(before["process_rss"], abs=20e6)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        grown = processes(3e6)["process_rss_level"] - late["process_rss_level"]
        child.kill()
    assert grown > 40e6
    assert processes(4e6)["process_rss_level"] == pytest.approx(before["process_rss"], abs=20e6)


BURN = "import time\nwhile time.process_time() < {}: pass\nprint(flush=True)\n{}"


def test_a_process_that_came_and_went_between_samples_counts() -> None:
    """Workers of a short epoch, and what they started, are in the time of their parent."""
    code = BURN.format(0.3, "")
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    processes = Processes({os.getpid()})
    assert "process_cpu" not in processes(1.0)
    subprocess.run([sys.executable, "-c", BURN.format(0.4, nested)], check=True)
    assert 65.0 < processes(2.0)["process_cpu"] < 100.0
    assert processes(3.0)["process_cpu"] < 20.0


def test_a_new_process_counts_from_its_start_and_once() -> None:
    """Also if it is sampled while it runs, and ends later."""
    processes = Processes({os.getpid()})
    processes(1.0)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", BURN.format(0.5, "input()")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 45.0 < processes(2.0)["process_cpu"] < 80.0
        assert processes(3.0)["process_cpu"] < 20.0
        child.communicate(b"\n")
    assert processes(4.0)["process_cpu"] < 20.0


def test_the_past_of_another_rank_does_not_count() -> None:
    """A rank that becomes known later counts from then on; one that ends, no longer."""
    rank = BURN.format(0.5, "import os; print(os.getpid(), flush=True); time.sleep(60)")
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    roots = {os.getpid()}
    processes = Processes(roots)
    processes(1.0)
    with subprocess.Popen([sys.executable, "-c", start, rank], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert not parent.stdout.readline().strip()
        pid = int(parent.stdout.readline())
    assert processes(2.0)["process_cpu"] < 50.0
    roots.add(pid)
    assert "process_cpu" not in processes(3.0)
    assert processes(4.0)["process_cpu"] < 20.0
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):
        time.sleep(0.01)
    assert "process_cpu" not in processes(5.0)
    processes(6.0)
    assert processes(7.0)["process_cpu"] < 20.0


def test_all_processes_of_the_machine_are_read_only_if_the_kernel_lists_no_children(
    monkeypatch: Patch,
) -> None:
    """Both ways find the same descendants."""
    monkeypatch.setattr(psutil.Process, "children", None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = _family(os.getpid())
        monkeypatch.undo()
        monkeypatch.setattr("lightning_perf.system.host._CHILDREN", Path("/absent"))
        assert child.pid in found
        assert set(_family(os.getpid())) == set(found)
        child.communicate(b"\n")
