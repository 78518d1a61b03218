"""Exclusive times: at every moment one account is running, so accounts add up to the wall time."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.timings import Action, Cost

if TYPE_CHECKING:
    from collections.abc import Callable


class Account:
    """What one action took so far."""

    __slots__ = ("action", "calls", "seconds")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.seconds = 0.0
        self.calls = 0


class Span:
    """Runs an account while it is the innermost span; made once, entered again and again."""

    __slots__ = ("_clock", "account", "name")

    def __init__(self, clock: Clock, account: Account, name: str) -> None:
        self._clock, self.account, self.name = clock, account, name

    def __enter__(self) -> str:
        clock = self._clock
        now = perf_counter()
        clock.running.seconds += now - clock.mark
        clock.mark = now
        clock.open.append(self)
        account = clock.running = self.account
        account.calls += 1
        return self.name

    def __exit__(self, *_: object) -> None:
        clock = self._clock
        now = perf_counter()
        clock.running.seconds += now - clock.mark
        clock.mark = now
        spans = clock.open
        if spans[-1] is self:
            del spans[-1]
        else:
            clock.unwind(self)
        clock.running = spans[-1].account


class WatchedSpan(Span):
    """Tells when it was entered and left, each right after its account was switched."""

    __slots__ = ("_entered", "_left")

    def __init__(
        self,
        clock: Clock,
        account: Account,
        name: str,
        entered: Callable[[], None] | None = None,
        left: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(clock, account, name)
        self._entered, self._left = entered, left

    @override
    def __enter__(self) -> str:
        super().__enter__()
        if self._entered is not None:
            self._entered()
        return self.name

    @override
    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._left is not None:
            self._left()


class Silent:
    """A span that is not told apart: its time stays with what is around it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        return


class Clock:
    """Keeps the accounts of one thread and knows which one is running.

    Args:
        stage: The one that time belongs to from now on.
    """

    def __init__(self, stage: str = "") -> None:
        self._accounts: dict[Action, Account] = {}
        root = self.root(stage)
        #: From the outermost to the innermost; the root is never left.
        self.open: list[Span] = [root]
        self.running = root.account
        self.mark = perf_counter()
        # With all that is within, unlike accounts.
        self._whole = self._began = 0.0

    def account(self, action: Action) -> Account:
        """The account of an action, opened if there is none."""
        return self._accounts.setdefault(action, Account(action))

    def root(self, stage: str) -> Span:
        """What runs where no other span does."""
        return Span(self, self.account(Action(stage, "other", "loop")), stage)

    def begin(self, stage: str) -> None:
        """Time outside of all spans belongs to another stage from now on."""
        self.settle()
        self.open[0] = self.root(stage)
        self.running = self.open[-1].account

    def run(self, account: Account) -> None:
        """Let an account run until the next span is entered or left."""
        self.running = account

    def whole(self, account: Account, name: str) -> Span:
        """A span whose whole duration is kept besides, as ``train_batch``."""
        return WatchedSpan(self, account, name, self._begin_whole, self._end_whole)

    def unwind(self, span: Span) -> None:
        """Leave a span and those within that were never left, for an exception came by."""
        if span in self.open:
            while self.open.pop() is not span:
                pass

    def settle(self) -> None:
        """Bring the running account up to now."""
        now = perf_counter()
        self.running.seconds += now - self.mark
        self.mark = now

    @property
    def train_batch(self) -> float:
        """Seconds of all ``whole`` spans."""
        return self._whole

    @property
    def costs(self) -> dict[Action, Cost]:
        """What every action took up to now."""
        self.settle()
        return {
            action: Cost(account.seconds, account.calls)
            for action, account in self._accounts.items()
        }

    def _begin_whole(self) -> None:
        self._began = self.mark

    def _end_whole(self) -> None:
        self._whole += self.mark - self._began
