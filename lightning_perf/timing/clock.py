"""Times of one thread: exclusive times of spans, which add up to the wall time, and its pauses."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

#: Category and name of the time outside all spans.
_LOOP = ("other", "loop")


class Timer:
    """Total seconds and calls of one action."""

    __slots__ = ("action", "calls", "seconds")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.seconds = 0.0
        self.calls = 0


class Span:
    """Runs a timer while it is the innermost span. Reusable; other threads are ignored.

    ``what`` is category and name of the action, ``name`` the value of the ``with`` statement.
    """

    __slots__ = ("_clock", "_name", "timer", "what")

    #: Whether its timer is the same each time.
    own_timer = True

    def __init__(self, clock: Clock, what: tuple[str, str], name: str) -> None:
        self._clock, self.what, self._name = clock, what, name
        self.timer = clock.timer(*what)
        clock.spans.append(self)

    def find_timer(self) -> Timer:
        """The timer that runs from here; called when the clock processes its log."""
        return self.timer

    def __enter__(self) -> str:
        clock = self._clock
        if get_ident() == clock.thread:
            clock.log.extend((perf_counter(), self, True))
        return self._name

    # Named parameters: packing *error into a tuple takes a tenth of the span's time.
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        clock = self._clock
        if get_ident() == clock.thread:
            clock.log.extend((perf_counter(), self, False))


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


class SaveSpan(Span):
    """Writing a checkpoint. The action names the hook that requested it."""

    __slots__ = ()
    own_timer = False

    @override
    def find_timer(self) -> Timer:
        hook = self._clock.innermost.action.name
        origin = hook if "." in hook else "Trainer.save_checkpoint"
        return self._clock.timer(self.what[0], f"checkpoint writing ({origin})")


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
        #: was entered or left; or the time, the timer that runs from then on, and None. Kept tuples
        #: would make the garbage collector run more often.
        self.log: list[float | Span | Timer | bool | None] = []
        #: All spans, and the one around each training batch, if there is one.
        self.spans: list[Span] = []
        self.batch: Span | None = None
        self._adding = Lock()
        #: The current stage.
        self.stage = ""
        self._timers: dict[Action, Timer] = {}
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
        # Called by a garbage collection, which may have started while the log is processed.
        self.add_up(wait=False)
        return self._running.action

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
            for action, timer in self._timers.items()
            if timer.calls or timer.seconds
        }

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
        return self._timers.setdefault(action, Timer(action))

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
        self.add_up()
        self.thread = None

    def _update(self) -> None:
        now = perf_counter()
        self.add_up()
        self._running.seconds += now - self._mark
        self._mark = now

    def add_up(self, wait: bool = True) -> None:
        """Process the log; ``wait`` for another thread that is doing so, or return."""
        if not wait and self._adding.locked():
            return
        # Entered itself: after a call of `acquire`, a signal's handler may raise.
        with self._adding:
            if not (count := len(self.log)):
                return  # the measured thread may be in `begin`, which does not wait for others
            events = self.log[:count]
            del self.log[:count]
            running, mark, opened, batch = self._running, self._mark, self._open, self.batch
            items: Any = iter(events)
            for now, what, entered in zip(items, items, items, strict=True):
                running.seconds += now - mark
                mark = now
                if entered:
                    running = what.timer if what.own_timer else what.find_timer()
                    running.calls += 1
                    opened.append((what, running, now))
                elif entered is None:
                    running = what
                else:
                    if opened[-1][0] is what or self._unwind(what):
                        if what is batch:
                            self._batches += now - opened[-1][2]
                        del opened[-1]
                    running = opened[-1][1]
            self._running, self._mark = running, mark

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


class GcTimer:
    """Times collections while it is open.

    Args:
        clock: Knows what the training thread does; without the clock, the timer closes itself.

    Example:
        >>> clock = Clock()
        >>> timer = GcTimer(clock)
        >>> timer.open()
        >>> _ = gc.collect()
        >>> timer.close()
        >>> [action.stage for action in timer.costs]
        ['gc']
    """

    def __init__(self, clock: Clock) -> None:
        # Weak, because `gc` keeps the timer of a run whose end was not announced.
        self._clock = weakref.ref(clock)
        #: Seconds and collections, with ``gc`` as stage, and the name of the action and its
        #: category in the view of training.
        self.costs: dict[Action, Cost] = {}
        self._began = 0.0
        self._called = self._collected

    def open(self) -> None:
        """Start."""
        gc.callbacks.append(self._called)

    def close(self) -> None:
        """Stop; may be called more than once."""
        with suppress(ValueError):
            gc.callbacks.remove(self._called)

    def _collected(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = perf_counter()
            return
        spent = perf_counter() - self._began
        if (clock := self._clock()) is None:
            self.close()
            return
        action = clock.running
        key = Action("gc", action.category_in("train"), action.name)
        seconds, calls = self.costs.get(key, (0.0, 0))
        self.costs[key] = Cost(seconds + spent, calls + 1)
