"""Patches of a strategy's step methods: where the work of a batch begins."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_perf.patches import MethodPatch, PatchSet
from lightning_perf.timing.clock import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lightning_perf.flops import FlopCounter

#: The strategy's method that processes a batch, by stage.
STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class StepHooks:
    """Patches ``strategy.*_step`` to announce each batch and to count its FLOPs on request.

    A Lightning hook would announce the batch too, but takes several times as long to call.

    Args:
        strategy: The strategy to patch.
        on_step: Called with the stage and the batch before each step, several times if a step has
            several closures. Must not raise.
    """

    def __init__(self, strategy: Any, on_step: Callable[[str, Any], None]) -> None:
        self.on_step = on_step
        #: The active counter, if any.
        self.counter: FlopCounter | None = None
        #: Whether a backward ran under the counter.
        self.backward_seen = False
        self._strategy = strategy
        self._steps, self._backward = PatchSet(), PatchSet()

    def watch(self, stage: str) -> None:
        """Patch the step method of a stage. Idempotent."""
        self._steps.wrap(self._strategy, STEPS[stage], partial(_Step, stage=stage, hooks=self))

    def count(self, counter: FlopCounter) -> None:
        """Run the steps and backwards of the current batch under a counter."""
        self.counter, self.backward_seen = counter, False
        self._backward.wrap_in_context(self._strategy, "backward", self._in_backward)

    def _in_backward(self) -> AbstractContextManager[Any]:
        self.backward_seen = True
        return self.counter or NOTHING

    def stop_counting(self) -> None:
        """Remove the counter."""
        self.counter = None
        self._backward.restore()

    def close(self) -> None:
        """Remove the counter and all patches."""
        self.stop_counting()
        self._steps.restore()


class _Step(MethodPatch):
    """Calls ``on_step``, then the original step, under the counter if there is one."""

    def __init__(self, original: Callable[..., Any], stage: str, hooks: StepHooks) -> None:
        super().__init__(original)
        self._stage, self._hooks = stage, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self._hooks
        hooks.on_step(self._stage, args[0] if args else None)
        if hooks.counter is None:
            return self.original(*args, **kwargs)
        with hooks.counter:
            return self.original(*args, **kwargs)
