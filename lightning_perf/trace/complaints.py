"""Warnings that come once, however often what they are about does."""

from __future__ import annotations

from contextlib import suppress

from lightning_perf.errors import PerfWarning, warn


class Complaints:
    """Says each kind of trouble when it first comes, and at the end how often it came again.

    A server that is gone for a million windows fills no terminal, and no registry of warnings.
    Where the user turned warnings into errors, they must not keep a trace from its place.
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
        self._say(message)

    def sum_up(self) -> None:
        """Say how often each kind of trouble came again, once."""
        for kind, count in self._again.items():
            if count:
                self._again[kind] = 0
                self._say(f"{count} more {kind}.")

    def _say(self, message: str) -> None:
        with suppress(PerfWarning):
            warn(message)
