"""Where a batch's work begins: the methods of a strategy that do it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_perf.patches import ContextPatch, MethodPatch, PatchSet
from lightning_perf.timing.clock import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_perf.flops import FlopCounter

#: What of a strategy takes a batch, by stage.
STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class StepHooks:
    """Stands before the steps of a strategy, and counts what they do while it is asked to.

    A hook would tell of the batch as well, but Lightning takes several times as long to call one.

    Args:
        strategy: Whose steps they are.
        begins: Told of a stage and its batch before each step, several times where a step has
            several closures. Must not fail.
    """

    def __init__(self, strategy: Any, begins: Callable[[str, Any], None]) -> None:
        self.begins = begins
        #: Counts what the steps do now, if there is one.
        self.counter: FlopCounter | None = None
        #: Whether a backward was counted.
        self.backward_seen = False
        self._strategy = strategy
        self._watched: set[str] = set()
        self._steps, self._backward = PatchSet(), PatchSet()

    def watch(self, stage: str) -> None:
        """Stand before the steps of a stage from now on."""
        if stage not in self._watched:
            self._watched.add(stage)
            make = partial(_Step, stage=stage, steps=self)
            self._steps.wrap(self._strategy, STEPS[stage], make)

    def count(self, counter: FlopCounter) -> None:
        """Count what the steps and the backwards of the present batch do."""
        self.counter, self.backward_seen = counter, False
        make = partial(ContextPatch, context=self._in_backward)
        self._backward.wrap(self._strategy, "backward", make)

    def _in_backward(self) -> AbstractContextManager[Any]:
        self.backward_seen = True
        return self.counter or NOTHING

    def stop_counting(self) -> None:
        """Count no more."""
        self.counter = None
        self._backward.restore()

    def leave(self) -> None:
        """Stand before nothing any more, whatever happened."""
        self.stop_counting()
        self._steps.restore()
        self._watched.clear()


class _Step(MethodPatch):
    """Tells of the batch first, and runs counted where that is asked for then."""

    def __init__(self, original: Callable[..., Any], stage: str, steps: StepHooks) -> None:
        super().__init__(original)
        self._stage, self._steps = stage, steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps = self._steps
        steps.begins(self._stage, args[0] if args else None)
        if steps.counter is None:
            return self.original(*args, **kwargs)
        with steps.counter:
            return self.original(*args, **kwargs)
