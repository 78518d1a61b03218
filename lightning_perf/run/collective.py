"""Gathers numbers of all ranks on all ranks without blocking training."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from ctypes import py_object, pythonapi
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from math import nan
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_perf.background import wait_until
from lightning_perf.errors import describe, warn
from lightning_perf.run import compat
from lightning_perf.run.termination import hurried

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning.pytorch import Trainer

    from lightning_perf.core.window import Rows, Table
    from lightning_perf.run.mailbox import Mailbox

#: Numbers per message, without those of GPUs: all messages have one size.
WIDTH = 128
HEADER = 2
#: Messages in flight per rank; further ones are queued here, without a table of all ranks.
_ON_THEIR_WAY = 8
#: Maximum queued messages: beyond it, another rank has probably ended.
_MOST_WAITING = 4096
_TIMEOUT = timedelta(minutes=30)
#: The second part of a rank's last tag, which it repeats while other ranks still report.
LAST = -2
#: The second part of the tag of the message with which a rank leaves the run.
_LEAVES = -3


@dataclass(slots=True, eq=False)
class _Report:
    tag: tuple[int, int]
    values: Sequence[float]
    then: Callable[[Rows], None]
    #: Its message in flight, and the received table: one row per rank.
    work: Any = None
    table: torch.Tensor | None = None


class Gatherer:
    """Gathers over a gloo group of its own, so that the accelerator is never synchronised.

    A single rank gathers nothing: it delivers each report at once.

    A report is sent at one batch and read at a later one, when it has arrived. Messages are paired
    by their order, so every rank sends the same ones, however far it is behind: none is ever
    skipped. With ``_ON_THEIR_WAY`` messages under way, further ones are queued in this process.

    Ranks may have different numbers of batches. A rank whose last report is sent before the others'
    sends it again for each of theirs, as their messages arrive.

    If a rank has ended, or the ranks send different reports, there is one warning, and nothing more
    is gathered.

    Args:
        trainer: The run's; all ranks construct this together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._world_size = trainer.world_size
        #: The most numbers in a message, the same on every rank.
        self.width = WIDTH
        #: Reports that were not delivered yet, in order: the first ones are in flight.
        self.pending: deque[_Report] = deque()
        #: Whether another rank has ended, so that nothing more is gathered.
        self.lost = False
        #: Whether this rank has ended before another one, and no longer waits for it.
        self.leads = False
        self._group: Any = _new_group(trainer) if self._world_size > 1 else None
        #: Messages to the other ranks, which do not wait for one that has failed; None without any.
        self.mail: Mailbox | None = None

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, one row each, at set-up; waits for all of them.

        Returns those of this rank alone, with a warning, if the strategy does not gather.
        """
        mine = torch.tensor(numbers)
        if self._group is None:
            found: Any = self._trainer.strategy.all_gather(mine)
            if found.numel() != self._world_size * len(mine):
                name = type(self._trainer.strategy).__name__
                self._give_up(f"{name}.all_gather returns nothing of the other ranks")
                return [[*numbers]]
            return [*found.reshape(self._world_size, -1).tolist()]
        rows = [torch.empty_like(mine) for _ in range(self._world_size)]
        self._group.allgather([rows], [mine]).wait()
        return [row.tolist() for row in rows]

    def gather(
        self, tag: tuple[int, int], values: Sequence[float], then: Callable[[Rows], None]
    ) -> None:
        """Send this rank's numbers; ``then`` receives one row per rank, now or at a later batch.

        Args:
            tag: What and when, the same on every rank that still reports; ``LAST`` for when.
            values: At most ``width`` of them, as many in each report on every rank.
            then: Called on the training thread with the rows in rank order.
        """
        if self._world_size == 1:
            then([values])
            return
        if self.lost:
            return
        if len(self.pending) >= _MOST_WAITING:
            self._give_up("another rank does not answer")
            return
        self._push(_Report(tag, values, then))

    def poll(self) -> bool:
        """Deliver the reports that have arrived, in order; return whether none is left."""
        while self.pending and self.pending[0].work.is_completed():
            report = self.pending.popleft()
            try:
                report.work.wait()  # completed: raises if it failed
            except RuntimeError as error:
                self._give_up(f"another rank has ended ({describe(error)})")
                return True
            self._send()
            self._receive(report)
        return not self.pending

    def finish(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for messages in flight, at the end of the run."""
        wait_until(lambda: self.poll() or self._waits_in_vain(), timeout)
        if self.pending:
            self.leads = True
            self._give_up("another rank did not answer at the end of the run")

    def fail(self) -> None:
        """Let the other ranks wait no longer: this one has ended by an exception.

        Not by a message of the group: if the others are still in training, it would stay on its
        way, and the group could not be destroyed.
        """
        if self.mail is not None:
            self.mail.fail()

    def leave_together(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all ranks leave the run.

        Rank 0 has the most to do at the end. Ranks that destroy their process groups meanwhile and
        make new ones would connect to its old ones. A rank that no longer waits for others still
        sends its message: they do not wait for it in vain.
        """
        if self._group is None:
            return
        report = _Report((0, _LEAVES), (), lambda _: None)
        self.pending.append(report)
        with suppress(Exception):  # another rank has ended, or the user has destroyed the groups
            self._send()
            if not self.lost:
                wait_until(lambda: report.work.is_completed() or self._waits_in_vain(), timeout)
            if report.work.is_completed():
                report.work.wait()  # raises if it failed
                self.pending.clear()

    def close(self) -> None:
        """Destroy the group, or keep it forever if a message is missing.

        Its destruction, at the latest at the end of Python, would wait for that message.
        """
        if self._group is not None and (self.pending or self.lost):
            pythonapi.Py_IncRef(py_object(self._group))
        self.pending.clear()
        self._group = None
        if self.mail is not None:
            self.mail.close()

    def _waits_in_vain(self) -> bool:
        return hurried() or (self.mail is not None and self.mail.has_failed())

    def _push(self, report: _Report) -> None:
        if self._group is None:  # a strategy without torch.distributed
            table = self._trainer.strategy.all_gather(self._message(report))
            report.table = table.reshape(self._world_size, -1).cpu()
            self._receive(report)
        else:
            self.pending.append(report)
            self._send()

    def _send(self) -> None:
        """Send the next messages, the same on all ranks, while there is room."""
        for report in islice(self.pending, _ON_THEIR_WAY):
            if report.work is None:
                row = self._message(report)
                report.table = table = row.new_empty(self._world_size, len(row))
                report.work = self._group.allgather([list(table)], [row])

    def _message(self, report: _Report) -> torch.Tensor:
        """The tag of a report, and its values."""
        values = [*report.tag, *report.values]
        row = torch.full((HEADER + self.width,), nan, dtype=torch.float64)
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
        return row

    def _receive(self, report: _Report) -> None:
        """Deliver a report whose messages have arrived from all ranks."""
        assert report.table is not None  # it was sent
        rows: Table = report.table.numpy()
        if (rows[:, 1] == _LEAVES).any():
            self._give_up("another rank has ended")
            return
        last = rows[:, 1] == LAST
        for tags in (rows[last, :2], rows[~last, :2]):
            if (tags != tags[:1]).any():
                self._give_up("the ranks sent different reports at the same time")
                return
        if report.tag[1] == LAST and not last.all():
            self._push(replace(report, work=None))  # answers the others' next report, too
        else:
            report.then(rows[:, HEADER : HEADER + len(report.values)])

    def _give_up(self, why: str) -> None:
        self.lost = True
        self.pending.clear()
        warn(f"{why}: metrics of all ranks are no longer reported in this run. Training continues.")


def _new_group(trainer: Trainer) -> Any:
    """A group of all ranks, which torch does not register; None if it has none of this size.

    torchrun may keep torch's store when it restarts a job: a group with a name of torch's would
    find the addresses of the processes that have ended.
    """
    world_size = trainer.world_size
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size):
        return None
    name = trainer.strategy.broadcast(os.urandom(8).hex(), src=0)
    return compat.gloo_group(f"lightning_perf/{name}", _TIMEOUT)
