"""Lightning's hooks of our callbacks: set on an object while it takes part in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Stages by Lightning's words for them in the names of hooks.
STAGES = {"train": "train", "validation": "validate", "test": "test", "predict": "predict"}
#: Hooks that release what a run holds: a subclass may use it until then.
ENDS = ("teardown", "on_exception")
#: Lightning's per-batch hooks that no lifecycle method needs.
UNUSED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class Hooks(dict[str, Any]):
    """What an object had by the names of the hooks that are set on it; None for its class's.

    They are set on the object, not on its class: a subclass may define a hook with or without a
    call of ``super()``, and Lightning skips what is None. Unused hooks are most of what a callback
    costs per batch.
    """

    def attach(self, owner: Any, base: type, name: str, ours: Callable[..., object] | None) -> None:
        """Let a hook call ours, and what a subclass of the base defines; without both, nothing."""
        if name in self:
            return
        theirs = getattr(owner, name)
        inherited = getattr(theirs, "__func__", None) is getattr(base, name)
        if not inherited and ours is None:
            return
        self[name] = vars(owner).get(name)
        setattr(owner, name, ours if inherited else _joined(name, ours, theirs))

    def restore(self, attributes: dict[str, Any]) -> None:
        """Restore what the object had, in its attributes or in a copy of them."""
        for name, before in self.items():
            attributes.pop(name, None)
            if before is not None:
                attributes[name] = before


def _joined(name: str, ours: Any, theirs: Callable[..., object]) -> Callable[..., None]:
    def hook(*args: Any, **kwargs: Any) -> None:
        if name not in ENDS:
            ours(*args, **kwargs)
            theirs(*args, **kwargs)
            return
        try:
            theirs(*args, **kwargs)
        finally:
            ours(*args, **kwargs)

    return hook
