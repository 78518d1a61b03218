"""Exclusive times: at every moment one account is running, so accounts add up to the wall time."""

from __future__ import annotations

from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_perf.timing.totals import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

#: What runs where no span does.
_LOOP = ("other", "loop")


class Timer:
    """What one action took so far."""

    __slots__ = ("action", "calls", "seconds")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.seconds = 0.0
        self.calls = 0


class Span:
    """Runs an account while it is the innermost span; made once, entered again and again.

    Another thread than the clock's may enter and leave it: nothing happens.

    Args:
        clock: Whose accounts it switches.
        what: The category and the name of its actions.
        name: What the context gives.
    """

    __slots__ = ("_clock", "_name", "_what", "timer")

    def __init__(self, clock: Clock, what: tuple[str, str], name: str) -> None:
        self._clock, self._what, self._name = clock, what, name
        self.move()

    def move(self) -> None:
        """Belong to the clock's stage from now on."""
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

    # Named, since a tuple of them takes a tenth of the span's time.
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
    """Keeps its whole duration besides, with all that is within, as the clock's ``whole``."""

    __slots__ = ("_began",)

    @override
    def __enter__(self) -> str:
        name = Span.__enter__(self)  # quicker than super()
        self._began = self._clock.mark
        return name

    @override
    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        Span.__exit__(self)
        clock = self._clock
        clock.whole += clock.mark - self._began


class SpanWithCallbacks(Span):
    """Tells when it was entered and left, each right after its account was switched."""

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
    """Writing a checkpoint: each action names the class whose hook asked for it."""

    __slots__ = ()

    @override
    def __enter__(self) -> str:
        clock = self._clock
        owner, dot, _ = clock.open[-1].timer.action.name.partition(".")
        asked = owner if dot else "Trainer.save_checkpoint"
        self.timer = clock.timer(self._what[0], f"checkpoint writing ({asked})")
        return Span.__enter__(self)


class UntrackedSpan:
    """A span that is not told apart: its time stays with what is around it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        return


class _Nothing:
    """A context that does nothing, in half the time: this takes what it is given, and gives ""."""

    __slots__ = ()

    __enter__ = __exit__ = "".format


#: In place of spans of Lightning's that nobody asked for.
NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


class Clock:
    """Keeps the accounts of the thread that makes it, and knows which one is running."""

    def __init__(self) -> None:
        #: The one whose time is kept; None for none any more.
        self.thread: int | None = get_ident()
        self._stage = ""
        self._timers: dict[Action, Timer] = {}
        root = Span(self, _LOOP, "")
        #: From the outermost to the innermost; the root is never left.
        self.open: list[Span] = [root]
        self.running = root.timer
        #: Up to when accounts are settled.
        self.mark = perf_counter()
        #: Seconds within a ``WholeSpan``.
        self.whole = 0.0

    @property
    def stage(self) -> str:
        """The one that time belongs to."""
        return self._stage

    def timer(self, category: str, name: str) -> Timer:
        """The account of an action in the present stage, opened if there is none."""
        action = Action(self._stage, category, name)
        return self._timers.setdefault(action, Timer(action))

    def begin(self, stage: str, spans: Iterable[Span]) -> None:
        """Time belongs to another stage from now on.

        Args:
            stage: The stage.
            spans: All that there are.
        """
        self._settle()
        self._stage = stage
        for span in (self.open[0], *spans):
            span.move()
        self.running = self.open[-1].timer

    def run(self, category: str, name: str) -> None:
        """Let an account run until the next span is entered or left."""
        self.running = self.timer(category, name)

    def unwind(self, span: Span) -> None:
        """Leave a span and those within that were never left, for an exception came by."""
        if span in self.open:
            while self.open.pop() is not span:
                pass

    @property
    def costs(self) -> dict[Action, Cost]:
        """What every action took up to now."""
        self._settle()
        return {
            action: Cost(timer.seconds, timer.calls)
            for action, timer in self._timers.items()
            if timer.calls or timer.seconds
        }

    def _settle(self) -> None:
        now = perf_counter()
        self.running.seconds += now - self.mark
        self.mark = now
