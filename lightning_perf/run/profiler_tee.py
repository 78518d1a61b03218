"""Profilers that record spans and forward them to the user's own profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

from lightning_perf.timing.clock import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    Find = Callable[[str], AbstractContextManager[Any]]


class NullProfiler(PassThroughProfiler):
    """Does nothing as well, without making a generator for each span."""

    @override
    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return NOTHING

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return PassThroughProfiler, ()


class SpanProfiler(PassThroughProfiler):
    """Hears every span of a trainer that has no profiler.

    Args:
        find: Gives our span by Lightning's name for it.
    """

    def __init__(self, find: Find) -> None:
        super().__init__()
        self.profile = find  # type: ignore[method-assign, assignment]

    @override
    def start(self, action_name: str) -> None:
        self.profile(action_name).__enter__()

    @override
    def stop(self, action_name: str) -> None:
        self.profile(action_name).__exit__(None, None, None)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the trainer has no run of ours.
        return PassThroughProfiler, ()


class TeeProfiler:
    """Hears every span, and passes each on to the profiler that it stands in for.

    All else, its class included, is that profiler's.

    Args:
        theirs: The trainer's own.
        find: Gives our span by Lightning's name for it.
    """

    def __init__(self, theirs: Any, find: Find) -> None:
        # Past __setattr__, which would write to theirs.
        vars(self).update(_theirs=theirs, _find=find)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """A span, as a context."""
        return _TeeSpan(self._find(action_name), self._theirs.profile(action_name))

    def start(self, action_name: str) -> None:
        """The beginning of a span."""
        self._find(action_name).__enter__()
        self._theirs.start(action_name)

    def stop(self, action_name: str) -> None:
        """The end of a span."""
        try:
            self._theirs.stop(action_name)
        finally:
            self._find(action_name).__exit__(None, None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (vars(self)["_theirs"],)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_theirs"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._theirs, name, value)


class _TeeSpan:
    """Our span around the user's profiler's, which thereby measures what it would without us."""

    __slots__ = ("_ours", "_theirs")

    def __init__(
        self, ours: AbstractContextManager[Any], theirs: AbstractContextManager[Any]
    ) -> None:
        self._ours, self._theirs = ours, theirs

    def __enter__(self) -> Any:
        self._ours.__enter__()
        try:
            return self._theirs.__enter__()
        except BaseException:
            self._ours.__exit__(None, None, None)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._theirs.__exit__(*error)
        finally:
            self._ours.__exit__(None, None, None)


def _same(value: Any) -> Any:
    return value
