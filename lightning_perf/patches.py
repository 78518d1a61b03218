"""Reversible patches of methods on single objects."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import own_errors_dropped

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class MethodPatch:
    """Replaces a method, or another patch of it, and is equal to it in all other respects.

    After its release it is of this class, not of a subclass, and only calls the method, because
    foreign patches may still refer to it.
    """

    #: Returns the patched object, once released.
    _owner: Callable[[], Any]
    #: The name under which the method is found, which may not be its ``__name__``.
    _name = ""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        with own_errors_dropped():  # remove this patch if the foreign patch around it is gone
            _clear(self._owner(), self._name)
        return self.original(*args, **kwargs)

    def _release(self, owner: Callable[[], Any]) -> None:
        """Become a plain `MethodPatch` that references only the method."""
        original, name = self.original, self._name
        vars(self).clear()
        vars(self).update(original=original, _owner=owner, _name=name)
        self.__class__ = MethodPatch

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # an uninitialized copy
            raise AttributeError(name)
        return getattr(self.original, name)

    # Lightning compares reduction functions of metrics, also with those of earlier runs.
    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if isinstance(other, MethodPatch) else other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the owner gets the method itself. Methods pickle by their __name__, which is
        # wrong for Lightning's decorated ones.
        owner = getattr(self.original, "__self__", None)
        if is_of_class(owner, self._name, self.original):
            return getattr, (owner, self._name)
        return same, (self.original,)


class ContextPatch(MethodPatch):
    """Runs the method inside a context, such as a span or a counter, created for each call."""

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
    """The active patches of one owner. Holds only weak references to the patched objects."""

    def __init__(self) -> None:
        self._patched: dict[tuple[int, str], tuple[Callable[[], Any], MethodPatch]] = {}

    def wrap_in_context(
        self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Run a method of one object inside a context from now on, if possible."""
        self.wrap(owner, name, lambda original: ContextPatch(original, context))

    def wrap(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], MethodPatch]
    ) -> None:
        """Replace a method of one object by a patch, which ``make`` creates, if possible.

        Idempotent.
        """
        if not callable(getattr(owner, name, None)):
            return
        key = id(owner), name
        find, ours = self._patched.get(key, (None, None))
        if find is not None and ours is not None and find() is owner:
            if any(each is ours for each in _chain(owner, name)):
                return
            # Replaced, or below a foreign patch: only one of ours may be active.
            _take_out(owner, name, ours)
        with own_errors_dropped():
            _clear(owner, name)
            ours = make(getattr(owner, name))
            ours._name = name
            setattr(owner, name, ours)
            self._patched[key] = _reference(owner), ours

    def restore(self) -> None:
        """Remove all patches of this set, and leave foreign ones in place."""
        while self._patched:
            (_, name), (find, ours) = self._patched.popitem()
            owner = find()
            with own_errors_dropped():
                if owner is not None:
                    _take_out(owner, name, ours)


def is_of_class(owner: object, name: str, method: object) -> bool:
    """Whether a method of an object is its class's, and not set on the object itself."""
    # Not with vars(): once an object's __dict__ was accessed, it is slower.
    return getattr(method, "__func__", method) is getattr(type(owner), name, None)


def _chain(owner: Any, name: str) -> list[MethodPatch]:
    """Return our patches of a method from the outermost; those below a foreign patch are hidden."""
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
    ours._release(_reference(owner))
    _clear(owner, name)


def _clear(owner: Any, name: str) -> None:
    """Remove the outermost patches of a method that are released."""
    outermost = here = getattr(owner, name, None)
    while type(here) is MethodPatch:
        here = here.original
    if here is outermost:
        return
    # A patch is equal to the method of the class, too.
    if not isinstance(here, MethodPatch) and is_of_class(owner, name, here):
        delattr(owner, name)
    else:
        setattr(owner, name, here)


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # an object with __slots__
        return lambda: owner


def same(value: Any) -> Any:
    """Return the value: what is pickled with this is replaced by it in copies."""
    return value
