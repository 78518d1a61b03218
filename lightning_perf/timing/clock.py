"""Times of one thread: exclusive times of spans, which add up to the wall time, and its pauses."""

from __future__ import annotations

import gc
import weakref
from array import array
from bisect import bisect
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import RLock, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from lightning_perf.timing.totals import CATEGORIES, Action, Cost, Floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

#: Category and name of the time outside all spans.
_LOOP = ("other", "loop")
#: Phases and times of collections that are kept until they are read: those of the last 65,536.
_MOST_EVENTS = 4 * 65_536


class Timer:
    """Total seconds and calls of one action."""

    __slots__ = ("action", "calls", "number", "seconds")

    def __init__(self, action: Action, number: int) -> None:
        self.action = action
        #: Unique within a clock. Modulo the number of categories, it is the position of the timer's
        #: category, in the view of training.
        self.number = number * len(CATEGORIES) + CATEGORIES.index(action.category_in("train"))
        self.seconds = 0.0
        self.calls = 0


_number = attrgetter("number")


class Span:
    """Runs a timer while it is the innermost span. Reusable; other threads are ignored.

    ``what`` is category and name of the action, ``name`` the value of the ``with`` statement.
    """

    __slots__ = ("_clock", "_log", "_name", "timer", "what")

    def __init__(self, clock: Clock, what: tuple[str, str], name: str) -> None:
        self._clock, self.what, self._name = clock, what, name
        self._log = clock.log.extend  # bound once: spans are entered ten times per batch
        self.timer = clock.timer(*what)
        clock.spans.append(self)

    def __enter__(self) -> str:
        if get_ident() == self._clock.thread:
            self._log((perf_counter(), self, True))
        return self._name

    # Named parameters: packing *error into a tuple takes a tenth of the span's time.
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if get_ident() == self._clock.thread:
            self._log((perf_counter(), self, False))


