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
    numbered,
    remote_format,
    run_values,
    time_values,
)
from lightning_perf.trace.owner import Home, distinct_name, make_folder
from lightning_perf.trace.readme import NAME as README
from lightning_perf.trace.urls import split_url

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
        self._home = Home(root, folder, ranks, run_name, identity)
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
