"""The list of pending uploads."""

from __future__ import annotations

from pathlib import Path

from lightning_perf.traces.uploads import PendingUpload, taken_pending


def read_pending(root: Path) -> list[PendingUpload]:
    """The entries of the list in a folder, oldest first."""
    with taken_pending(root) as left:
        return list(left.values())