class SpanWithCallbacks(Span):
    """Calls functions after it was entered and left."""

    __slots__ = ("_after_enter", "_after_leave")

    def __init__(
        self,
        clock: Clock,
        what: tuple[str, str],
        name: str,
        entered: Callable[[], None] | None = None,
        left: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(clock, what, name)
        self._after_enter, self._after_leave = entered, left

    @override
    def __enter__(self) -> str:
        name = Span.__enter__(self)  # faster than super()
        if self._after_enter is not None and get_ident() == self._clock.thread:
            self._after_enter()
        return name

    @override
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        Span.__exit__(self)
        if self._after_leave is not None and get_ident() == self._clock.thread:
            self._after_leave()


class TimedIterator:
    """Gets the items of an iterator within a span."""

    __slots__ = ("_original", "_span")

    def __init__(self, original: Iterator[Any], span: AbstractContextManager[Any]) -> None:
        self._original, self._span = original, span

    def __next__(self) -> Any:
        """The next item of the original."""
        with self._span:
            return next(self._original)


class SaveSpan(Span):
    """Writing a checkpoint. The action names the hook that requested it."""

    __slots__ = ()

    @override
    def __enter__(self) -> str:
        clock = self._clock
        if get_ident() == clock.thread:
            clock.add_up()
            clock.saves += clock.ended != clock.saved
            clock.saved = clock.ended
            hook = clock.innermost.action.name
            origin = hook if "." in hook else "Trainer.save_checkpoint"
            self.timer = clock.timer(self.what[0], f"checkpoint writing ({origin})")
        return Span.__enter__(self)


class _Nothing:
    """An empty context at half the cost: ``"".format`` accepts any arguments and returns ""."""

    __slots__ = ()

    __enter__ = __exit__ = "".format


#: Faster than ``Cost(...)``, which a report calls for each action.
_cost: Callable[[tuple[float, int]], Cost] = partial(tuple.__new__, Cost)

#: Replaces unused spans of Lightning.
NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


class Clock:
    """The timers of the thread that creates it, of which one is running.

    Entering or leaving a span only appends to a log: code that runs between the caller's own work
    finds cold caches, and each object that it touches there takes several times as long as in the
    loop that adds up the log when times are read.
    """

    def __init__(self) -> None:
        #: The measured thread; None after the clock was stopped.
        self.thread: int | None = get_ident()
        #: Events that are not added up yet, three items each: the time, the span, and whether it
        #: was entered or left; or the time, the timer that runs from then on, and None; or the end
        #: of a training batch, and None twice. Kept tuples would make the garbage collector run
        #: more often.
        self.log: list[float | Span | Timer | bool | None] = []
        #: Seconds of each of ``CATEGORIES`` in each training batch since the last reading: one row
        #: per batch, those of some batches per table. Not kept if it is None.
        self.by_batch: deque[NDArray[np.float64]] | None = None
        #: Training batches that have ended, how many were the last one before a checkpoint, and the
        #: number of the latest of these.
        self.ended, self.saves, self.saved = 0, 0, -1
        # Seconds of each category in the batch that has not ended.
        self._unfinished = np.zeros(len(CATEGORIES))
        #: The minimum times of some actions.
        self.floors: dict[Action, Floor] = {}
        #: All spans, and the one around each training batch, if there is one.
        self.spans: list[Span] = []
        self.batch: Span | None = None
        # Whether the log is being added up, by the thread that holds the lock.
        self._adding, self._busy = RLock(), False
        self._gc = GcTimer()
        self._collections: dict[Action, Cost] = {}
        #: The sum of the squares of the seconds of collections, up to the last reading.
        self.squares = 0.0
        #: The current stage.
        self.stage = ""
        self._timers: dict[Action, Timer] = {}
        self._numbers = count()
        root = Span(self, _LOOP, "")
        # Spans with their timers and when they were entered; the first one is never left.
        self._open: list[tuple[Span, Timer, float]] = [(root, root.timer, 0.0)]
        self._running = root.timer
        # The time up to which the running timer is complete.
        self._mark = perf_counter()
        self._batches = 0.0

    @property
    def running(self) -> Action:
        """The action of the thread now."""
        # Called by a thread that looks for hangs, also while `add_up` itself does not end.
        self.add_up(wait=False)
        return self._running.action

    @property
    def enclosing(self) -> list[Action]:
        """The actions of the open spans, the outermost first; for any thread."""
        self.add_up(wait=False)
        return [timer.action for _, timer, _ in self._open.copy()]

    @property
    def latest(self) -> float:
        """When a span was last entered or left; for any thread."""
        event: Any = self.log[-3:] or (self._mark,)
        return float(event[0])

    @property
    def innermost(self) -> Timer:
        """The timer of the innermost open span."""
        return self._open[-1][1]

    @property
    def batches(self) -> float:
        """Seconds of all training batches, nested spans included."""
        self.add_up()
        return self._batches

    @property
    def costs(self) -> dict[Action, Cost]:
        """The cost of every action so far."""
        self._update()
        return {
            action: _cost((timer.seconds, timer.calls))
            for action, timer in [*self._timers.items()]  # a signal's handler may add one
            if timer.calls or timer.seconds
        }

    @property
    def collections(self) -> dict[Action, Cost]:
        """Seconds and number of collections, with ``gc`` as stage.

        The name is that of the action in which they began, and the category its category in the
        view of training.
        """
        self.add_up()
        return self._collections

    def seconds_of(self, category: str) -> dict[str, float]:
        """Seconds of a category so far by stage, with the action that runs; for any thread."""
        self.add_up()
        found: dict[str, float] = {}
        # Copied, because the training thread adds timers.
        for action, timer in self._timers.copy().items():
            if action.category == category:
                seconds = timer.seconds
                if timer is self._running:
                    seconds += perf_counter() - self._mark
                found[action.stage] = found.get(action.stage, 0.0) + seconds
        return found

    def timer(self, category: str, name: str) -> Timer:
        """Return the timer of an action in the current stage; create it if needed."""
        action = Action(self.stage, category, name)
        if (known := self._timers.get(action)) is not None:
            return known  # uses no number: sums are in arrays as long as the largest number
        return self._timers.setdefault(action, Timer(action, next(self._numbers)))

    def begin(self, stage: str) -> None:
        """Switch to another stage."""
        self._update()
        self.stage = stage
        for span in self.spans:
            span.timer = self.timer(*span.what)
        self._open = [(span, span.timer, began) for span, _, began in self._open]
        self._running = self.innermost

    def run(self, category: str, name: str) -> None:
        """Run a timer until the next span is entered or left."""
        self.log.extend((perf_counter(), self.timer(category, name), None))

    def stop(self) -> None:
        """Stop recording; spans that are still open have no effect."""
        self._gc.close()
        self.add_up()
        self.thread = None

    def _update(self) -> None:
        now = perf_counter()
        if self.add_up():
            seconds, self._mark = now - self._mark, now
            self._running.seconds += seconds
            self._unfinished[self._running.number % len(CATEGORIES)] += seconds

    def add_up(self, wait: bool = True) -> bool:
        """Process the log; return whether it was done.

        It is not if this thread is doing so, because the handler of a signal reads times in the
        middle of it. ``wait`` for another thread that is doing so, or return.
        """
        if self._busy and not wait:
            return False
        # Entered itself: after a call of `acquire`, a signal's handler may raise.
        with self._adding:
            if self._busy:
                return False
            self._busy = True
            try:
                self._add_up()
            finally:
                self._busy = False
        return True

    def _add_up(self) -> None:
        collections = self._gc.ended()  # first: then the log has what came before them
        count = len(self.log)
        events: list[Any] = self.log[:count]
        del self.log[:count]
        times = events[::3]
        ran = self._process(events, times)
        for began, seconds in collections:
            before = bisect(times, began)
            action = (ran[before] if before < len(ran) else self._running).action
            key = Action("gc", action.category_in("train"), action.name)
            earlier, calls = self._collections.get(key, (0.0, 0))
            self._collections[key] = Cost(earlier + seconds, calls + 1)
            self.squares += seconds**2

    def _process(self, events: list[Any], times: list[float]) -> list[Timer]:
        """Add events to the timers; returns the timer that ran before each."""
        ran: list[Timer] = []
        if not events:
            return ran  # the measured thread may be in `begin`, which does not wait for others
        running, opened, batch = self._running, self._open, self.batch
        items: Any = iter(events)
        ends, add = list[int](), ran.append
        for now, what, entered in zip(items, items, items, strict=True):
            add(running)
            if entered:
                running = what.timer
                running.calls += 1
                opened.append((what, running, now))
            elif entered is not None:
                if opened[-1][0] is what or self._unwind(what):
                    if what is batch:
                        self._batches += now - opened[-1][2]
                    del opened[-1]
                running = opened[-1][1]
            elif what is not None:
                running = what
            else:
                ends.append(len(ran))
        self.ended += len(ends)
        seconds = np.diff(array("d", [self._mark, *times]))
        self._running, self._mark = running, times[-1]
        numbers = np.fromiter(map(_number, ran), np.intp, len(ran))
        sums = np.bincount(numbers, seconds).tolist()
        for timer in {*ran}:
            timer.seconds += sums[timer.number]
        self._add_to_floors(numbers, seconds)
        if self.by_batch is not None:
            self._divide(numbers % len(CATEGORIES), seconds, ends)
        return ran

    def _add_to_floors(self, numbers: NDArray[np.intp], seconds: NDArray[np.float64]) -> None:
        for action, floor in self.floors.items():
            if (timer := self._timers.get(action)) is not None:
                for value in seconds[numbers == timer.number].tolist():
                    floor.add(value)

    def _divide(
        self, positions: NDArray[np.intp], seconds: NDArray[np.float64], ends: list[int]
    ) -> None:
        """Divide seconds in categories between batches, each up to one of the ends."""
        rows, size = np.searchsorted(ends, np.arange(len(seconds)), side="right"), len(CATEGORIES)
        cells = np.bincount(rows * size + positions, seconds, (len(ends) + 1) * size)
        table = cells.reshape(-1, size).astype(float, copy=False)
        table[0] += self._unfinished
        self._unfinished = table[-1]
        if ends and self.by_batch is not None:
            self.by_batch.append(table[:-1])

    def _unwind(self, span: Span) -> bool:
        """Close the spans inside a span that an exception left open; False if it is not open."""
        if not any(each is span for each, _, _ in self._open):
            return False
        while self._open[-1][0] is not span:
            self._open.pop()
        return True


#: The stage of what `run_queue` returns.
QUEUE = "run queue"


def run_queue(stat: Path = Path("/proc/thread-self/schedstat")) -> dict[Action, Cost]:
    """Seconds that this thread ran and waited for a CPU; nothing if the kernel reports none."""
    try:
        with stat.open("rb", buffering=0) as file:  # binary is much faster than text
            ran, waited, times = map(int, file.read().split())
    except (OSError, ValueError):
        return {}
    return {
        Action(QUEUE, "", "running"): Cost(ran / 1e9, times),
        Action(QUEUE, "", "waiting"): Cost(waited / 1e9, times),
    }


def waited_for_cpu() -> float | None:
    """Seconds that this thread has waited for a CPU; None if the kernel does not report it."""
    waiting = run_queue().get(Action(QUEUE, "", "waiting"))
    return waiting and waiting.seconds


def collection_callback(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function for ``gc.callbacks`` that calls a C function with the phase.

    It runs C code alone: in Python code, the handler of a signal may raise, and Python drops what
    is raised in a collection.
    """
    return property(function).__get__  # called with an object and its class, it ignores the latter


class GcTimer:
    """Records collections until it is closed or dropped. It holds their times, nothing of a run.

    Example:
        >>> timer = GcTimer()
        >>> _ = gc.collect()
        >>> timer.close()
        >>> (began, seconds), *_ = timer.ended()
    """

    def __init__(self) -> None:
        # Phases, each followed by its time; bounded, because processes that the training forks
        # record and do not read.
        self._events: deque[str | float] = deque(maxlen=_MOST_EVENTS)
        self._phase = ""
        self._began: float | None = None
        append = self._events.append
        append_time = partial(next, map(append, iter(perf_counter, None)))
        callbacks = [collection_callback(append), collection_callback(append_time)]
        gc.callbacks.extend(callbacks)
        #: Stop; may be called more than once. The end of a run may not be announced.
        self.close = weakref.finalize(self, _remove, callbacks)
        self.close.atexit = False

    def ended(self) -> list[tuple[float, float]]:
        """When collections began that have ended since the last call, and their seconds."""
        found: list[tuple[float, float]] = []
        for _ in range(len(self._events)):
            event = self._events.popleft()
            if isinstance(event, str):
                self._phase = event
            elif self._phase == "start":
                self._began = event
            elif self._began is not None:
                found.append((self._began, event - self._began))
                self._began = None
        return found


def _remove(callbacks: list[Callable[..., object]]) -> None:
    for each in callbacks:
        with suppress(ValueError):
            gc.callbacks.remove(each)
