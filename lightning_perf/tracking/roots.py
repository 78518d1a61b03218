"""The folder that a run's files lie under: on this machine, or made here for a store."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, warn, without_credentials
from lightning_perf.tracking.stores import check_store, store_mirror

if TYPE_CHECKING:
    from lightning_perf.traces.writer import Mirror


@dataclass(frozen=True, slots=True)
class Root:
    """Where files are written."""

    path: Path
    #: The store that the folder stands for.
    mirror: Mirror | None = None
    #: Whether the files are removed at the end of the run.
    discards: bool = False

    def close(self) -> None:
        """The run is over: remove what was only here for the time being; never what is not sent."""
        if self.discards:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.mirror is not None:
            for readme in self.path.rglob("README.md"):
                readme.unlink(missing_ok=True)
            folders = (path for path in self.path.rglob("*") if path.is_dir())
            for folder in (*sorted(folders, reverse=True), self.path):
                with suppress(OSError):  # not empty: what lies in it was not sent
                    folder.rmdir()


def root_of(place: str) -> Root:
    """The root of a folder or of a URL, as the trainer's ``default_root_dir`` may be.

    What is to lie in a store is made in the system's folder for temporary files. Where the store
    cannot be used on this machine, one warning says where files go instead.

    Args:
        place: A path or a URL.
    """
    # Lightning takes the slashes of file:// for a path's, and leaves one of them.
    if found := re.match(r"(?:file|local):/*(/.*)", place):
        place = found[1]
    if "://" not in place:
        return Root(Path(place))
    try:
        check_store(place, "default_root_dir")
    except ConfigError as error:
        path = Path.cwd()
        warn(f"{without_credentials(place)} {error.problem}: files are written to {path} instead.")
        return Root(path)
    return Root(_temporary(), store_mirror(place))


def trial_root() -> Root:
    """A root whose files are made, so that a trial run shows whether they can be, and removed."""
    return Root(_temporary(), discards=True)


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="lightning_perf-"))
