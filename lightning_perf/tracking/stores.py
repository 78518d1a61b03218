"""Files to a store that fsspec knows by its URL: a bucket, a server, a shared folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError, without_credentials
from lightning_perf.trace.compress import written_whole
from lightning_perf.trace.targets import Target
from lightning_perf.trace.urls import split_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: The key of a store's address in the list of pending uploads.
STORE = "store"
# There, a container stands where other URLs have a user: abfs://container@account/path.
_CONTAINERS = ("abfs", "abfss")


def check_store(remote_file_name: str | None) -> None:
    """Refuse the URL of a store that cannot be used on this machine; connects to nothing.

    Args:
        remote_file_name: A URL, any other name, or None.

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
        raise ConfigError(
            "remote_file_name", remote_file_name, problem, "'s3://bucket/rank{rank}.{batch}.json'"
        ) from None
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        remedy = error if package == "fsspec" else f"pip install {package}"
        problem = f"needs a package that is not installed ({remedy})"
        raise ConfigError("remote_file_name", remote_file_name, problem, None) from error


def store_target(url: str) -> Target | None:
    """The store of a URL as a place to send files to.

    Sending raises what the store raises; retrying is the trace writer's. A file replaces the one
    of its name, as a whole where the store is able to.

    Args:
        url: A URL, of which the protocol and the host or bucket count; credentials may be in it.

    Returns:
        The place, or None if this is no URL.
    """
    protocol, host, _ = split_url(url)
    if not protocol:
        return None
    base = f"{protocol}://{host}"
    is_container = protocol in _CONTAINERS and ":" not in host
    return Target(_Store(base).send, {STORE: base if is_container else without_credentials(base)})


class _Store:
    """A file system that is connected to when there is something to send, on that thread."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._system: AbstractFileSystem | None = None
        self._root = ""

    def send(self, path: Path, remote: str) -> None:
        try:
            self._put(path, remote)
        except Exception:
            self._system = None  # its connection may be what broke
            raise

    def _put(self, path: Path, remote: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        if self._system is None:
            self._system, root = url_to_fs(f"{self._base}/", skip_instance_cache=True)
            self._root = root.rstrip("/")
        target = f"{self._root}/{remote}"
        if isinstance(self._system, LocalFileSystem):
            with path.open("rb") as source, written_whole(Path(target)) as file:
                shutil.copyfileobj(source, file)
        else:
            self._system.put_file(str(path), target)
