"""Atomic files: a file has its name only when it is complete."""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Measured on traces: 13 times smaller; a little slower than level 1, eight times faster than 9.
_LEVEL = 3
_CHUNK = 1 << 20


@contextmanager
def written_whole(target: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a hidden file beside the target that is renamed to the target once it is on the disk.

    If the block raises, the target is unchanged. The target's folder is created if needed.
    ``durable`` waits for the disk, so that the file survives a crash of the machine.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # A random name: several ranks may write the same target at the same time.
    partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            if durable:
                _sync(file)
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def compress(source: Path, target: Path) -> None:
    """Move a file and compress it with gzip; equal content gives equal files.

    Raises:
        OSError: If the source cannot be read or the target cannot be written; the source stays.
    """
    with (
        source.open("rb") as raw,
        written_whole(target) as file,
        gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
    ):
        shutil.copyfileobj(raw, packed, _CHUNK)
    source.unlink()


def place(source: Path, target: Path) -> None:
    """Rename a file once it is on the disk.

    Raises:
        OSError: If the source cannot be read or the target cannot be written; the source stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb+") as raw:
        _sync(raw)
    source.replace(target)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
