"""The recordings of a run: each of a window of batches, and of one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar

from lightning_perf.errors import RecorderBusy

if TYPE_CHECKING:
    from lightning_perf.core.progress import Moment
    from lightning_perf.run.run import Run
    from lightning_perf.traces.writer import TraceWriter

Tick = Callable[[], None]


class Recorded:
    """The work that remains after a recorder has stopped; it runs on a worker thread.

    It must not need the training thread, because the next window may already be open.

    Args:
        finish: Completes the file: the path that ``record`` was given. Called once, before all
            others, and again if it failed.
        further: Writes further files, by their name in ``Profiler.further_files``.
    """

    def __init__(
        self,
        finish: Callable[[], object] = lambda: None,
        further: Mapping[str, Callable[[Path], object]] | None = None,
    ) -> None:
        self.further = further or {}
        self._finish = cache(finish)
        # At the end of a run the training thread runs the remaining jobs of the worker. It must
        # not move the recording while the worker still reads it.
        self._turn = Lock()

    def make(self, name: str, target: Path) -> None:
        """Write one of the further files."""
        with self._turn:
            self._finish()
            self.further[name](target)

    def complete(self) -> None:
        """Complete the recording, once no further file is being made from it."""
        with self._turn:
            self._finish()


#: Starts a recorder; yields a function to call after each batch, or None; stops the recorder.
Recording = Generator[Tick | None, None, Recorded | None]


@dataclass(eq=False)
class OpenRecording:
    """A recording in progress, started by its construction; a process has one at a time.

    Raises:
        RecorderBusy: Another recording is in progress.
    """

    #: The kind of profiler, for messages.
    kind: str
    #: Closes the recording, if it ends here, because another profiler starts.
    give_way: Callable[[Run, int], None]
    recording: Recording
    path: Path
    stage: str
    window: Hashable
    #: Number of batches before the window begins.
    warmup: int
    #: Batches of the window so far.
    batches: int = 0
    #: The open recording of this process.
    current: ClassVar[OpenRecording | None] = None
    #: The recordings that this process has begun.
    opened: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if (current := OpenRecording.current) is not None:
            same = current.kind == self.kind
            raise RecorderBusy(self.kind, f"another {current.kind}" if same else current.kind)
        OpenRecording.current = self
        OpenRecording.opened += 1
        try:
            if not hasattr(self.recording, "__next__"):
                raise TypeError("record() is not a generator: yield between start and stop")
            self.tick = next(self.recording)
        except BaseException:
            OpenRecording.current = None
            raise

    def count(self) -> None:
        """Count a batch that has ended."""
        if self.warmup:
            self.warmup -= 1
        else:
            self.batches += 1

    def includes(self, window: Hashable | None, most: int) -> bool:
        """Whether the next batch, which is in this window, belongs to this recording."""
        if self.warmup:  # a window that comes earlier than predicted is recorded without
            return window is None
        return self.window == window and self.batches < most

    def stop(self) -> Recorded:
        """Stop the recorder."""
        try:
            next(self.recording)
        except StopIteration as stopped:
            return stopped.value if isinstance(stopped.value, Recorded) else Recorded()
        finally:
            OpenRecording.current = None
        raise RuntimeError("record() yielded twice: yield once, a function to call per batch")


@dataclass(eq=False)
class Session:
    """The state of one run, on a rank that records."""

    writer: TraceWriter
    #: The writers of files that are made of a recording, by their name in `further_files`.
    further: dict[str, TraceWriter]
    recording: OpenRecording | None = None
    #: Whether there was a window, recorded or not.
    opened: bool = False
    #: Whether the next batch comes after validation inside of fit.
    reopens: bool = False
    #: No window begins before this batch.
    asleep_until: float = math.inf
    #: Stage and number of the last batch that was counted.
    counted: tuple[str, int] = ("", 0)
    #: Kinds of errors that were reported.
    warned: set[str] = field(default_factory=set)
    #: The end of training.
    ended: Moment | None = None
