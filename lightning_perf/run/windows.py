"""Delivers batch records to callbacks and gathers their reports across ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from lightning_perf.core.reduce import Rows
from lightning_perf.run.collective import Gatherer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.run.callback import BatchRecord, Part, Report
    from lightning_perf.run.context import Driver
    from lightning_perf.schedule import Schedule
    from lightning_perf.timing.cuda_events import Lap, Laps


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


#: Batches at most whose figures are kept until they are told.
_MOST_UNTOLD = 1000
#: Seconds that the end of a run waits for the device to come to it.
_PATIENCE = 10.0


class Exchange:
    """Tells of batches many at a time, and brings reports to all ranks.

    Args:
        trainer: Whose ranks take part. With several, all must construct this together.
        laps: Knows how long batches took on the device, where it has a clock of its own.
    """

    def __init__(self, trainer: Trainer, laps: Laps | None) -> None:
        self._laps = laps
        self._gatherer = Gatherer(trainer)
        # Those that report, in the same order on all ranks; and the batch before which they are
        # due only where Lightning logs.
        self._reporters: list[Part] = []
        self._quiet_until: float = 0
        #: Whether somebody may be due after the last batch.
        self.asked = False
        self._batches: list[BatchRecord] = []
        # Those that the device may not have come to, by their stage.
        self._late: defaultdict[str, deque[tuple[BatchRecord, Lap]]] = defaultdict(deque)
        self._takers: list[Part] = []

    def enter(self, parts: Sequence[Part]) -> None:
        """A stage begins.

        Args:
            parts: All callbacks.
        """
        self._reporters = [part for part in parts if part.reports]
        self._takers = [part for part in parts if part.busy("after_batches")]
        if self._laps is not None:
            self._laps.wanted = bool(self._takers)

    def wake(self) -> None:
        """Another stage is the present one."""
        self._quiet_until = 0

    def end_batch(self, driver: Driver, batch: BatchRecord, lap: Lap | None) -> None:
        """A batch is over.

        Args:
            driver: The run's.
            batch: What came of it.
            lap: The device's time of it; None where that is the host's.
        """
        if self._takers:
            untold = self._batches if lap is None else self._late[driver.stage]
            if len(untold) >= _MOST_UNTOLD:
                self.tell(driver)
            if lap is None:
                self._batches.append(batch)
            else:
                self._late[driver.stage].append((batch, lap))
        self.asked = driver.report_due or driver.counters.batch >= self._quiet_until
        if self._gatherer.pending:
            self._gatherer.poll()

    def tell(self, driver: Driver) -> None:
        """Tell of the batches that have not been told yet, as far as the device has come."""
        if self._laps is not None:
            self._laps.read()
            self._batches += _known(self._late[driver.stage], self._laps.failed)
        batches, self._batches = self._batches, []
        for part in self._takers if batches else ():
            part.call("after_batches", driver, batches)

    def report(self, driver: Driver, at_end: bool) -> None:
        """All members have seen the batch, or the end of the stage: exchange what is due.

        Whether something is due follows from what all ranks share, and a rank that has nothing to
        say sends an empty message: else the messages of one callback would be taken for another's.
        """
        if at_end and self._laps is not None and not driver.nested:
            self._laps.wait(_PATIENCE)
        quiet = not (at_end or driver.report_due)
        for number, part in enumerate(self._reporters):
            if quiet and driver.counters.batch < part.quiet_until:
                continue
            if not part.due(driver, at_end):
                continue
            self.tell(driver)
            mine: Report | None = part.call("collect", driver, at_end)
            tag, values = (number, driver.counters.batch), mine.values if mine else ()
            self._gatherer.gather(tag, values, partial(_publish, driver, part, mine))
        self._quiet_until = min((part.quiet_until for part in self._reporters), default=inf)

    def exit(self, driver: Driver) -> None:
        """The present stage is over: what the device has not come to by now is left out."""
        self.tell(driver)
        self._late.pop(driver.stage, None)

    def finish(self) -> None:
        """Wait a bounded time for the reports that are on their way."""
        self._gatherer.finish(_PATIENCE)

    def close(self, timeout: float) -> None:
        """End.

        Args:
            timeout: Seconds to wait for other ranks' last numbers.
        """
        if timeout:
            self._gatherer.finish(timeout)
        self._gatherer.close()


def _known(late: deque[tuple[BatchRecord, Lap]], failed: bool) -> Iterator[BatchRecord]:
    """The batches whose time is known, or does not matter, up to the first one of another kind."""
    while late:
        (host, samples, tokens, work, slowed, first), lap = late[0]
        if not (lap.known or slowed or first or failed):
            return
        late.popleft()
        # Where the device's time is not known, nobody is to take the host's.
        slowed = slowed or not (failed or (lap.known and lap.whole))
        yield (lap.seconds if lap.known else host), samples, tokens, work, slowed, first


def _publish(driver: Driver, part: Part, mine: Report | None, rows: Rows) -> None:
    if mine is not None:
        part.call("publish", driver, mine, rows)
