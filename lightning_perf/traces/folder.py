"""The folders of a run: their names, who owns them, and which files are in the way."""

from __future__ import annotations

import itertools
import os
import re
import time
from dataclasses import replace
from errno import ENOTDIR
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.traces.names import (
    IN_EPOCH,
    TOTALS,
    NameFormat,
    Value,
    file_format,
    folder_format,
    numbered,
    remote_format,
    run_values,
    time_values,
)
from lightning_perf.traces.readme import NAME as README
from lightning_perf.traces.uploads import split_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_perf.core.progress import Ranks, Timestamp


def conflicts(
    pattern: NameFormat, values: Mapping[str, Value], folder: Path, now: Timestamp
) -> Path | None:
    """A file of this pattern that lies after the present moment, if there is one.

    It lies after it if a total in its name is greater than now, or a count within the epoch is
    while the epoch is the same. Both are compared as the name writes them. A file of this very
    moment is none, because a checkpoint and a trace often fall on one batch and a resume must
    work. A name without time conflicts by being there. Hidden files are ignored.

    Args:
        pattern: The file names' format.
        values: The values of all variables but those of time.
        folder: Where to look; it need not exist.
        now: The time to compare with.

    Returns:
        The first such file in the order of names, or None.
    """
    present = pattern.read(pattern.render({**values, **time_values(now)}), values) or {}
    for path in sorted(folder.glob("/".join(["*"] * (pattern.depth + 1)))):
        name = path.relative_to(folder)
        if not any(part.startswith(".") for part in name.parts):
            found = pattern.read(name.as_posix(), values)
            if found is not None and _is_after(found, present):
                return path
    return None


def _is_after(found: Mapping[str, float], present: Mapping[str, float]) -> bool:
    comparable: tuple[str, ...] = TOTALS
    if found.get("epoch") == present.get("epoch"):
        comparable += IN_EPOCH
    return not found or any(found[name] > present[name] for name in comparable if name in found)


#: The file that holds the identity of the run that a folder belongs to.
MARKER = ".run"
# Seconds between a rank's making of a marker and its writing of it, at the very most.
_PATIENCE = 2.0


class RunFolder:
    """The folder of one recorder, which no other run has.

    It bears the run's name, or, where another run of that name was first, the name with a part of
    the run's identity. The folder that bears the name, of whatever depth, is marked as the run's
    when the first of its recorders has something to write: so all ranks and recorders on one file
    system come to the same folder, runs at the same time to different ones, and ranks that share
    no file system and need another name than the run's to the same one.

    Args:
        root: What `folder` lies under, unless that is absolute.
        folder: Format string of the folder; where it has no ``{run_name}``, it is the user's, and
            is neither marked nor changed.
        ranks: Where this process stands.
        run_name: The run's name, of any characters.
        identity: What tells the run from all others, the same on all its ranks; None to take the
            folder as it is.

    Raises:
        ConfigError: If the format string cannot work.

    Example:
        >>> import tempfile
        >>> from lightning_perf.core.progress import Ranks
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for identity in ("one run", "another run", "one run"):
        ...         home = RunFolder(Path(root), "{run_name}/traces", Ranks(), "owl-7", identity)
        ...         home.claim().relative_to(root).as_posix()
        'owl-7/traces'
        'owl-7-9a9b184c/traces'
        'owl-7/traces'
    """

    def __init__(
        self, root: Path, folder: str, ranks: Ranks, run_name: str, identity: str | None
    ) -> None:
        pattern = folder_format(folder)
        names = [run_name] if identity is None else [run_name, distinct_name(run_name, identity)]
        self._identity, self._names = identity or "", names
        self._folders = [Path(root, pattern.render(run_values(name, ranks))) for name in names]
        # Rank 0's, so that all ranks ask about one folder whatever else stands in its name.
        leader = replace(ranks, global_rank=0, local_rank=0, node_rank=0)
        theirs = [Path(root, pattern.render(run_values(name, leader))) for name in names]
        depth = _first_difference(theirs[0], theirs[-1])
        #: The folders above, or the same, that bear the names.
        self._marked_folders = (
            [] if depth is None else [Path(*path.parts[:depth]) for path in theirs]
        )
        self._claimed: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the files are, or would be if the first were written now."""
        return self._claimed or self._choose(_owner)

    @property
    def run_name(self) -> str:
        """The name that the folder bears."""
        return self._names[self._folders.index(self.folder)]

    def claim(self) -> Path:
        """Mark the folder as the run's; what bears the run's name is made if need be.

        Returns:
            The folder, the same one from now on.

        Raises:
            OSError: If it cannot be made or marked.
        """
        if self._claimed is None:
            self._claimed = self._choose(_mark)
        return self._claimed

    def _choose(self, owner_of: Callable[[Path, str], str]) -> Path:
        """The first folder that nobody else has; the last one, if each is another's."""
        for bearer, folder in zip(self._marked_folders, self._folders, strict=False):
            if owner_of(bearer, self._identity) == self._identity:
                return folder
        return self._folders[-1]


def distinct_name(run_name: str, identity: str) -> str:
    """A name that no other run has, the same on all ranks of this one.

    Args:
        run_name: The run's name.
        identity: What tells the run from all others.

    Returns:
        The name with eight characters of the identity: of an id its first ones, else of its hash.
        The name itself, where that is the identity.

    Example:
        >>> distinct_name("owl-7", "3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c")
        'owl-7-3f2a1b0c'
    """
    if identity == run_name:
        return run_name
    is_id = re.fullmatch(r"[0-9a-f]{32}", identity)
    return f"{run_name}-{(identity if is_id else sha256(identity.encode()).hexdigest())[:8]}"


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, if need be.

    Args:
        folder: Its path.

    Raises:
        OSError: If it cannot be made; never `FileExistsError`, which elsewhere tells of traces of
            another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder)) from error


