"""Warnings that come once, however often what they are about does."""

from __future__ import annotations

from lightning_perf.errors import warn


class Complaints:
    """Says each kind of trouble when it first comes, and at the end how often it came again.

    A server that is gone for a million windows fills no terminal, and no registry of warnings.
    """

    def __init__(self) -> None:
        self._again: dict[str, int] = {}

    def tell(self, kind: str, message: str, count: int = 1) -> None:
        """Warn, unless this kind of trouble was told before.

        Args:
            kind: What to say of the number that came again, such as "files were not uploaded".
            message: What to say the first time.
            count: How many this is about.
        """
        if kind in self._again:
            self._again[kind] += count
            return
        self._again[kind] = 0
        warn(message)

    def sum_up(self) -> None:
        """Say how often each kind of trouble came again, once."""
        for kind, count in self._again.items():
            if count:
                self._again[kind] = 0
                warn(f"{count} more {kind}.")
