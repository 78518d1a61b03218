"""Full disks and missing folders may lose windows, but never a training or other windows.

| fault before batch 10 | x profilers, one with an open window |
|---|---|
| the disk is full until the end | 3 |
| the disk is full for two batches, also where a window begins, or where one ends | 3 each |
| files cannot grow (a quota) | 3, and VizTracer's own form |
| the folder is removed | 3 |
| a file is in the folder's place | 3 |
| the folder takes no new files for two batches | 3 |
| from the start, where no window opens: a file is in the folder's place | 1 |
| from the start: the disk is full | 1 |
"""

from __future__ import annotations

import re
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
    ForkServer,
    Planted,
    Setting,
    await_files,
    files,
    fit,
    profilers,
    whole,
)
from helpers.faults import hidden as hidden_files

pytestmark = pytest.mark.slow

Act = Callable[[], object]


def planted(folder: Path, acts: dict[int, Act]) -> Setting:
    """A training with actions before certain batches, after the first windows are written."""
    settled = Planted("on_train_batch_start", partial(await_files, folder, DONE), BATCH)
    done = [Planted("on_train_batch_start", act, batch) for batch, act in acts.items()]
    return Setting(before=[settled, *done] if acts else [])


@pytest.fixture(scope="module")
def weights(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The weights at the end of the training without us."""
    folder = tmp_path_factory.mktemp("without")
    return fork_server.run(folder, fit, folder, Setting, ours=[]).ended


@pytest.fixture
def train(fork_server: ForkServer, tmp_path: Path, weights: object) -> Callable[..., list[str]]:
    """Trains with actions before batches; returns our warnings."""

    def run(profiler: str, folder: Path, acts: dict[int, Act]) -> list[str]:
        process, ours = tmp_path / "process", profilers(profiler)
        ended = fork_server.run(process, fit, folder, planted, folder, acts, ours=ours)
        assert ended.ended == weights, ended.stderr
        return ended.said

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
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


def filled_and_freed(disk: Path, batch: int) -> Setting:
    """A training whose disk is full from a batch on, but not for the last two windows."""
    acts = {batch: partial(fill, disk), 7: partial(free, disk)}
    return Setting(before=[Planted("on_train_batch_start", act, at) for at, act in acts.items()])


def bound() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def remove(folder: Path) -> None:
    """Again if a file was written meanwhile."""
    while folder.exists():
        with suppress(OSError):
            shutil.rmtree(folder)
            return


def occupy(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")


def mark(sign: str, folder: Path) -> None:
    """Folders only: a write into memray's mapped file, if it were immutable, is a SIGBUS."""
    below = [path for path in folder.iterdir() if path.is_dir()]
    subprocess.run(["chattr", f"{sign}i", str(folder), *map(str, below)], check=True)


def hidden(folder: Path) -> set[str]:
    """The kinds of unfinished files that are marked as such."""
    paths = [path for path in hidden_files(folder) if not path.name.startswith(".filler")]
    assert all(path.name.startswith(".spool-") for path in paths), paths
    return {path.suffix for path in paths}


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_full_disk_loses_only_the_open_window(
    train: Callable[..., list[str]], disk: Path, profiler: str
) -> None:
    """Finished files stay complete; a truncated one is deleted, which gives a warning."""
    messages = train(profiler, disk, {BATCH: partial(fill, disk)})
    kept = whole(disk)
    # Memray keeps the readable part of its capture, and reports on stderr that it stopped.
    assert DONE <= kept <= DONE | (files(profiler, 12) if profiler == "Memray" else set())
    assert not hidden(disk)  # they would take the space that training needs
    assert messages


@pytest.mark.parametrize("profiler", PROFILERS)
def test_the_next_window_is_recorded_after_a_full_disk(
    train: Callable[..., list[str]], disk: Path, profiler: str
) -> None:
    """Recording continues when there is space again."""
    train(profiler, disk, {BATCH: partial(fill, disk), 12: partial(free, disk)})
    kept = whole(disk)
    assert DONE | files(profiler, 14) <= kept <= DONE | files(profiler, 12, 14)


# Not Memray: its capture may end before its first record.
@pytest.mark.parametrize("profiler", ["PyTorch", "VizTracer"])
def test_a_quota_loses_only_truncated_windows(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """A partly written trace never gets its final name."""
    folder = tmp_path / "out"
    messages = train(profiler, folder, {BATCH: bound})
    assert DONE <= whole(folder) <= DONE | files(profiler, 12, 14)
    hidden(folder)
    assert messages


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_removed_folder_is_created_again(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """Recordings in memory are written; warnings say what is lost: memray's open file, and files
    that were there before.
    """
    folder = tmp_path / "out"
    messages = train(profiler, folder, {BATCH: partial(remove, folder / "records-version_0")})
    lost = profiler == "Memray"
    assert whole(folder) == files(profiler, *([14] if lost else [12, 14]))
    gone = [line for line in messages if "moved or deleted after they were written" in line]
    assert len(gone) == 2  # the first one, and how many kinds more
    assert len(messages) - len(gone) == 2 * lost  # for the capture and for its summary


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_file_in_place_of_the_folder_loses_later_windows_only(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """The earlier windows are complete in the moved folder."""
    folder = tmp_path / "out"
    messages = train(profiler, folder, {BATCH: partial(occupy, folder / "records-version_0")})
    (folder / "records-version_0").unlink()
    assert whole(folder) == DONE
    assert hidden(folder) == ({".bin"} if profiler == "Memray" else set())
    assert messages
    assert "report this" not in "".join(messages)


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_folder_without_write_access_for_two_batches_loses_one_window(
    train: Callable[..., list[str]], tmp_path: Path, profiler: str
) -> None:
    """The next window is recorded, and memray's capture stays under its hidden name."""
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
    # The first window ends with batch 11; whether the worker writes it in time is a race.
    kept = whole(folder)
    assert DONE | files(profiler, 14) <= kept <= DONE | files(profiler, 12, 14)
    if profiler == "Memray":
        assert hidden(folder) or kept >= files(profiler, 12)


def test_a_folder_that_cannot_be_created_does_not_affect_training(
    train: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Each profiler warns once for all its windows, and the summary warns once."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "records-version_0").write_text("not a folder")
    messages = train("PyTorch", folder, {})
    *profilers, summary = messages
    assert len(profilers) == 3
    assert all("windows are left out until it can" in line for line in profilers)
    assert "the summary of the run was not written" in summary


def test_a_disk_that_is_full_from_the_start_does_not_affect_training(
    train: Callable[..., list[str]], disk: Path
) -> None:
    """Each profiler warns, and no file is left."""
    fill(disk)
    messages = train("PyTorch", disk, {})
    assert not whole(disk)
    assert not hidden(disk)
    assert len(messages) >= 3


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("profiler", PROFILERS)
def test_windows_are_recorded_once_a_full_disk_has_space(
    fork_server: ForkServer, tmp_path: Path, disk: Path, profiler: str, batch: int
) -> None:
    """A profiler that could not begin or save a window records later ones, and blames no tool."""
    given = {"ours": profilers(profiler), "disk": disk, "batch": batch}
    ended = fork_server.run(tmp_path / "process", fit, disk, filled_and_freed, **given)
    assert files(profiler, 12, 14) <= whole(disk), ended.said
    assert not hidden(disk)
    assert not re.search("report this|remove one", "".join(ended.said))
