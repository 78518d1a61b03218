"""The spans of a trainer: each has some thirty a batch, through its profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PassThroughProfiler

from lightning_perf.timings import Totals
from lightning_perf.trainer.hub import Hub
from lightning_perf.trainer.standins import Hearing, Lean, Listener

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Spans:
    """Owns what stands in for the trainer's profiler, as long as the driver lives.

    Where nobody needs timings and the trainer has no profiler, spans cost less than without us.

    Args:
        trainer: The run's.
        module: What is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._users = 0
        self._profiler = getattr(trainer, "profiler", None)
        self._standin: Any = None
        self._hub: Hub | None = None
        #: Whether the device's clock wants to know of the ends of batches.
        self.clocked = False
        self._be_lean()

    @property
    def totals(self) -> Totals:
        """Where the time went since timings were first asked for, up to now."""
        return self._hub.totals if self._hub is not None else Totals({})

    def require(self) -> None:
        """Ask for timings; to be released as often."""
        self._users += 1
        if self._hub is None:
            self._put_back()
            self._hub = Hub(self._trainer, self._module)
            self.clocked = self._hub.device is not None
            self._listen(self._hub)

    def release(self) -> None:
        """Need timings no more."""
        self._users -= 1
        if self._users == 0:
            self.restore()
            self._be_lean()

    def enter(self, stage: str) -> None:
        """A stage begins."""
        if self._hub is not None:
            self._hub.enter(stage)
            if getattr(self._trainer, "profiler", None) is not self._standin:
                self._listen(self._hub)  # the user exchanged it

    def end_batch(self) -> None:
        """A batch has been worked on."""
        if self._hub is not None and self._hub.device is not None:
            self._hub.device.end_batch()

    def restore(self) -> None:
        """Put everything back; what was exchanged meanwhile stays."""
        self._put_back()
        if self._hub is not None:
            self._hub.close()
            self._hub, self.clocked = None, False

    def _be_lean(self) -> None:
        if type(getattr(self._trainer, "profiler", None)) is PassThroughProfiler:
            self._stand_in(Lean())

    def _listen(self, hub: Hub) -> None:
        theirs, find = getattr(self._trainer, "profiler", None), hub.book.__getitem__
        none = type(theirs) is PassThroughProfiler
        self._stand_in(Hearing(find) if none else Listener(theirs, find))

    def _stand_in(self, standin: Any) -> None:
        self._profiler = getattr(self._trainer, "profiler", None)
        self._standin = self._trainer.profiler = standin  # type: ignore[attr-defined]

    def _put_back(self) -> None:
        if getattr(self._trainer, "profiler", None) is self._standin:
            self._trainer.profiler = self._profiler  # type: ignore[attr-defined]
