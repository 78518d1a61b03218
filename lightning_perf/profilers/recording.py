"""A recorder at work: what it yields, what it leaves, and when it has recorded enough."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is left to do when a recorder has stopped: all of it on the worker thread."""

    #: Makes the file whole.
    finish: Callable[[], None] | None = None
    #: Makes further files of the recording, by their name in ``Profiler.further_files``. They are
    #: made before ``finish`` is called.
    further: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    # At the end of a run the training thread does what the worker has not begun, and must not
    # move the recording away from what the worker is making of it.
    _turn: Lock = field(default_factory=Lock)

    def make(self, name: str, target: Path) -> None:
        """Make one of the further files."""
        with self._turn:
            self.further[name](target)

    def complete(self) -> None:
        """Make the recording whole, when none of the further files is being made of it."""
        with self._turn:
            if self.finish is not None:
                self.finish()


#: Starts a recorder; yields what to call after each batch, or None; stops it; returns the rest.
Recording = Generator[Tick | None, None, Recorded | None]


@dataclass(slots=True)
class Window:
    """The recording of one window of batches."""

    recording: Recording
    tick: Tick | None
    path: Path
    stage: str
    window: Hashable
    #: Batches still to come before the window begins.
    warmup: int
    batches: int = 0

    def count(self) -> None:
        """One more batch has ended."""
        if self.warmup:
            self.warmup -= 1
        else:
            self.batches += 1

    def goes_on(self, window: Hashable | None, most: int) -> bool:
        """Whether the batch that comes next belongs into the same file.

        Args:
            window: The schedule's, for that batch.
            most: How many batches a file holds.
        """
        warming = self.warmup > 0 and window is None
        return warming or (self.window == window and self.batches < most)

    def stop(self) -> Recorded:
        """Stop the recorder."""
        try:
            next(self.recording)
        except StopIteration as stopped:
            return stopped.value if isinstance(stopped.value, Recorded) else Recorded()
        raise RuntimeError("record() yielded twice")
