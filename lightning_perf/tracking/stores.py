"""Files to a store that fsspec knows by its URL: a bucket, a server, a shared folder."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.background.files import written_whole
from lightning_perf.errors import ConfigError, without_credentials
from lightning_perf.traces.names import numbered
from lightning_perf.traces.uploads import split_url
from lightning_perf.traces.writer import Mirror, Target

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: The key of a store's address in the list of pending uploads.
STORE = "store"
# There, a container stands where other URLs have a user: abfs://container@account/path.
_CONTAINERS = ("abfs", "abfss")


def check_store(remote_file_name: str | None, field: str = "remote_file_name") -> None:
    """Refuse the URL of a store that cannot be used on this machine; connects to nothing.

    Args:
        remote_file_name: A URL, any other name, or None.
        field: The setting that it comes from.

    Raises:
        ConfigError: If fsspec does not know the protocol, or a package for it is missing.
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
    """The store of a URL as a place to send files to.

    Sending raises what the store raises; retrying is the trace writer's. A file replaces the one
    of its name, as a whole where the store is able to.

    Args:
        url: A URL, of which the protocol and the host or bucket count; credentials may be in it.

    Returns:
        The place, or None if this is no URL.
    """
    if not split_url(url)[0]:
        return None
    store = _Store(url)
    return Target(store.send, store.address)


def store_mirror(url: str) -> Mirror:
    """The folder of a URL as the one that a local folder stands for.

    Args:
        url: As for `store_target`; what stands below the host or bucket counts too.
    """
    store = _Store(url)
    replacing, adding = Target(store.send, store.address), Target(store.add, store.address)
    return Mirror(adding, replacing, split_url(url)[2].rstrip("/"))


class _Store:
    """A file system that is connected to when there is something to send, on that thread."""

    def __init__(self, url: str) -> None:
        protocol, host, _ = split_url(url)
        self._base = base = f"{protocol}://{host}"
        is_container = protocol in _CONTAINERS and ":" not in host
        self.address = {STORE: base if is_container else without_credentials(base)}
        self._system: AbstractFileSystem | None = None
        self._root = ""

    def send(self, path: Path, remote: str) -> None:
        """Replace what has the name."""
        self._put(path, remote, adds=False)

    def add(self, path: Path, remote: str) -> None:
        """Take the first number with which nothing has the name."""
        self._put(path, remote, adds=True)

    def _put(self, path: Path, remote: str, adds: bool) -> None:
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
            self._system = None  # its connection may be what broke
            raise

    def _connect(self) -> AbstractFileSystem:
        from fsspec.core import url_to_fs

        if self._system is None:
            self._system, root = url_to_fs(f"{self._base}/", skip_instance_cache=True)
            self._root = root.rstrip("/")
        self._system.invalidate_cache()  # other runs may have written since
        return self._system