def _first_difference(a: Path, b: Path) -> int | None:
    """How many parts two paths of one length have up to the first in which they differ."""
    pairs = enumerate(zip(a.parts, b.parts, strict=True), 1)
    return next((depth for depth, (one, other) in pairs if one != other), None)


def _owner(folder: Path, identity: str) -> str:
    """The identity of the run that the folder belongs to: ours, if it is nobody's."""
    try:
        return (folder / MARKER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return identity


def _mark(folder: Path, identity: str) -> str:
    """The same, and the folder is ours from then on if it was nobody's."""
    make_folder(folder)
    marker = folder / MARKER
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(identity)
    except FileExistsError:
        _await_content(marker)
        return _owner(folder, identity)
    except OSError:  # a disk that is full: nobody shall wait for what will not be written
        marker.unlink(missing_ok=True)
        raise
    return identity


def _await_content(marker: Path) -> None:
    until = time.monotonic() + _PATIENCE
    while not marker.stat().st_size and time.monotonic() < until:
        time.sleep(0.01)


# One for the process: several recorders may share a folder.
_SPOOLS = itertools.count(1)


class Layout:
    """The names of one recorder's files; those of stages other than train lie in a subfolder.

    Args:
        root: What `folder` lies under, unless that is absolute.
        folder: Format string of the folder.
        filename: Format string of the file names.
        remote_file_name: Format string of the names to upload by, or None.
        ranks: Where this process stands.
        run_name: The run's name, of any characters.
        identity: What tells the run from others of its name, as for `Home`.
        compress: Whether ``.gz`` is appended to both file names, once.
        mirrored: Whether a store has the same names, where runs of all machines meet: then the
            folder always bears the distinct name.

    Raises:
        ConfigError: If a format string cannot work.
    """

    def __init__(
        self,
        root: Path,
        folder: str,
        filename: str,
        remote_file_name: str | None,
        ranks: Ranks,
        run_name: str,
        identity: str | None,
        compress: bool,
        mirrored: bool = False,
    ) -> None:
        self._file = file_format(filename, gz=compress)
        self._remote = (
            None if remote_file_name is None else remote_format(remote_file_name, gz=compress)
        )
        self._values = self._remote_values = run_values(run_name, ranks)
        if identity is not None and remote_file_name is not None and split_url(remote_file_name)[0]:
            # Runs of all machines meet there; in MLflow, a run is alone with its artifacts.
            self._remote_values = run_values(distinct_name(run_name, identity), ranks)
        if mirrored and identity is not None:
            run_name, identity = distinct_name(run_name, identity), None
        self._home = RunFolder(root, folder, ranks, run_name, identity)
        suffix = re.search(r"\.\w+$", filename.removesuffix(".gz"))
        self._suffix = suffix[0] if suffix else ""

    @property
    def run_name(self) -> str:
        """The run's name, as its folder bears it."""
        return self._home.run_name

    def conflict(self, now: Timestamp, stage: str) -> Path | None:
        """A file that lies after the present moment of the stage, if there is one.

        Args:
            now: Where the stage stands.
            stage: Which one.
        """
        values = {**self._values, "stage": stage}
        return conflicts(self._file, values, _within(self._home.folder, stage), now)

    def spool(self, stage: str) -> Path:
        """A new hidden path in the stage's folder, which is made, and marked as the run's.

        Args:
            stage: What is recorded.

        Returns:
            A path without a file, with the suffix of the file names but without ``.gz``.

        Raises:
            OSError: If the folder cannot be made.
        """
        folder = _within(self._home.claim(), stage)
        make_folder(folder)
        while True:
            number = f"{self._values['rank']}-{os.getpid()}-{next(_SPOOLS)}"
            # A killed run may have left one: process ids come again.
            if not (path := folder / f".spool-rank{number}{self._suffix}").exists():
                return path

    def names(
        self, timestamp: Timestamp, stage: str, number: int, raw: bool = False
    ) -> tuple[Path, str | None]:
        """Where a trace goes.

        Args:
            timestamp: When the recording ended.
            stage: What was recorded.
            number: 1, or more where the names of lower numbers are taken.
            raw: Whether the file could not be compressed, and so bears no ``.gz``.

        Returns:
            The path on the disk and the name where it is sent to, or None if it is not to be sent.
        """
        values = {**self._values, **time_values(timestamp), "stage": stage}
        name = numbered(self._file.render(values), number)
        path = _within(self._home.folder, stage) / (name.removesuffix(".gz") if raw else name)
        remote = self._remote_path(timestamp, stage)
        if remote is None:
            return path, None
        parent = remote.parent if stage == "train" else remote.parent / stage
        name = numbered(remote.name, number)
        return path, str(parent / (name.removesuffix(".gz") if raw else name))

    def readme(self, timestamp: Timestamp, stage: str) -> tuple[Path, str | None]:
        """Where the text about a trace goes: to the folder that all stages share.

        Args:
            timestamp: As for `names`.
            stage: As for `names`.

        Returns:
            As `names`. None also where traces are sent to the very root, which is not ours.
        """
        remote = self._remote_path(timestamp, stage)
        path = self._home.folder / README
        if remote is None or remote.parent == PurePosixPath():
            return path, None
        return path, str(remote.parent / README)

    def _remote_path(self, timestamp: Timestamp, stage: str) -> PurePosixPath | None:
        if self._remote is None:
            return None
        values = {**self._remote_values, **time_values(timestamp), "stage": stage}
        return PurePosixPath(self._remote.render(values))


def _within(folder: Path, stage: str) -> Path:
    return folder if stage == "train" else folder / stage
