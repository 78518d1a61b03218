"""Gathers numbers of all ranks on all ranks, without making training wait."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import nan
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_perf.background import wait_until
from lightning_perf.errors import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.window import Rows, Table

#: Numbers per message: all messages have this size. The rest of a longer report follows in a
#: second message.
WIDTH = 240
HEADER = 3
#: Messages under way per rank; further ones are queued here, without a table of all ranks.
_ON_THEIR_WAY = 8
#: Messages queued at most: with more than that, another rank is gone.
_MOST_WAITING = 4096
#: Seconds for which a single rank holds its reports, to deliver them together: between training
#: steps the caches are cold, so that the first of them takes three times as long as the others.
HOLD = 0.25
_TIMEOUT = timedelta(minutes=30)
#: The tag of a message without content, which only advances the count.
_NOTHING = (-1, -1)
#: The second part of a rank's last tag, which it repeats while other ranks still report.
LAST = -2


# Groups of finished runs. Another rank may still read from one at its run's end, but no longer
# when all ranks make a new group.
_retired: list[Any] = []


@dataclass(slots=True, eq=False)
class _Report:
    tag: tuple[int, int]
    values: Sequence[float]
    then: Callable[[Rows], None]
    #: Where its values are in a rank's last report.
    in_last: Sequence[int]
    #: What came of it, one row a rank; the second part is there if it did not fit into one message.
    parts: list[Table] = field(default_factory=list)
    complete: bool = False
    #: The number of its message among all that were sent.
    number: int = 0


class Gatherer:
    """Gathers over a gloo group of its own, so that the accelerator is never synchronised.

    A single rank gathers nothing: it holds its reports for a moment.

    A report is sent at one batch and read at a later one, when it has arrived. Messages are paired
    by their order, so every rank sends the same ones, however far it is behind: none is ever
    skipped. With ``_ON_THEIR_WAY`` messages under way, further ones are queued in this process. So
    a rank that sends message n has received message n - ``_ON_THEIR_WAY``: if that one announced
    more numbers than it held on any rank, message n carries the rest, on all ranks alike.

    Ranks may have different numbers of batches. A rank whose last report is sent before the others'
    sends it again for each of theirs, as their messages arrive.

    If a rank is gone, or the ranks send different reports, there is one warning, and nothing more
    is gathered.

    Args:
        trainer: The run's; all ranks construct this together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._world_size = trainer.world_size
        #: Reports that were not handed over yet, in their order.
        self.pending: deque[_Report] = deque()
        self._waiting: deque[_Report] = deque()
        # With the work under way and its table, one row a rank.
        self._sent: deque[tuple[_Report, Any, torch.Tensor]] = deque()
        # Reports whose second part is to be sent.
        self._long: deque[_Report] = deque()
        self._count = 0
        self._ended = self._lost = False
        # Whether this rank's last report was sent, and other ranks may not have sent theirs.
        self._repeats = False
        self._group = _new_group() if self._world_size > 1 else None
        # Of a single rank: reports to deliver, and the time from which the next one delivers them.
        self._held: deque[Callable[[], None]] = deque()
        self._hold_until = 0.0

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers; waits for all of them."""
        if self._world_size == 1:
            return number
        mine = torch.tensor([number])
        if self._group is None:
            return int(self._trainer.strategy.all_gather(mine).max())
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        return int(mine)

    def gather(
        self,
        tag: tuple[int, int],
        values: Sequence[float],
        then: Callable[[Rows], None],
        in_last: Sequence[int] = (),
    ) -> None:
        """Send this rank's numbers; ``then`` receives one row per rank, now or at a later batch.

        Args:
            tag: What and when, the same on every rank that still reports; ``LAST`` for when.
            values: Any number of them.
            then: Called on the training thread with the rows in rank order, unless some rank sent
                no numbers at all.
            in_last: Where these values are among those of the last report.
        """
        if self._world_size == 1:
            if values:
                self._held.append(partial(then, [values]))
            now = monotonic()
            if tag[1] < 0 or now >= self._hold_until:  # the end of a stage, or time
                self._hold_until = now + HOLD
                self.flush()
            return
        if self._lost:
            return
        report = _Report(tag, values, then, in_last)
        if self._group is None:
            self._receive(report, self._gather_now(_first(report)))
            if self._long:
                self._receive(self._long.popleft(), self._gather_now(_rest(report)))
            self._deliver(report)
            return
        if len(self.pending) >= _MOST_WAITING:
            self._give_up("another rank does not answer")
            return
        self._repeats = tag[1] == LAST
        self.pending.append(report)
        self._waiting.append(report)
        self._send()

    def flush(self) -> None:
        """Deliver the reports that a single rank holds."""
        while self._held:
            self._held.popleft()()

    def poll(self) -> bool:
        """Deliver what has arrived, in the order of sending; returns whether that is everything."""
        while self._sent and self._sent[0][1].is_completed():
            report, work, table = self._sent.popleft()
            try:
                work.wait()  # completed: raises if it failed
            except RuntimeError as error:
                self._give_up(f"another rank is gone ({describe(error)})")
                return True
            self._receive(report, table.numpy())
            self._send()
        while self.pending and self.pending[0].complete:
            self._deliver(self.pending.popleft())
        return not (self.pending or self._sent)

    def finish(self, timeout: float) -> None:
        """Wait ``timeout`` seconds at most for what is under way; it is the last of the run."""
        self.flush()
        self._ended = True
        if self._group is not None:
            self._send()
        wait_until(self.poll, timeout)
        if self.pending:
            self._give_up("another rank did not answer at the end of the run")

    def close(self) -> None:
        """Retire the group, unless a message is missing: destroying it would wait for that."""
        if self._group is not None and not self._sent and not self._lost:
            _retired.append(self._group)
        self._forget()
        self._group = None

    def _send(self) -> None:
        """Send the next messages, the same on all ranks, while there is room."""
        while len(self._sent) < _ON_THEIR_WAY and not self._lost:
            if self._long and self._long[0].number + _ON_THEIR_WAY == self._count:
                report = self._long.popleft()
                row = _rest(report)
            elif self._waiting:
                report = self._waiting.popleft()
                report.number = self._count
                row = _first(report)
            elif self._long and self._ended and not self._repeats:
                report = _Report(_NOTHING, (), _ignore, ())
                row = _first(report)
            else:
                return
            self._count += 1
            table = row.new_empty(self._world_size, len(row))
            work = dist.all_gather(list(table), row, group=self._group, async_op=True)
            self._sent.append((report, work, table))

    def _gather_now(self, row: torch.Tensor) -> Table:
        gathered = self._trainer.strategy.all_gather(row)
        found: Table = gathered.reshape(self._world_size, -1).cpu().numpy()
        return found

    def _receive(self, report: _Report, rows: Table) -> None:
        if report.parts:
            report.parts.append(rows)
            report.complete = True
            return
        last = rows[:, 1] == LAST
        for tags in (rows[last, :2], rows[~last, :2]):
            if (tags != tags[:1]).any():
                self._give_up("the ranks report different things at one time")
                return
        if report.tag[1] == LAST:
            self._repeats = not last.all()
            if self._repeats:
                self._repeat(report)
        report.parts.append(rows)
        report.complete = rows[:, 2].max() <= WIDTH
        if not report.complete:
            self._long.append(report)

    def _repeat(self, report: _Report) -> None:
        """Answer the others' next report, too. What arrived is a report of theirs."""
        again = replace(report, parts=[], complete=False)
        report.then = _ignore
        self.pending.append(again)
        self._waiting.append(again)

    def _deliver(self, report: _Report) -> None:
        if self._lost or not report.parts:
            return
        rows, *more = report.parts
        lengths, last = rows[:, 2], rows[:, 1] == LAST
        if lengths.all():
            values = np.hstack([rows[:, HEADER:], *more]) if more else rows[:, HEADER:]
            if report.tag[1] != LAST and last.any():
                values[last, : len(report.values)] = values[np.ix_(last, report.in_last)]
                lengths = lengths[~last]
            report.then(values[:, : int(lengths.max())])

    def _give_up(self, why: str) -> None:
        self._lost = True
        self._forget()
        warn(f"{why}: there are no more reports of several ranks in this run. Training continues.")

    def _forget(self) -> None:
        for each in (self.pending, self._waiting, self._sent, self._long):
            each.clear()


def _first(report: _Report) -> torch.Tensor:
    """A report's first message: its tag, the number of values, and the values."""
    row = [*report.tag, len(report.values), *report.values[:WIDTH]]
    return _padded(row, HEADER + WIDTH)


def _rest(report: _Report) -> torch.Tensor:
    """A report's second message, sent by all ranks: the rest of the values, if any."""
    longest = int(report.parts[0][:, 2].max())
    return _padded(report.values[WIDTH:], longest - WIDTH)


def _padded(values: Sequence[float], width: int) -> torch.Tensor:
    row = torch.full((width,), nan, dtype=torch.float64)
    row[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return row


def _ignore(rows: Rows) -> None:
    """The message has no content."""


def _new_group() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    while _retired:
        with suppress(Exception):  # the whole world of an earlier run may be gone
            dist.destroy_process_group(_retired.pop())
    return group
