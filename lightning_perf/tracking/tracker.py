"""Destinations of files: the interface of trackers, stores opened by fsspec, and a run's root."""

from __future__ import annotations

import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightning_perf.errors import ConfigError, warn, without_credentials
from lightning_perf.files import files_below, opened, written_whole
from lightning_perf.traces.names import numbered, split_url
from lightning_perf.traces.uploads import Target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsspec import AbstractFileSystem

    from lightning_perf.traces.uploads import Mirror


class Tracker(ABC):
    """A run of an experiment tracker, to which files are uploaded.

    Rank 0 finds it by the trainer's loggers and broadcasts it, so it must pickle, without its
    connection. Metrics need no tracker: they go to every logger of the trainer.

    To add a tracker, subclass this and name the class as an entry point of the group
    ``lightning_perf.trackers`` in your package's ``pyproject.toml``::

        [project.entry-points."lightning_perf.trackers"]
        mine = "my_package:MyRun"

    Example:
        >>> from shutil import copyfile
        >>> class FolderRun(Tracker):
        ...     def __init__(self, folder):
        ...         self.folder = folder
        ...     @classmethod
        ...     def of(cls, logger):
        ...         return cls(logger.folder) if type(logger).__name__ == "MyLogger" else None
        ...     @classmethod
        ...     def at(cls, address):
        ...         return cls(address["my_folder"]) if "my_folder" in address else None
        ...     @property
        ...     def address(self):
        ...         return {"my_folder": self.folder}
        ...     def upload(self, path, remote):
        ...         copyfile(path, f"{self.folder}/{path.name}")
        >>> FolderRun.at({"my_folder": "/runs/7"}).address
        {'my_folder': '/runs/7'}
    """

    @classmethod
    @abstractmethod
    def of(cls, logger: Any) -> Self | None:
        """The run of a logger, on rank 0; None for loggers of another kind."""

    @classmethod
    @abstractmethod
    def at(cls, address: Mapping[str, str]) -> Self | None:
        """The run at an address, for ``lightning-perf upload``; None for another kind of address.

        Args:
            address: As `address` returned it in the training's process.
        """

    @property
    @abstractmethod
    def address(self) -> Mapping[str, str]:
        """The data that finds the run from another process, without credentials."""

    @abstractmethod
    def upload(self, path: Path, remote: str) -> None:
        """Upload a file; called on a worker thread. Any exception is a failed attempt.

        Args:
            path: The local file.
            remote: Its name in the run, with ``/`` between folders.

        Raises:
            NotHere: The file cannot be uploaded by this process: it is listed for later.
        """

    def upload_later(self, path: Path, remote: str) -> None:
        """As `upload`, for ``lightning-perf upload``, when the training may have ended."""
        self.upload(path, remote)

    def problem(self) -> str | None:
        """Why no file can be uploaded now, found within seconds; None if nothing is known."""
        return None

    @property
    def target(self) -> Target:
        """The run as a target of the upload queue."""
        return Target(self.upload, self.address)


#: The key of a store's address in the list of pending uploads.
STORE = "store"
# Their URLs have a container in place of a user: abfs://container@account/path.
_CONTAINERS = ("abfs", "abfss")


def check_store(
    url: str | None,
    field: str = "remote_file_name",
    example: str = "'s3://bucket/rank{rank}.{batch}.json'",
) -> None:
    """Refuse the URL of a store that fsspec cannot use on this machine, without connecting.

    Names that are no URL, and None, pass. ``field`` is the name of the setting, for messages.
    """
    import fsspec

    protocol = split_url(url).protocol if isinstance(url, str) else ""
    if not protocol:
        return
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        problem = f"has the protocol {protocol}://, which fsspec does not know"
        raise ConfigError(field, url, problem, example) from None
    except ImportError as error:
        problem = f"needs a package that is not installed ({error})"
        raise ConfigError(field, url, problem, None) from error


def store_target(url: str) -> Target | None:
    """The store of a URL, which may hold credentials, as an upload target; None for no URL.

    A file replaces one of the same name, atomically if the store supports that.
    """
    if not split_url(url).protocol:
        return None
    store = _Store(url)
    return Target(store.send, store.address)


class _Store:
    """A file system that connects at the first upload, on that thread."""

    def __init__(self, url: str) -> None:
        place = split_url(url)
        self._base = base = f"{place.protocol}://{place.host}"
        is_container = place.protocol in _CONTAINERS and ":" not in place.host
        self.address = {STORE: base if is_container else without_credentials(base)}
        self._system: AbstractFileSystem | None = None
        self._root = ""

    def send(self, path: Path, remote: str, adds: bool = False) -> None:
        """Upload a file: replace one of the same name, or add the first number that is free."""
        from fsspec.implementations.local import LocalFileSystem

        try:
            system = self._connect()
            names = (f"{self._root}/{numbered(remote, number)}" for number in count(1))
            target = next(name for name in names if not (adds and system.exists(name)))
            if isinstance(system, LocalFileSystem):
                with opened(path) as source, written_whole(Path(target)) as file:
                    shutil.copyfileobj(source, file)
            else:
                system.put_file(str(path), target)
        except Exception:
            self._system = None  # the connection may be broken
            raise

    def _connect(self) -> AbstractFileSystem:
        from fsspec.core import url_to_fs

        if self._system is None:
            self._system, root = url_to_fs(f"{self._base}/", skip_instance_cache=True)
            self._root = root.rstrip("/")
        self._system.invalidate_cache()  # other runs may have added files
        return self._system


@dataclass(frozen=True, slots=True)
class Root:
    """The folder that a run's files are written below."""

    path: Path
    #: The store that mirrors the folder.
    mirror: Mirror | None = None
    #: Whether the files are deleted at the end of the run.
    discards: bool = False
    #: The place shown to users; empty for the path itself.
    place: str = ""

    def close(self) -> None:
        """At the end of the run, remove a temporary folder; files not uploaded stay."""
        if self.discards or (self.mirror is not None and not any(files_below(self.path))):
            shutil.rmtree(self.path, ignore_errors=True)


def root_of(place: str, start: Path) -> Root:
    """The root for a folder or URL, as the trainer's ``default_root_dir`` may be.

    Relative folders are below ``start``.
    For a store, files are made in a temporary folder. If the store cannot be used on this machine,
    one warning says where files are written instead.
    """
    # Lightning normalizes the slashes of file:// as in a path, which leaves one of them.
    if local := re.match(r"(?:file|local):/*(/.*)", place):
        place = local[1]
    if "://" not in place:
        return Root(start / place)
    try:
        check_store(place, "default_root_dir")
    except ConfigError as error:
        warn(f"{without_credentials(place)} {error.problem}: files are written to {start} instead.")
        return Root(start)
    store, folder = _Store(place), split_url(place).path.rstrip("/")
    adding = Target(partial(store.send, adds=True), store.address)
    replacing = Target(store.send, store.address)

    def mirror(name: str, replaces: bool) -> tuple[Target, str]:
        return (replacing if replaces else adding), f"{folder}/{name}".lstrip("/")

    return Root(_temporary(), mirror, place=without_credentials(place).rstrip("/"))


def trial_root() -> Root:
    """A temporary root for trial runs: files are written as in any run, then deleted."""
    return Root(_temporary(), discards=True)


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="lightning_perf-"))
