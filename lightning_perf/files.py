"""Files: the one reader of those that strangers may have made, and the one writer.

Folders of runs are shared and copied, so that any file below them may be hostile. The reader takes
regular files only, with limits; the writer replaces regular files only. No other module searches
folders with their subfolders.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from errno import E2BIG, EEXIST, EFBIG, EINVAL, EISDIR, ENAMETOOLONG
from math import isfinite
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader

# -- reading --------------------------------------------------------------------------------------

#: Bytes of the largest file that is read as a whole, and the deepest nesting of JSON.
MOST_BYTES, _DEEPEST = 32 << 20, 100
#: Neither waits for the other end of a pipe, nor makes a terminal the process's own.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class NotRegularError(OSError):
    """A pipe, a device, a socket or a folder is in the place of a file."""


def _check_regular(mode: int, path: object) -> None:
    if S_ISDIR(mode):
        raise NotRegularError(EISDIR, os.strerror(EISDIR), str(path))
    if not S_ISREG(mode):
        raise NotRegularError(EINVAL, "Not a regular file", str(path))


def _open_regular(path: str, flags: int) -> int:
    # Before it is opened, which has effects on some devices; and after it, when it cannot change.
    with suppress(FileNotFoundError):
        _check_regular(Path(path).stat().st_mode, path)
    descriptor = os.open(path, flags | _AT_ONCE, 0o666)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def opened(path: Path) -> BufferedReader:
    """Open a file for reading; raises `NotRegularError` where reading might never end."""
    return open(path, "rb", opener=_open_regular)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file; raises `OSError` if it cannot be read or has more bytes."""
    with opened(path) as file:
        # Not the limit at once, which is allocated as a whole. Files of the kernel have no size.
        size = min(os.fstat(file.fileno()).st_size, most)
        content = file.read(size + 1) or b""  # None: one of the kernel's files that waits
        if len(content) > size:
            content += file.read(most - size) or b""
    if len(content) > most:
        raise OSError(EFBIG, f"Larger than {most:,} bytes", str(path))
    return content


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises `OSError` or, as `parsed`, `ValueError`."""
    return parsed(read_bytes(path))


def parsed(content: bytes | str) -> Any:
    """The value of a JSON text; raises `ValueError` for deep nesting and non-finite numbers."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_value(value, _DEEPEST)
    return value


def _check_value(value: Any, deepest: int) -> None:
    if _is_infinite(value):
        raise ValueError(f"{value} is not a number of JSON")
    if isinstance(value, dict | list):
        if not deepest:
            raise ValueError("it is nested too deeply")
        for each in value.values() if isinstance(value, dict) else value:
            _check_value(each, deepest - 1)


def finite(value: Any) -> Any:
    """The value without NaN and infinity, which JSON does not have: `parsed` takes the result."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items() if not _is_infinite(each)}
    if isinstance(value, list | tuple):
        return [None if _is_infinite(each) else finite(each) for each in value]
    return value


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not isfinite(value)


# -- folders ------------------------------------------------------------------------------------

#: Levels of folders that are searched, and the most files and folders of one search.
_LEVELS, MOST_ENTRIES = 100, 1_000_000


def walked(
    root: Path,
    levels: int = _LEVELS,
    enters: Callable[[str], bool] = bool,
    failed: Callable[[OSError], object] = str,
) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it, each with the names of what is no folder, both by name.

    Links are among these names. ``enters`` is asked for the name of each folder below. What is left
    out is given to ``failed``: folders that cannot be read, and those beyond the limits.
    """
    entries = 0
    for path, below, names in os.walk(root, onerror=failed):
        folder = Path(path)
        entries += len(below) + len(names)
        links = {name for name in below if (folder / name).is_symlink()}
        below[:] = sorted(name for name in below if name not in links and enters(name))
        if below and len(folder.relative_to(root).parts) == levels:
            failed(OSError(ENAMETOOLONG, f"deeper than {levels} folders", path))
            below.clear()
        yield folder, sorted([*names, *links])
        if entries > MOST_ENTRIES:
            failed(OSError(E2BIG, f"more than {MOST_ENTRIES:,} files", str(root)))
            return


def files_below(root: Path) -> Iterator[Path]:
    """The regular files of a folder and its subfolders, and links to such files."""
    paths = (folder / name for folder, names in walked(root) for name in names)
    return (path for path in paths if path.is_file())


