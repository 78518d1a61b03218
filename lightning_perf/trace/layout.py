"""Where the traces of one recorder go on one rank: on the disk and on the server."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.trace.conflicts import conflicts
from lightning_perf.trace.names import (
    file_format,
    folder_format,
    remote_format,
    run_values,
    time_values,
)

if TYPE_CHECKING:
    from lightning_perf.moment import Ranks
    from lightning_perf.timestamp import Timestamp

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
        compress: Whether ``.gz`` is appended to both file names, once.

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
        compress: bool,
    ) -> None:
        self._file = file_format(filename, gz=compress)
        self._remote = (
            None if remote_file_name is None else remote_format(remote_file_name, gz=compress)
        )
        self._values = run_values(run_name, ranks)
        self._folder = Path(root) / folder_format(folder).render(self._values)
        suffix = re.search(r"\.\w+$", filename.removesuffix(".gz"))
        self._suffix = suffix[0] if suffix else ""

    def conflict(self, now: Timestamp, stage: str) -> Path | None:
        """A file that lies after the present moment of the stage, if there is one.

        Args:
            now: Where the stage stands.
            stage: Which one.
        """
        values = {**self._values, "stage": stage}
        return conflicts(self._file, values, self._folder_of(stage), now)

    def spool(self, stage: str) -> Path:
        """A new hidden path in the stage's folder, which is made if need be.

        Args:
            stage: What is recorded.

        Returns:
            A path without a file, with the suffix of the file names but without ``.gz``.

        Raises:
            OSError: If the folder cannot be made.
        """
        folder = self._folder_of(stage)
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = f"{self._values['rank']}-{os.getpid()}-{next(_SPOOLS)}"
            # A killed run may have left one: process ids come again.
            if not (path := folder / f".spool-rank{number}{self._suffix}").exists():
                return path

    def names(self, timestamp: Timestamp, stage: str, number: int) -> tuple[Path, str | None]:
        """Where a trace goes.

        Args:
            timestamp: When the recording ended.
            stage: What was recorded.
            number: 1, or more where the names of lower numbers are taken.

        Returns:
            The path on the disk and the name on the server, or None if it is not to be uploaded.
        """
        values = {**self._values, **time_values(timestamp), "stage": stage}
        path = self._folder_of(stage) / _numbered(self._file.render(values), number)
        if self._remote is None:
            return path, None
        remote = PurePosixPath(self._remote.render(values))
        parent = remote.parent if stage == "train" else remote.parent / stage
        return path, str(parent / _numbered(remote.name, number))

    def _folder_of(self, stage: str) -> Path:
        return self._folder if stage == "train" else self._folder / stage


def _numbered(name: str, number: int) -> str:
    """The name with a number before its first dot, so that viewers still know its suffixes."""
    if number == 1:
        return name
    path = PurePosixPath(name)
    stem, dot, suffixes = path.name.partition(".")
    return str(path.with_name(f"{stem}-{number}{dot}{suffixes}"))
