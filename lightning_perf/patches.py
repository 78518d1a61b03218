"""Reversible patches of methods on single objects."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class MethodPatch:
    """Is called in place of a method, and passes for it in all else.

    Once released it only calls the method: somebody else's patch may still refer to it.

    Args:
        original: The method, or another stand-in for it.
    """

    #: Where it was put, once it is released.
    _place: tuple[Callable[[], Any], str] | None = None

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if self._place is not None:
            self._clear()
        return self.original(*args, **kwargs)

    def _release(self, place: tuple[Callable[[], Any], str]) -> None:
        """Do nothing more, and refer to nothing but the method."""
        original = self.original
        vars(self).clear()
        vars(self).update(original=original, _place=place)
        self.__class__ = MethodPatch

    def _clear(self) -> None:
        """Remove what was released, where somebody else's patch above it is gone by now."""
        assert self._place is not None  # the caller looked
        find, name = self._place
        with suppress(Exception):
            _clear(find(), name)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.original, name)

    # Lightning compares the functions by which metrics are reduced, also with those of earlier
    # runs.
    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if isinstance(other, MethodPatch) else other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of its owner has the method itself.
        return _same, (self.original,)


class ContextPatch(MethodPatch):
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


class PatchSet:
    """The methods that one owner of patches wraps now, each once; it keeps no object alive."""

    def __init__(self) -> None:
        self._patched: dict[tuple[int, str], tuple[Callable[[], Any], MethodPatch]] = {}

    def wrap_in_context(
        self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Time a method of one object from now on, if it has it and lets us.

        Args:
            owner: The object.
            name: The method's name.
            context: Makes the context, once a call.
        """
        self.wrap(owner, name, lambda original: ContextPatch(original, context))

    def wrap(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], MethodPatch]
    ) -> None:
        """Wrap a method of one object from now on, if it has it and lets us.

        Args:
            owner: The object.
            name: The method's name.
            make: Makes what is called in its place.
        """
        if not callable(getattr(owner, name, None)):
            return
        key = id(owner), name
        find, ours = self._patched.get(key, (None, None))
        if find is not None and ours is not None and find() is owner:
            if any(each is ours for each in _chain(owner, name)):
                return
            # Exchanged, or below somebody else's patch: one of ours at a time has an effect.
            _take_out(owner, name, ours)
        with suppress(Exception):
            _clear(owner, name)
            ours = make(getattr(owner, name))
            setattr(owner, name, ours)
            self._patched[key] = _reference(owner), ours

    def restore(self) -> None:
        """Remove all of them, and nothing else that was put there before or since."""
        while self._patched:
            (_, name), (find, ours) = self._patched.popitem()
            owner = find()
            with suppress(Exception):
                if owner is not None:
                    _take_out(owner, name, ours)


def is_of_class(owner: object, name: str, method: object) -> bool:
    """Whether what an object has by a name is its class's, and not put on the object itself."""
    # Not by vars(): an object whose __dict__ was once asked for is slower from then on.
    return getattr(method, "__func__", method) is getattr(type(owner), name, None)


def _chain(owner: Any, name: str) -> list[MethodPatch]:
    """Our stand-ins for a method, from the outermost in; those below a foreign patch are unseen."""
    found: list[MethodPatch] = []
    here = getattr(owner, name, None)
    while isinstance(here, MethodPatch):
        found.append(here)
        here = here.original
    return found


def _take_out(owner: Any, name: str, ours: MethodPatch) -> None:
    chain = _chain(owner, name)
    place = next((number for number, each in enumerate(chain) if each is ours), None)
    if place:
        chain[place - 1].original = ours.original
    ours._release((_reference(owner), name))
    _clear(owner, name)


def _clear(owner: Any, name: str) -> None:
    """Remove what is released from the outside of a method."""
    here = getattr(owner, name, None)
    if not (type(here) is MethodPatch and here._place is not None):
        return
    while type(here) is MethodPatch and here._place is not None:
        here = here.original
    # A stand-in passes for the class's method as well.
    if not isinstance(here, MethodPatch) and is_of_class(owner, name, here):
        delattr(owner, name)
    else:
        setattr(owner, name, here)


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # an object of slots
        return lambda: owner


def _same(value: Any) -> Any:
    return value
