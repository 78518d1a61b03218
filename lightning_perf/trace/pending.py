"""The list of files that still have to be uploaded, kept beside them as JSON lines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from lightning_perf.errors import warn
from lightning_perf.trace.compress import written_whole

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_NAME = "pending_uploads.jsonl"


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A file on the disk that did not reach the server."""

    #: Absolute, so that it can be sent from anywhere on the machine.
    path: str
    #: The name that it shall have on the server.
    remote: str
    run_name: str
    #: Why the last attempt failed.
    error: str
    #: Where to: the address of its target, as the tracking address and the run's id.
    target: dict[str, str] = field(default_factory=dict)


def append_pending(root: Path, entry: PendingUpload) -> None:
    """Add an entry to the list; several processes may do so at once.

    Args:
        root: The folder of the list; it is made if need be.
        entry: What is to be sent later.

    Raises:
        OSError: If the list cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / FILE_NAME).open("ab") as file:
        # One write: lines of several ranks do not mix.
        file.write(_line(entry))


def read_pending(root: Path) -> list[PendingUpload]:
    """The entries of the list, oldest first; a line that was cut short is left out and named.

    Args:
        root: The folder of the list.

    Raises:
        OSError: If the list is there but cannot be read.
    """
    path = root / FILE_NAME
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            entries.append(PendingUpload(**json.loads(line)))
        except (ValueError, TypeError):
            warn(f"line {number} of {path} is not an entry and is left out.")
    return entries


def rewrite_pending(root: Path, entries: Iterable[PendingUpload]) -> None:
    """Replace the list as a whole; without entries it is removed.

    Args:
        root: The folder of the list.
        entries: What is still to be sent.

    Raises:
        OSError: If the list cannot be written; the old one stays.
    """
    path = root / FILE_NAME
    lines = [_line(entry) for entry in entries]
    if not lines:
        path.unlink(missing_ok=True)
        return
    with written_whole(path) as file:
        file.writelines(lines)


def _line(entry: PendingUpload) -> bytes:
    return json.dumps(asdict(entry)).encode() + b"\n"
