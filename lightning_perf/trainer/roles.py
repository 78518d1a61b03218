"""What the driver and the callbacks that it drives know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.trainer.driver import Driver
    from lightning_perf.trainer.peaks import BatchWork

    #: What came of one batch: seconds, samples and tokens (None where they cannot be told), FLOPs
    #: (None where they are not known), whether it took longer because these were counted, and
    #: whether it was the first of its stage. A plain tuple, since one is made of every batch.
    BatchRecord = tuple[float, int | None, int | None, BatchWork | None, bool, bool]


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has to say at one time."""

    #: Sent to the other ranks.
    values: Sequence[float]
    stage: str
    #: The loggers'.
    step: int
    #: Kept here.
    at_end: bool = False
    own: Mapping[str, float] = field(default_factory=dict)


class Part(Protocol):
    """One callback that reports, as ``PerfCallback`` documents."""

    state_key: str
    reports: bool

    @property
    def quiet_until(self) -> float:
        """The batch of the stage before which it is due only where Lightning logs."""
        ...

    def busy(self, verb: str) -> bool:
        """Whether it has anything to do at a verb of every batch."""
        ...

    def due(self, driver: Driver, at_end: bool) -> bool:
        """Whether there is something to report now, on all ranks alike."""
        ...

    def call(self, verb: str, *args: Any) -> Any:
        """Call a verb so that no failure reaches training."""
        ...


class Member(Protocol):
    """What the driver knows of the callbacks that it drives."""

    @property
    def parts(self) -> list[Any]:
        """The callbacks that it is, or hosts."""
        ...

    @property
    def state_key(self) -> str:
        """What tells it from others of the Trainer."""
        ...

    def leave(self, reason: str) -> None:
        """End its part in the run; harmless once it is over."""
        ...
