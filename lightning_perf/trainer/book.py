"""What is known of the FLOPs of a stage's batches, by their shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_perf.flops import FlopModel, fit

if TYPE_CHECKING:
    from lightning_perf.flops import Counts, Signature
    from lightning_perf.trainer.peaks import BatchWork

#: Shapes that are counted before the others are predicted from them; and at the very most.
_ENOUGH, MOST_COUNTED = 16, 64
#: Predictions that are remembered.
_MOST_KNOWN = 4096


@dataclass(slots=True)
class Book:
    """What is known of one stage, with one part of the model frozen."""

    #: Batches that may still be counted without finding anything, before it is given up.
    tries: int
    counts: dict[Signature, Counts] = field(default_factory=dict)
    works: dict[Signature, BatchWork] = field(default_factory=dict)
    law: FlopModel | None = None
    #: How many shapes were known when a law was last looked for.
    looked_at: int = 0

    def predict(self, shapes: Signature) -> Counts | None:
        """The counts of shapes that were not counted, once there are enough that were."""
        if len(self.counts) < _ENOUGH:
            return None
        # Shapes that a law does not explain are counted, and may tell a wider one.
        if len(self.counts) >= 2 * self.looked_at:
            self.looked_at = len(self.counts)
            self.law = fit(self.counts)
        return self.law.predict(shapes) if self.law is not None else None

    def remember(self, shapes: Signature, work: BatchWork) -> None:
        """Know the work of shapes from now on, within bounds."""
        if len(self.works) >= _MOST_KNOWN:
            self.works.clear()
        self.works[shapes] = work
