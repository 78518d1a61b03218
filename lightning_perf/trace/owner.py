"""Whose a folder is: runs of one name, which loggers draw again and again, never share one."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from errno import ENOTDIR
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


def distinct_run_name(root: Path, folder: str, ranks: Ranks, run_name: str, identity: str) -> str:
    """The run's name, or with a number the first one whose folder is no other run's.

    The folder that bears the name, of whatever depth, is marked as this run's, so that all ranks
    and recorders of a run on one file system come to the same name, and runs at the same time to
    different ones.

    Args:
        root: What `folder` lies under, unless that is absolute.
        folder: Format string of the folder; where it has no ``{run_name}``, the name stays.
        ranks: Where this process stands.
        run_name: The run's name, of any characters.
        identity: What tells the run from all others, the same on all its ranks.

    Returns:
        ``run_name``, ``run_name-2``, ``run_name-3`` and so on.

    Raises:
        ConfigError: If the format string cannot work.
        OSError: If the folder cannot be made or marked.

    Example:
        >>> import tempfile
        >>> from lightning_perf.moment import Ranks
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for identity in ("one run", "another run", "one run"):
        ...         distinct_run_name(Path(root), "{run_name}/traces", Ranks(), "owl-7", identity)
        'owl-7'
        'owl-7-2'
        'owl-7'
    """
    place = _place_of_names(root, folder, ranks, run_name)
    names = itertools.chain([run_name], (f"{run_name}-{n}" for n in itertools.count(2)))
    tried: set[Path] = set()
    for name in names:
        path = place(name)
        # The format string may cut the name, and then there are only so many folders.
        if path is None or path in tried:
            break
        if _owner(path, identity) == identity:
            return name
        tried.add(path)
    return run_name


def _place_of_names(
    root: Path, folder: str, ranks: Ranks, run_name: str
) -> Callable[[str], Path | None]:
    """Tells the first folder of a path that bears the run's name, for any name."""
    pattern = folder_format(folder)
    # Rank 0's, so that all ranks ask about one folder whatever else stands in its name.
    leader = replace(ranks, global_rank=0, local_rank=0, node_rank=0)

    def parts(name: str) -> tuple[str, ...]:
        return Path(root, pattern.render(run_values(name, leader))).parts

    pairs = zip(parts(run_name), parts(f"{run_name}-2"), strict=True)
    depth = next((depth for depth, (a, b) in enumerate(pairs, 1) if a != b), None)
    return lambda name: None if depth is None else Path(*parts(name)[:depth])


def _owner(folder: Path, identity: str) -> str:
    """The identity of the run that the folder belongs to: ours, if it was nobody's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # elsewhere that tells of traces of another run
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(folder)) from error
    marker = folder / MARKER
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(identity)
    except FileExistsError:
        return _read(marker)
    return identity


def _read(marker: Path) -> str:
    until = time.monotonic() + _PATIENCE
    while not marker.stat().st_size and time.monotonic() < until:
        time.sleep(0.01)
    return marker.read_text(encoding="utf-8", errors="replace")
