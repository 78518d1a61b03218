"""When a callback that reports is due: by its schedule, at times that all ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_perf.schedule import Schedule
    from lightning_perf.trainer.driver import Driver


class Cadence:
    """Asks a schedule after each batch.

    Ranks may disagree about a schedule that looks at clocks or at themselves, so with such a one
    they meet at Lightning's own cadence, and each keeps whether it wanted to.

    Args:
        schedule: When to report.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._shared = True
        self._wanted = False
        #: Batches before this one need not be asked about.
        self.quiet_until: float = 0

    def setup(self, driver: Driver) -> None:
        """Begin to watch a run.

        Raises:
            ConfigError: The schedule cannot work in it.
        """
        self._shared = self._schedule.shared or driver.ranks.world_size == 1
        self._wanted, self.quiet_until = False, 0
        self._schedule.validate(driver.limits)
        self._schedule.setup(driver.context)

    def start(self, driver: Driver) -> None:
        """A stage begins."""
        self.quiet_until = 0
        self._schedule.observe(driver.moment)

    def due(self, driver: Driver) -> bool:
        """Whether ranks meet now, on all of them alike; asked once a batch."""
        now = driver.counters.batch >= self.quiet_until and self._now(driver)
        if self._shared:
            self._wanted = now
            return now
        self._wanted |= now
        return driver.report_due

    def take(self) -> bool:
        """Whether this rank wanted to report since it was last asked."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def close(self) -> None:
        """Watch no more; once or more often."""
        self._schedule.close()

    def _now(self, driver: Driver) -> bool:
        self._schedule.observe(driver.moment)
        if self._schedule(driver.moment):
            return True
        if not self._schedule.watches:
            self.quiet_until = self._schedule.quiet_until(driver.moment)
        return False
