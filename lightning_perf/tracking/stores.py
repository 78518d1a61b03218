"""Stores that fsspec opens by URL, as upload targets and as the root folder of a run."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, warn, without_credentials
from lightning_perf.traces.folder import README, written_whole
from lightning_perf.traces.names import numbered, split_url
from lightning_perf.traces.uploads import Mirror, Target

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: The key of a store's address in the list of pending uploads.
STORE = "store"
# Their URLs have a container in place of a user: abfs://container@account/path.
_CONTAINERS = ("abfs", "abfss")


def check_store(remote_file_name: str | None, field: str = "remote_file_name") -> None:
    """Refuse the URL of a store that fsspec cannot use on this machine, without connecting.

    Names that are no URL, and None, pass. ``field`` is the name of the setting, for messages.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = split_url(remote_file_name)[0] if isinstance(remote_file_name, str) else ""
    if not protocol:
        return
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        problem = f"has the protocol {protocol}://, which fsspec does not know"
        example = "'s3://bucket/rank{rank}.{batch}.json'"
        raise ConfigError(field, remote_file_name, problem, example) from None
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        remedy = error if package == "fsspec" else f"pip install {package}"
        problem = f"needs a package that is not installed ({remedy})"
        raise ConfigError(field, remote_file_name, problem, None) from error


def store_target(url: str) -> Target | None:
    """The store of a URL, which may hold credentials, as an upload target; None for no URL.

    A file replaces one of the same name, atomically if the store supports that.
    """
    if not split_url(url)[0]:
        return None
    store = _Store(url)
    return Target(store.send, store.address)


def store_mirror(url: str) -> Mirror:
    """The folder of a URL as the mirror of a local folder."""
    store = _Store(url)
    return Mirror(
        adding=Target(partial(store.send, adds=True), store.address),
        replacing=Target(store.send, store.address),
        folder=split_url(url)[2].rstrip("/"),
    )


class _Store:
    """A file system that connects at the first upload, on that thread."""

    def __init__(self, url: str) -> None:
        protocol, host, _ = split_url(url)
        self._base = base = f"{protocol}://{host}"
        is_container = protocol in _CONTAINERS and ":" not in host
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
                with path.open("rb") as source, written_whole(Path(target)) as file:
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
    #: Where people find the files; empty for the path itself.
    place: str = ""

    def close(self) -> None:
        """At the end of the run, remove temporary folders; files not uploaded stay."""
        if self.discards:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.mirror is not None:
            for readme in self.path.rglob(README):
                readme.unlink(missing_ok=True)
            folders = (path for path in self.path.rglob("*") if path.is_dir())
            for folder in (*sorted(folders, reverse=True), self.path):
                with suppress(OSError):  # not empty: it holds files that were not uploaded
                    folder.rmdir()


def root_of(place: str) -> Root:
    """The root for a folder or URL, as the trainer's ``default_root_dir`` may be.

    For a store, files are made in a temporary folder. If the store cannot be used on this machine,
    one warning says where files are written instead.
    """
    # Lightning normalizes the slashes of file:// as in a path, which leaves one of them.
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
    return Root(_temporary(), store_mirror(place), place=without_credentials(place).rstrip("/"))


def trial_root() -> Root:
    """A temporary root for trial runs: files are written as in any run, then deleted."""
    return Root(_temporary(), discards=True)


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="lightning_perf-"))
