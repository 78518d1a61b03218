"""Lightning's spans, of which a training without a profiler has some thirty a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lightning.pytorch.profilers import PassThroughProfiler
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NOTHING: AbstractContextManager[None] = nullcontext()


class _Lean(PassThroughProfiler):
    """Does nothing as well, without making a generator for each span."""

    @override
    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return _NOTHING


class LeanSpans:
    """Stands in for the profiler of a trainer that has none, and gives back what spans cost.

    A profiler of the user's is left alone.

    Args:
        trainer: The run's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._replaced = getattr(trainer, "profiler", None)
        self._lean = _Lean()
        if type(self._replaced) is PassThroughProfiler:
            trainer.profiler = self._lean  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Put the trainer's own back, unless it was exchanged meanwhile."""
        if getattr(self._trainer, "profiler", None) is self._lean:
            self._trainer.profiler = self._replaced  # type: ignore[attr-defined]
