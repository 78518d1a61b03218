"""When a profiler records: windows open, go on and close as its schedule asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from lightning_perf.errors import RecorderBusy, describe, warn

if TYPE_CHECKING:
    from lightning_perf.core.progress import Moment, Timestamp
    from lightning_perf.run.context import RunContext
    from lightning_perf.schedule import Schedule


_lock = threading.Lock()
_holder: object | None = None


def claim(recorder: object) -> None:
    """Take the process for one recorder.

    Args:
        recorder: Who wants it; its type names it to the next one.

    Raises:
        RecorderBusy: Another one records.
    """
    global _holder
    with _lock:
        if _holder is not None:
            wanted, holder = type(recorder).__name__, type(_holder).__name__
            raise RecorderBusy(wanted, f"another {holder}" if holder == wanted else holder)
        _holder = recorder


def holder() -> object | None:
    """Who has the process."""
    return _holder


def release(recorder: object) -> None:
    """Give it back; harmless if another one has it."""
    global _holder
    with _lock:
        if _holder is recorder:
            _holder = None


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


#: Batches that a schedule's lead is searched for at most.
_MOST_LEAD = 100
#: Batches that a first window is searched for when training has ended without one.
_FURTHEST = 20_000
#: How many times as long a training is imagined for schedules by samples, tokens or seconds.
_MUCH = 1_000_000


def next_window(schedule: Schedule, moment: Moment) -> int | None:
    """How many batches are done when the next window begins, if that can be foreseen.

    Args:
        schedule: Which has no window yet.
        moment: Where to begin to look.

    Returns:
        None also for a window that is too far away to look for.
    """
    furthest = moment.timestamp.batch + _FURTHEST
    while schedule.window(moment) is None:
        batch = moment.timestamp.batch
        following = max(schedule.quiet_until(moment), batch + 1)
        if following > furthest:
            return None
        moment = moment.ahead(following - batch)
    return moment.timestamp.batch


def has_more(schedule: Schedule, moment: Moment) -> bool:
    """Whether a window comes with more samples, tokens or seconds, which cannot be foreseen.

    Args:
        schedule: Which has no window yet.
        moment: The last one.
    """
    now = moment.timestamp
    later = replace(
        now,
        sample=now.sample * _MUCH,
        token=now.token * _MUCH,
        total_wct=now.total_wct * _MUCH,
    )
    return schedule(replace(moment, timestamp=later, previous=now))


@runtime_checkable
class Recorder(Protocol):
    """What is opened and closed, as ``Profiler`` documents it."""

    warms_up: ClassVar[bool]
    schedule: Schedule
    batches_per_trace: int

    def record(self, path: Path, context: RunContext, warmup: int) -> Recording:
        """Record from the first ``next`` to the second."""
        ...

    def save(self, path: Path, timestamp: Timestamp, stage: str, recorded: Recorded) -> None:
        """Take a recording over."""
        ...

    def settle(self, context: RunContext) -> None:
        """Close what is over by now."""
        ...


class Windows:
    """Opens and closes the recordings of one profiler in one run.

    Args:
        profiler: Records and saves.
        spool: Makes a path for a recording of a stage.
    """

    def __init__(self, profiler: Recorder, spool: Callable[[str], Path]) -> None:
        self._profiler, self._spool = profiler, spool
        self.open: Window | None = None
        #: Whether the schedule has had a window, recorded or left out.
        self.opened = False
        #: Batches before this one need not be looked at.
        self.asleep_until = 0
        self._told: set[type] = set()
        self._seen = ("", 0)

    def begin(self, context: RunContext) -> None:
        """A stage begins, or goes on after validation inside of it."""
        self.asleep_until = 0
        self._turn(context)

    def after_batch(self, context: RunContext) -> None:
        """A batch has ended; told twice, as ``settle`` may, it counts once."""
        seen, self._seen = self._seen, (context.stage, context.counters.batch)
        if seen == self._seen:
            return
        if self.open is not None:
            self.open.count()
        self._profiler.schedule.observe(context.moment)
        self._turn(context)

    def settle(self, context: RunContext) -> None:
        """Close what is over by now: another profiler, which is told of things first, wants to."""
        if self.open is not None and self.open.stage != context.stage:
            self.stop(context)
        elif self.open is not None:
            self.after_batch(context)

    def stop(self, context: RunContext, cut_short: bool = False) -> None:
        """Close the open recording, if there is one, and hand it over.

        Args:
            context: The run.
            cut_short: Whether the present batch failed: then even a part of one is kept.
        """
        running, self.open = self.open, None
        if running is None:
            return
        with context.exclude_from_batch_time():
            try:
                recorded = running.stop()
            except OSError as error:
                self._leave_out(error)
                return
            finally:
                release(self._profiler)
        if running.warmup or not (running.batches or cut_short):
            running.path.unlink(missing_ok=True)
            return
        self.opened = True
        stamp = context.progress.timestamp(running.stage)
        self._profiler.save(running.path, stamp, running.stage, recorded)

    def _turn(self, context: RunContext) -> None:
        """Open, go on or close, as the batch asks that comes next."""
        moment, running = context.moment, self.open
        over = context.stage == "train" and moment.fraction == 1.0  # no batch comes any more
        window = None if over else self._profiler.schedule.window(moment)
        if running is not None:
            if running.goes_on(window, self._profiler.batches_per_trace):
                try:
                    if running.tick is not None:
                        running.tick()
                    return
                except RecorderBusy as error:  # a recorder that is not ours is about to start
                    self.stop(context)
                    self._leave_out(error)
                    return
            self.stop(context)
        if window is not None:
            self._start(context, window, warmup=0)
        elif not over:
            self._look_ahead(context, moment)

    def _look_ahead(self, context: RunContext, moment: Moment) -> None:
        """Start ahead of a window that can be foreseen, or sleep until one may be."""
        lead = min(self._profiler.schedule.lead, _MOST_LEAD) if self._profiler.warms_up else 0
        quiet_until, ahead = self._profiler.schedule.quiet_until(moment), moment
        near = quiet_until - lead <= moment.timestamp.batch
        for batches in range(1, lead + 1 if near else 1):
            ahead = ahead.ahead(1)
            window = self._profiler.schedule.window(ahead)
            if window is not None:
                self._start(context, window, warmup=batches)
                return
        if not self._profiler.schedule.watches:
            self.asleep_until = quiet_until - lead

    def _start(self, context: RunContext, window: Hashable, warmup: int) -> None:
        self.opened = self.opened or not warmup
        with context.exclude_from_batch_time():
            try:
                other = holder()
                if isinstance(other, Recorder) and other is not self._profiler:
                    other.settle(context)
                path = self._spool(context.stage)
                recording = self._profiler.record(path, context, warmup)
                claim(self._profiler)
                tick = next(recording)
            except (RecorderBusy, OSError) as error:
                release(self._profiler)
                self._leave_out(error)
                return
            except BaseException:
                release(self._profiler)
                raise
        self.open = Window(recording, tick, path, context.stage, window, warmup)

    def _leave_out(self, error: RecorderBusy | OSError) -> None:
        """One window less; the next one is tried again, and what is wrong is said once."""
        kind = RecorderBusy if isinstance(error, RecorderBusy) else OSError
        if kind in self._told:
            return
        self._told.add(kind)
        name = type(self._profiler).__name__
        if kind is RecorderBusy:
            warn(f"{error} Windows of {name} that fall into it are left out.")
        else:
            warn(f"{name} cannot write ({describe(error)}): windows are left out until it can.")
