"""Exclusive times: exactly one timer runs at any moment, so timers add up to the wall time."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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
    """Runs a timer while it is the innermost span. Reusable, but not on other threads.

    On a thread other than the clock's, entering and leaving has no effect.

    Args:
        clock: The clock whose timers it switches.
        what: Category and name of the action.
        name: The value of the ``with`` statement.
    """

    __slots__ = ("_clock", "_name", "_what", "timer")

    def __init__(self, clock: Clock, what: tuple[str, str], name: str) -> None:
        self._clock, self._what, self._name = clock, what, name
        self.move()

    def move(self) -> None:
        """Switch to the timer of the clock's current stage."""
        self.timer = self._clock.timer(*self._what)

    def __enter__(self) -> str:
        clock = self._clock
        if get_ident() == clock.thread:
            now = perf_counter()
            clock.running.seconds += now - clock.mark
            clock.mark = now
            clock.open.append(self)
            timer = clock.running = self.timer
            timer.calls += 1
        return self._name

    # Named parameters: packing *error into a tuple takes a tenth of the span's time.
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        clock = self._clock
        if get_ident() == clock.thread:
            now = perf_counter()
            clock.running.seconds += now - clock.mark
            clock.mark = now
            spans = clock.open
            if spans[-1] is self:
                del spans[-1]
            else:
                clock.unwind(self)
            clock.running = spans[-1].timer


class InclusiveSpan(Span):
    """Also adds its inclusive duration, nested spans included, to the clock's ``whole``."""

    __slots__ = ("_began",)

    @override
    def __enter__(self) -> str:
        name = Span.__enter__(self)  # faster than super()
        self._began = self._clock.mark
        return name

    @override
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        Span.__exit__(self)
        clock = self._clock
        clock.whole += clock.mark - self._began


class SpanWithCallbacks(Span):
    """Calls functions after it was entered and left."""

    __slots__ = ("_entered", "_left")

    def __init__(
        self,
        clock: Clock,
        what: tuple[str, str],
        name: str,
        entered: Callable[[], None] | None = None,
        left: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(clock, what, name)
        self._entered, self._left = entered, left

    @override
    def __enter__(self) -> str:
        name = Span.__enter__(self)
        if self._entered is not None and get_ident() == self._clock.thread:
            self._entered()
        return name

    @override
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        Span.__exit__(self)
        if self._left is not None and get_ident() == self._clock.thread:
            self._left()


class SaveSpan(Span):
    """Writing a checkpoint. The action names the hook that requested it."""

    __slots__ = ()

    @override
    def __enter__(self) -> str:
        clock = self._clock
        hook = clock.open[-1].timer.action.name
        origin = hook if "." in hook else "Trainer.save_checkpoint"
        self.timer = clock.timer(self._what[0], f"checkpoint writing ({origin})")
        return Span.__enter__(self)


class UntrackedSpan:
    """A span without a timer: its time belongs to the enclosing span."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        return


class _Nothing:
    """An empty context at half the cost: ``"".format`` accepts any arguments and returns ""."""

    __slots__ = ()

    __enter__ = __exit__ = "".format


#: Replaces spans of Lightning that nobody uses.
NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


class Clock:
    """The timers of the thread that creates it, of which one is running."""

    def __init__(self) -> None:
        #: The measured thread; None after the clock was stopped.
        self.thread: int | None = get_ident()
        self._stage = ""
        self._timers: dict[Action, Timer] = {}
        root = Span(self, _LOOP, "")
        #: Open spans from the outermost to the innermost; the root is never left.
        self.open: list[Span] = [root]
        self.running = root.timer
        #: The time up to which ``running`` is complete.
        self.mark = perf_counter()
        #: Inclusive seconds of all ``InclusiveSpan``.
        self.whole = 0.0

    @property
    def stage(self) -> str:
        """The current stage."""
        return self._stage

    def timer(self, category: str, name: str) -> Timer:
        """Return the timer of an action in the current stage; create it if needed."""
        action = Action(self._stage, category, name)
        return self._timers.setdefault(action, Timer(action))

    def begin(self, stage: str, spans: Iterable[Span]) -> None:
        """Switch to another stage.

        Args:
            stage: The stage.
            spans: All existing spans.
        """
        self._update()
        self._stage = stage
        for span in (self.open[0], *spans):
            span.move()
        self.running = self.open[-1].timer

    def run(self, category: str, name: str) -> None:
        """Run a timer until the next span is entered or left."""
        self._update()
        self.running = self.timer(category, name)

    def unwind(self, span: Span) -> None:
        """Close a span and the spans inside it that an exception left open."""
        if span in self.open:
            while self.open.pop() is not span:
                pass

    @property
    def costs(self) -> dict[Action, Cost]:
        """The cost of every action so far."""
        self._update()
        return {
            action: Cost(timer.seconds, timer.calls)
            for action, timer in self._timers.items()
            if timer.calls or timer.seconds
        }

    def _update(self) -> None:
        now = perf_counter()
        self.running.seconds += now - self.mark
        self.mark = now
