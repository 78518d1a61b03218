"""Disks that fill up and folders that go away cost windows, never a training or another window.

| fault before batch 10 | x profilers, one of whose windows is open then |
|---|---|
| the disk is full, and stays so | 3 |
| the disk is full, and is no more two batches later | 3 |
| no file may grow any more (a quota) | 3, and VizTracer's own form |
| the folder is removed | 3 |
| a file is in the folder's place | 3 |
| the folder takes no new files for two batches | 3 |
| from the start: a file is in the folder's place | 3 |
| from the start: the disk is full | 3 |
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from helpers.faults import (
    BATCH,
    DONE,
    PROFILERS,
    Nursery,
    Planted,
    Setting,
    await_files,
    files,
    fit,
    profilers,
    whole,
)
from helpers.faults import hidden as hidden_files

from lightning_perf import Fixed, VizTracer
from lightning_perf.profilers import tools
from lightning_perf.profilers.tools import run_python

pytestmark = pytest.mark.slow

Act = Callable[[], object]


def planted(folder: Path, acts: dict[int, Act]) -> Setting:
    """Things done before certain batches, once the first windows are on the disk."""
    settled = Planted("on_train_batch_start", partial(await_files, folder, DONE), BATCH)
    done = [Planted("on_train_batch_start", act, batch) for batch, act in acts.items()]
    return Setting(before=[settled, *done] if acts else [])


@pytest.fixture(scope="module")
def weights(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> object:
    """How the training ends without us."""
    folder = tmp_path_factory.mktemp("without")
    return nursery.run(folder, fit, folder, Setting, ours=[]).ended


@pytest.fixture
def train(nursery: Nursery, tmp_path: Path, weights: object) -> Callable[..., list[str]]:
    """Trains with things done before batches; gives our warnings."""

    def run(profiler: str, folder: Path, acts: dict[int, Act]) -> list[str]:
        process, ours = tmp_path / "process", profilers(profiler)
        ended = nursery.run(process, fit, folder, planted, folder, acts, ours=ours)
        assert ended.ended == weights, ended.stderr
        return ended.said

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes root, or a container that lets it")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    for number, size in enumerate((1 << 20, 1 << 10, 1)):
        with suppress(OSError), (disk / f".filler{number}").open("wb", buffering=0) as file:
            while file.write(b"x" * size) == size:
                pass


def free(disk: Path) -> None:
    for path in disk.glob(".filler*"):
        path.unlink()


def bound() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def occupy(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")


def mark(sign: str, folder: Path) -> None:
    """Folders alone: a write into memray's mapped file, if that were immutable, is a SIGBUS."""
    below = [path for path in folder.iterdir() if path.is_dir()]
    subprocess.run(["chattr", f"{sign}i", str(folder), *map(str, below)], check=True)


def squeezed() -> Setting:
    """VizTracer compresses in a process that has a quota of less than it needs."""

    def run_squeezed(*arguments: str) -> str:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
        try:
            return run_python(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    tools.run_python = run_squeezed
    return Setting()


def hidden(folder: Path) -> set[str]:
    """Kinds of unfinished files, which all know themselves as such."""
    paths = [path for path in hidden_files(folder) if not path.name.startswith(".filler")]
    assert all(path.name.startswith(".spool-") for path in paths), paths
    return {path.suffix for path in paths}


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_full_disk_costs_the_open_window(
    train: Callable[..., list[str]], disk: Path, profiler: str
) -> None:
    """What was placed stays whole; what is cut short has no final name, and is said."""
    told = train(profiler, disk, {BATCH: partial(fill, disk)})
    kept = whole(disk)
    # Memray keeps what it had written, which is readable, and tells on stderr that it stopped.
    assert DONE <= kept <= DONE | (files(profiler, 12) if profiler == "Memray" else set())
    hidden(disk)
    assert told


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_disk_that_was_full_takes_the_next_window(
    train: Callable[..., list[str]], disk: Path, profiler: str
) -> None:
    """Recording continues when there is space again."""
    train(profiler, disk, {BATCH: partial(fill, disk), 12: partial(free, disk)})
    kept = whole(disk)
    assert DONE | files(profiler, 14) <= kept <= DONE | files(profiler, 12, 14)


# Not Memray: its capture ends early, maybe before its first record, which docs/traces.md says.
@pytest.mark.parametrize("profiler", ["PyTorch", "VizTracer"])
def test_a_quota_costs_the_windows_that_it_cuts(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """A trace that the tool could write in part only never gets its final name."""
    folder = tmp_path / "out"
    told = train(profiler, folder, {BATCH: bound})
    assert DONE <= whole(folder) <= DONE | files(profiler, 12, 14)
    hidden(folder)
    assert told


def test_a_quota_on_viztracer_s_own_form_leaves_the_recording(
    nursery: Nursery, tmp_path: Path
) -> None:
    """VizTracer does not report a partly compressed file: the raw one is kept."""
    ours = [VizTracer(schedule=Fixed(1, 6), compress=True, tracer_entries=50_000)]
    folder = tmp_path / "out"
    ended = nursery.run(tmp_path / "process", fit, folder, squeezed, ours=ours)
    assert ended.code == 0, ended.stderr
    assert not whole(folder)
    assert ended.said
    assert hidden(folder)


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_folder_that_is_removed_is_made_again(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """What a tool holds in memory is written all the same; memray's open file is gone, and said."""
    folder = tmp_path / "out"
    told = train(profiler, folder, {BATCH: partial(shutil.rmtree, folder / "records-version_0")})
    lost = profiler == "Memray"
    assert whole(folder) == files(profiler, *([14] if lost else [12, 14]))
    assert len(told) == 2 * lost  # of the capture, and of its summary


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_file_in_the_folder_s_place_costs_the_windows_to_come(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """The windows before are whole where they went."""
    folder = tmp_path / "out"
    told = train(profiler, folder, {BATCH: partial(occupy, folder / "records-version_0")})
    (folder / "records-version_0").unlink()
    assert whole(folder) == DONE
    assert hidden(folder) == ({".bin"} if profiler == "Memray" else set())
    assert told
    assert "report this" not in "".join(told)


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_folder_that_takes_no_files_for_a_while_costs_a_window(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """The next window is recorded, and memray's capture is kept under its hidden name."""
    folder = tmp_path / "out"
    (traces := folder / "records-version_0").mkdir(parents=True)
    try:
        mark("+", traces)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("marking a folder immutable takes root, and a file system that can")
    mark("-", traces)
    try:
        train(profiler, folder, {BATCH: partial(mark, "+", traces), 12: partial(mark, "-", traces)})
    finally:
        mark("-", traces)
    # The first window ends with batch 11: the worker may be too early for it, or just in time.
    kept = whole(folder)
    assert DONE | files(profiler, 14) <= kept <= DONE | files(profiler, 12, 14)
    if profiler == "Memray":
        assert hidden(folder) or kept >= files(profiler, 12)


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_folder_that_cannot_be_made_costs_no_training(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """Each profiler says so once, however many windows it leaves out, and the summary too."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "records-version_0").write_text("not a folder")
    told = train(profiler, folder, {})
    *profilers, summary = told
    assert len(profilers) == 3
    assert all("windows are left out until it can" in line for line in profilers)
    assert "the summary of the run was not written" in summary


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_disk_that_is_full_from_the_start_costs_no_training(
    train: Callable[..., list[str]], disk: Path, profiler: str
) -> None:
    """Each profiler says so, and nothing has a final name."""
    fill(disk)
    told = train(profiler, disk, {})
    assert not whole(disk)
    hidden(disk)
    assert len(told) >= 3
