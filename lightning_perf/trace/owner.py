"""Whose a folder is: runs of one name, which loggers draw again and again, never share one."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from errno import ENOTDIR
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.trace.names import folder_format, run_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_perf.moment import Ranks

#: The file that holds the identity of the run that a folder belongs to.
MARKER = ".run"
# Seconds between a rank's making of a marker and its writing of it, at the very most.
_PATIENCE = 2.0


class Home:
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
        >>> from lightning_perf.moment import Ranks
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for identity in ("one run", "another run", "one run"):
        ...         home = Home(Path(root), "{run_name}/traces", Ranks(), "owl-7", identity)
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
        depth = _where_they_part(theirs[0], theirs[-1])
        #: The folders above, or the same, that bear the names.
        self._bearers = [] if depth is None else [Path(*path.parts[:depth]) for path in theirs]
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
        for bearer, folder in zip(self._bearers, self._folders, strict=False):
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


def _where_they_part(a: Path, b: Path) -> int | None:
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
