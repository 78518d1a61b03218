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
    """Does nothing, like Lightning's default, but without a generator per span."""

    @override
    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return NOTHING

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return PassThroughProfiler, ()


class SpanProfiler(PassThroughProfiler):
    """Records every span of a trainer without a profiler.

    Args:
        find: Returns our span for Lightning's name of it.
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
        # A copy of the trainer gets the default profiler.
        return PassThroughProfiler, ()


class TeeProfiler:
    """Records every span and forwards it to the user's profiler.

    All other attributes, ``__class__`` included, are those of the user's profiler.

    Args:
        theirs: The user's profiler.
        find: Returns our span for Lightning's name of it.
    """

    def __init__(self, theirs: Any, find: Find) -> None:
        # Bypasses __setattr__, which writes to the user's profiler.
        vars(self).update(_theirs=theirs, _find=find)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return the context of a span."""
        return _TeeSpan(self._find(action_name), self._theirs.profile(action_name))

    def start(self, action_name: str) -> None:
        """Start a span."""
        self._find(action_name).__enter__()
        self._theirs.start(action_name)

    def stop(self, action_name: str) -> None:
        """Stop a span."""
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
    """Our span around that of the user's profiler, so that theirs excludes our overhead."""

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
