"""Delivers batch records to callbacks and gathers their reports across ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from lightning_perf.run.collective import Gatherer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.reduce import Rows
    from lightning_perf.run.callback import BatchRecord, Part, Report
    from lightning_perf.run.context import RunContext
    from lightning_perf.schedule import Schedule
    from lightning_perf.timing.cuda_events import DeviceBatchTime, DeviceBatchTimer


class ReportTrigger:
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

    def setup(self, context: RunContext) -> None:
        """Begin to watch a run.

        Raises:
            ConfigError: The schedule cannot work in it.
        """
        self._shared = self._schedule.shared or context.ranks.world_size == 1
        self._wanted, self.quiet_until = False, 0
        self._schedule.validate(context.limits)
        self._schedule.setup(context.schedule_context)

    def start(self, context: RunContext) -> None:
        """A stage begins."""
        self.quiet_until = 0
        self._schedule.observe(context.moment)

    def due(self, context: RunContext) -> bool:
        """Whether ranks meet now, on all of them alike; asked once a batch."""
        now = context.counters.batch >= self.quiet_until and self._now(context)
        if self._shared:
            self._wanted = now
            return now
        self._wanted |= now
        return context.report_due

    def consume_request(self) -> bool:
        """Whether this rank wanted to report since it was last asked."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def close(self) -> None:
        """Watch no more; once or more often."""
        self._schedule.close()

    def _now(self, context: RunContext) -> bool:
        self._schedule.observe(context.moment)
        if self._schedule(context.moment):
            return True
        if not self._schedule.watches:
            self.quiet_until = self._schedule.quiet_until(context.moment)
        return False


#: Batches at most whose figures are kept until they are told.
_MOST_UNTOLD = 1000
#: Seconds that the end of a run waits for the device to come to it.
_PATIENCE = 10.0


class ReportDispatcher:
    """Tells of batches many at a time, and brings reports to all ranks.

    Args:
        trainer: Whose ranks take part. With several, all must construct this together.
        device_timer: Knows how long batches took on the device, where it has a clock of its own.
    """

    def __init__(self, trainer: Trainer, device_timer: DeviceBatchTimer | None) -> None:
        self._device_timer = device_timer
        self._gatherer = Gatherer(trainer)
        # Those that report, in the same order on all ranks; and the batch before which they are
        # due only where Lightning logs.
        self._reporters: list[Part] = []
        self._quiet_until: float = 0
        #: Whether somebody may be due after the last batch.
        self.asked = False
        self._batches: list[BatchRecord] = []
        # Those that the device may not have come to, by their stage.
        self._after_batch_parts: defaultdict[str, deque[tuple[BatchRecord, DeviceBatchTime]]] = (
            defaultdict(deque)
        )
        self._takers: list[Part] = []

    def enter(self, parts: Sequence[Part]) -> None:
        """A stage begins.

        Args:
            parts: All callbacks.
        """
        self._reporters = [part for part in parts if part.reports]
        self._takers = [part for part in parts if part.overrides("after_batches")]
        if self._device_timer is not None:
            self._device_timer.wanted = bool(self._takers)

    def wake(self) -> None:
        """Another stage is the present one."""
        self._quiet_until = 0

    def end_batch(
        self, context: RunContext, batch: BatchRecord, device_time: DeviceBatchTime | None
    ) -> None:
        """A batch is over.

        Args:
            context: The run's.
            batch: What came of it.
            device_time: The device's time of it; None where that is the host's.
        """
        if self._takers:
            untold = (
                self._batches if device_time is None else self._after_batch_parts[context.stage]
            )
            if len(untold) >= _MOST_UNTOLD:
                self.tell(context)
            if device_time is None:
                self._batches.append(batch)
            else:
                self._after_batch_parts[context.stage].append((batch, device_time))
        self.asked = context.report_due or context.counters.batch >= self._quiet_until
        if self._gatherer.pending:
            self._gatherer.poll()

    def tell(self, context: RunContext) -> None:
        """Tell of the batches that have not been told yet, as far as the device has come."""
        if self._device_timer is not None:
            self._device_timer.read()
            self._batches += _known(
                self._after_batch_parts[context.stage], self._device_timer.failed
            )
        batches, self._batches = self._batches, []
        for part in self._takers if batches else ():
            part.call("after_batches", context, batches)

    def report(self, context: RunContext, at_end: bool) -> None:
        """All members have seen the batch, or the end of the stage: exchange what is due.

        Whether something is due follows from what all ranks share, and a rank that has nothing to
        say sends an empty message: else the messages of one callback would be taken for another's.
        """
        if at_end and self._device_timer is not None and not context.nested:
            self._device_timer.wait(_PATIENCE)
        quiet = not (at_end or context.report_due)
        for number, part in enumerate(self._reporters):
            if quiet and context.counters.batch < part.quiet_until:
                continue
            if not part.due(context, at_end):
                continue
            self.tell(context)
            mine: Report | None = part.call("collect", context, at_end)
            tag, values = (number, context.counters.batch), mine.values if mine else ()
            self._gatherer.gather(tag, values, partial(_publish, context, part, mine))
        self._quiet_until = min((part.quiet_until for part in self._reporters), default=inf)

    def exit(self, context: RunContext) -> None:
        """The present stage is over: what the device has not come to by now is left out."""
        self.tell(context)
        self._after_batch_parts.pop(context.stage, None)

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


def _known(late: deque[tuple[BatchRecord, DeviceBatchTime]], failed: bool) -> Iterator[BatchRecord]:
    """The batches whose time is known, or does not matter, up to the first one of another kind."""
    while late:
        (host, samples, tokens, work, slowed, first), device_time = late[0]
        if not (device_time.known or slowed or first or failed):
            return
        late.popleft()
        # Where the device's time is not known, nobody is to take the host's.
        slowed = slowed or not (failed or (device_time.known and device_time.whole))
        yield (
            (device_time.seconds if device_time.known else host),
            samples,
            tokens,
            work,
            slowed,
            first,
        )


def _publish(context: RunContext, part: Part, mine: Report | None, rows: Rows) -> None:
    if mine is not None:
        part.call("publish", context, mine, rows)