# -- writing: a file has its name only when it is complete ----------------------------------------

# Measured on traces: 13 times smaller; a little slower than level 1, eight times faster than 9.
_LEVEL = 3
_CHUNK = 1 << 20
#: Attempts to rename a file that another process has open, and the seconds between two.
_ATTEMPTS, _PAUSE = 10, 0.1


@contextmanager
def written_whole(
    target: Path, *, durable: bool = True, replaces: bool = True
) -> Iterator[BinaryIO]:
    """Open a hidden file beside the target that is renamed to the target once it is on the disk.

    If the block raises, the target is unchanged. The target's folder is created if needed.
    ``durable`` waits for the disk, so that the file survives a crash of the machine. Raises
    `NotRegularError` if the target is a device, a pipe, a folder or a link, and `FileExistsError`
    if there is a file that it does not replace.
    """
    check_own(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A random name: several ranks may write the same target at the same time.
    partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            if durable:
                _sync(file)
        _rename(partial, target, replaces)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def gzipped_whole(target: Path, *, replaces: bool = True) -> Iterator[BinaryIO]:
    """As `written_whole`, compressed with gzip; equal content gives equal files."""
    with (
        written_whole(target, replaces=replaces) as file,
        gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed,
    ):
        yield cast("BinaryIO", packed)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, with escapes for what a name on the disk may have besides.

    Part of a text, as on a full disk, would take the space that training needs.
    """
    with written_whole(path, durable=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def compress(source: Path, target: Path, *, replaces: bool = True) -> None:
    """Move a file and compress it; if that raises `OSError`, the source stays."""
    with source.open("rb") as raw, gzipped_whole(target, replaces=replaces) as packed:
        shutil.copyfileobj(raw, packed, _CHUNK)
    source.unlink()


def place(source: Path, target: Path, *, durable: bool = True, replaces: bool = True) -> None:
    """Rename a file once it is on the disk; if that raises `OSError`, the source stays."""
    check_own(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if durable:
        with source.open("rb+") as raw:
            _sync(raw)
    _rename(source, target, replaces)


def _rename(source: Path, target: Path, replaces: bool) -> None:
    """Rename a file; raises `FileExistsError` for a taken name unless it ``replaces`` that file."""
    if not replaces:
        try:
            os.link(source, target)
        except OSError:  # the name is taken, or the file system has no links
            if os.path.lexists(target):
                raise FileExistsError(EEXIST, os.strerror(EEXIST), str(target)) from None
        else:
            source.unlink()
            return
    replace_file(source, target)


def replace_file(source: Path, target: Path) -> None:
    """Rename a file; on Windows, first wait some time for a process that has either one open."""
    for _ in range(_ATTEMPTS if sys.platform == "win32" else 0):
        with suppress(PermissionError):
            source.replace(target)
            return
        time.sleep(_PAUSE)
    source.replace(target)


def appended(path: Path) -> BinaryIO:
    """Open a file to append to it, unbuffered, and not through a link, which may point anywhere."""
    how = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(_open_regular(str(path), how), "ab+", buffering=0)


@contextmanager
def limited(most: int, what: str = "FSIZE") -> Iterator[None]:
    """Limit the files that this process writes to ``most`` bytes: a longer one raises `OSError`.

    With ``"DATA"``, limit the memory that it takes in addition (`MemoryError`). Windows has no such
    limits.
    """
    try:
        import resource
    except ImportError:
        yield
        return
    kind = getattr(resource, f"RLIMIT_{what}")
    if what == "DATA":
        with suppress(OSError, ValueError, IndexError):  # only Linux has the file
            most += int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(kind)
    least = min(each for each in (most, soft, hard) if each != resource.RLIM_INFINITY)
    resource.setrlimit(kind, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def is_at_limit(size: int) -> bool:
    """Whether a file of this size cannot grow by a tenth and a page, as memray's files do."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    grown = (size + resource.getpagesize()) * 1.1
    return limit != resource.RLIM_INFINITY and grown > limit


def check_own(path: Path) -> None:
    """Raise `NotRegularError` if the path itself, not what it links to, is not a regular file."""
    with suppress(FileNotFoundError):
        _check_regular(path.lstat().st_mode, path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
