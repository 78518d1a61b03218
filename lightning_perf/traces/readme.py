"""The text beside the traces that says how to open them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from lightning_perf.background.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lightning_perf.traces.writer import Target

NAME = "README.md"


class Readme:
    """Written and sent once; what fails is tried again with the next trace, and never said.

    A file of that name that is not ours is the user's: it stays as it is, and is not sent.

    Args:
        text: What it says.
    """

    def __init__(self, text: str) -> None:
        self._content = text.encode()
        self._sent: set[Target] = set()
        self._placed = False

    def place(self, path: Path) -> None:
        """Write it, unless there is a file.

        Args:
            path: Where it belongs.
        """
        if self._placed:
            return
        with suppress(OSError):
            if not path.exists():
                with written_whole(path) as file:
                    file.write(self._content)
            self._placed = True

    def send(self, path: Path, sends: Sequence[tuple[Target, str]]) -> None:
        """Send it where it has not been sent yet.

        Args:
            path: Where it was written.
            sends: Where to, each with its name there.
        """
        with suppress(Exception):
            for target, remote in sends:
                if target not in self._sent and path.read_bytes() == self._content:
                    target.send(path, remote)
                    self._sent.add(target)
