"""Files of attempts, which `run/attempts.py` writes: names, and reading them back."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from lightning_perf.core.goodput import Attempt, attempt_of
from lightning_perf.files import parsed, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

#: A file is named after the attempt: when its training began (UTC), and its process id. The job is
#: named after its first attempt.
_NAME = re.compile(r"\d{8}-\d{6}\.\d{3}-\d{1,10}\.json")
#: Attempts of a job that are kept, and bytes of a file that is read.
MOST, _MOST_BYTES = 100, 1 << 16


def names_in(folder: Path) -> list[str]:
    """The names of files of attempts, in the order in which these began."""
    with suppress(OSError):  # there is no folder
        names = () if folder.is_symlink() else folder.iterdir()
        return sorted(each.name for each in names if _NAME.fullmatch(each.name))
    return []


def attempts_in(folder: Path, job: str | None = None) -> list[Attempt]:
    """The attempts of a job, or of all, in the order in which they began; empty without its first.

    Of many files, that of the first attempt and the latest ones.
    """
    names, first = names_in(folder), f"{job}.json"
    if job is not None and first not in names:
        return []
    found = []
    for name in [*([first] if first in names[:-MOST] else ()), *names[-MOST:]]:
        with suppress(OSError, ValueError):  # not one of ours
            attempt = attempt_of(parsed(read_bytes(folder / name, _MOST_BYTES)))
            if f"{attempt.name}.json" == name and job in (None, attempt.job):
                found.append(attempt)
    return found


def prune(folder: Path, job: str) -> None:
    """Remove the oldest files but that of a job's first attempt, so that one more is allowed."""
    others = [name for name in names_in(folder) if name != f"{job}.json"]
    for name in others[: max(len(others) + 2 - MOST, 0)]:
        (folder / name).unlink(missing_ok=True)
