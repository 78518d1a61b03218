"""Methods that are stood before on their instances, and put back as they were."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_ABSENT = object()


class StandIn:
    """Is called in place of a method, and passes for it in all else.

    Args:
        original: The method.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.original, name)

    # Lightning compares the functions by which metrics are reduced, also with those of earlier
    # runs.
    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if isinstance(other, StandIn) else other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of its owner has the method itself.
        return _same, (self.original,)


class Timed(StandIn):
    """A method that runs within a context: a span, or a count.

    Args:
        original: The method.
        context: Makes the context, once a call.
    """

    def __init__(
        self, original: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(original)
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method within its context."""
        with self._context():
            return self.original(*args, **kwargs)


class Wraps:
    """The methods that are stood before now."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, StandIn]] = []

    def time(
        self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Time a method of one object from now on, if it has it and lets us.

        Args:
            owner: The object.
            name: The method's name.
            context: Makes the context, once a call.
        """
        if not isinstance(getattr(owner, name, None), Timed):
            self.put(owner, name, lambda original: Timed(original, context))

    def put(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], StandIn]) -> None:
        """Stand before a method of one object from now on, if it has it and lets us.

        Args:
            owner: The object.
            name: The method's name.
            make: Makes what is called in its place.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return
        with suppress(Exception):
            before = _ABSENT if is_of_class(owner, name, original) else original
            ours = make(original)
            setattr(owner, name, ours)
            self._put.append((owner, name, before, ours))

    def restore(self) -> None:
        """Put back what stood there, unless it was exchanged meanwhile."""
        while self._put:
            owner, name, before, ours = self._put.pop()
            with suppress(Exception):
                if getattr(owner, name) is not ours:
                    continue
                if before is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


def is_of_class(owner: object, name: str, method: object) -> bool:
    """Whether what an object has by a name is its class's, and not put on the object itself."""
    # Not by vars(): an object whose __dict__ was once asked for is slower from then on.
    return getattr(method, "__func__", method) is getattr(type(owner), name, None)


def _same(value: Any) -> Any:
    return value
