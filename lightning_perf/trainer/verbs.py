"""What a callback of ours may do, and when it is asked to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_perf.trainer.collective import Rows
    from lightning_perf.trainer.driver import Driver
    from lightning_perf.trainer.roles import BatchRecord, Report


class Verbs:
    """The few verbs into which Lightning's hooks are folded; none of them has to be written.

    ``prepare`` acquires what a run needs and may refuse a setting; ``on_start`` and ``on_end``
    frame a stage, ``before_batch`` and ``after_batch`` a batch; ``after_batches`` tells of many at
    a time; ``due``, ``collect`` and ``publish`` make a report; ``close`` lets everything go.
    """

    @property
    def quiet_until(self) -> float:
        """The batch of the stage before which it is due only where Lightning logs."""
        return math.inf

    def prepare(self, driver: Driver) -> None:
        """The run is set up, on all ranks: check settings against it."""

    def on_start(self, driver: Driver) -> None:
        """``driver.stage`` begins."""

    def before_batch(self, driver: Driver, batch: Any) -> None:
        """A batch has arrived on the device."""

    def after_batch(self, driver: Driver, batch: Any) -> None:
        """A batch has been worked on; ``driver.moment`` is past it."""

    def after_batches(self, driver: Driver, batches: Sequence[BatchRecord]) -> None:
        """What came of the batches since the last call, before each report at the latest.

        For what need not be known at once: it takes a fraction of the time of ``after_batch``.
        """

    def on_end(self, driver: Driver) -> None:
        """``driver.stage`` ends as it should."""

    def due(self, driver: Driver, at_end: bool) -> bool:
        """Whether there is something to report now, on all ranks alike.

        Asked after every batch and at a stage's end, on every rank, even where this callback has
        given up: it must follow from what all ranks share, and not fail. Before ``quiet_until``
        only where Lightning logs (``driver.report_due``) and at the end.
        """
        return False

    def collect(self, driver: Driver, at_end: bool) -> Report | None:
        """This rank's numbers for a report that is due."""
        raise NotImplementedError

    def publish(self, driver: Driver, report: Report, rows: Rows) -> None:
        """Log a report, from one row of numbers a rank: some batches later, with several ranks."""

    def close(self, driver: Driver, reason: str) -> None:
        """Let go of everything; called once or more.

        Args:
            driver: The run's.
            reason: ``"teardown"``, ``"exception"`` or ``"failure"`` (of this callback).
        """
