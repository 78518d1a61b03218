"""A few numbers of every rank, brought to every rank without making training wait."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_perf.errors import warn
from lightning_perf.trainer.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning.pytorch import Trainer

#: One row a rank; NaN past the end of what a rank sent.
Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]

#: Numbers a rank may send at once; all messages have this size, so that none can be misread.
WIDTH = 240
_HEADER = 3
_MOST_PENDING = 16
_TIMEOUT = timedelta(minutes=30)


# Groups of runs that are over. Another rank may still read from one at its run's end; by the time
# that all ranks make a new group, none does.
_retired: list[Any] = []


@dataclass(slots=True)
class _Pending:
    tag: tuple[int, int]
    work: Any
    #: One row a rank.
    table: torch.Tensor
    then: Callable[[Rows], None]


class Gatherer:
    """Gathers over a gloo group of its own, so that the accelerator is never synchronised.

    A message is sent at one batch and read at a later one, when it has come. Messages are paired
    by their order, so every rank must send the same ones; each carries what it is about, and one
    that is paired wrongly is dropped.

    Args:
        trainer: Whose ranks take part. With several, all must construct this together.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._world_size = trainer.world_size
        #: What was sent and has not been read.
        self.pending: deque[_Pending] = deque()
        self._group = _new_group() if self._world_size > 1 and _initialized() else None

    def gather(
        self, tag: tuple[int, int], values: Sequence[float], then: Callable[[Rows], None]
    ) -> None:
        """Send this rank's numbers; ``then`` receives one row a rank, now or at a later batch.

        Args:
            tag: What and when: the same on every rank.
            values: At most ``WIDTH`` numbers.
            then: Called on the training thread with the rows in rank order, unless some rank sent
                no numbers at all.
        """
        if self._world_size == 1:
            if values:
                then(np.array([values], dtype=np.float64))
            return
        if len(self.pending) >= _MOST_PENDING:  # a rank is gone: nothing will come any more
            return
        row = torch.tensor([*tag, len(values), *values], dtype=torch.float64)
        message = torch.full((_HEADER + WIDTH,), nan, dtype=torch.float64)
        message[: len(row)] = row
        if self._group is None:
            gathered = self._trainer.strategy.all_gather(message)
            self._deliver(tag, gathered.reshape(self._world_size, -1).cpu(), then)
            return
        table = message.new_empty(self._world_size, len(message))
        work = dist.all_gather(list(table), message, group=self._group, async_op=True)
        self.pending.append(_Pending(tag, work, table, then))

    def poll(self) -> bool:
        """Hand over what has come, in the order in which it was sent: whether that is all."""
        while self.pending and self.pending[0].work.is_completed():
            sent = self.pending.popleft()
            try:
                sent.work.wait()  # it has ended: this tells how
            except RuntimeError:  # a rank is gone
                continue
            self._deliver(sent.tag, sent.table, sent.then)
        return not self.pending

    def finish(self, timeout: float) -> None:
        """Wait a bounded time for what is still on its way.

        Args:
            timeout: Seconds at most.
        """
        wait_until(self.poll, timeout)

    def close(self) -> None:
        """Let the group go, unless something never came: that would have to be waited for."""
        if self._group is not None and not self.pending:
            _retired.append(self._group)
        self.pending.clear()
        self._group = None

    def _deliver(
        self, tag: tuple[int, int], table: torch.Tensor, then: Callable[[Rows], None]
    ) -> None:
        rows = table.numpy()
        if (rows[:, :2] != tag).any():
            warn("the ranks report different things at one time, so that report is left out.")
            return
        lengths = rows[:, 2]
        if lengths.all():
            then(rows[:, _HEADER : _HEADER + int(lengths.max())])


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _new_group() -> Any:
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    while _retired:
        with suppress(Exception):  # the whole world of an earlier run may be gone
            dist.destroy_process_group(_retired.pop())
    return group
