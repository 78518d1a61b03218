"""Schedules that count optimizer steps or batches: `Fixed` and `Cyclic`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.checks import flag, whole
from lightning_perf.schedule.base import FOREVER, Schedule

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning_perf.core.progress import Moment


class Fixed(Schedule):
    """True once, for a number of optimizer steps after a warm-up.

    Args:
        warmup_steps: Optimizer steps before the window.
        active_steps: Length of the window in optimizer steps.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = Fixed(warmup_steps=2, active_steps=3)
        >>> [step for step in range(9)
        ...  if schedule(Moment("train", Timestamp(step=step), Timestamp()))]
        [2, 3, 4]
    """

    shared = True

    def __init__(self, warmup_steps: int, active_steps: int) -> None:
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0, "10")
        self.active_steps = whole("active_steps", active_steps, 1, "5")

    def window(self, moment: Moment) -> Hashable | None:
        """Return the single window."""
        return 0 if 0 <= moment.timestamp.step - self.warmup_steps < self.active_steps else None


class Cyclic(Schedule):
    """True in the active part of cycles of wait, warm-up and active batches.

    The arguments have the same meaning as in ``torch.profiler.schedule``.

    Args:
        skip_first: Batches before the first cycle.
        wait: Idle batches at the start of each cycle.
        warmup: Batches after these in which a profiler may warm up.
        active: Batches after these: the window.
        repeat: Number of cycles; 0 for no limit.
        per_epoch: Whether to count from the start of each epoch instead of the stage.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = Cyclic(wait=1, warmup=1, active=2, repeat=2)
        >>> [schedule.window(Moment("train", Timestamp(batch=batch), Timestamp()))
        ...  for batch in range(9)]
        [None, None, 0, 0, None, None, 1, 1, None]
    """

    shared = True

    def __init__(
        self,
        skip_first: int = 0,
        wait: int = 0,
        warmup: int = 1,
        active: int = 4,
        repeat: int = 1,
        per_epoch: bool = False,
    ) -> None:
        self.skip_first = whole("skip_first", skip_first, 0, "0")
        self.wait = whole("wait", wait, 0, "0")
        self.warmup = whole("warmup", warmup, 0, "1")
        self.active = whole("active", active, 1, "4")
        self.repeat = whole("repeat", repeat, 0, "1")
        self.per_epoch = flag("per_epoch", per_epoch)

    @property
    def lead(self) -> int:
        """The number of warm-up batches."""
        return self.warmup

    def window(self, moment: Moment) -> Hashable | None:
        """Return the number of the cycle, with the epoch if ``per_epoch``."""
        timestamp = moment.timestamp
        batch = timestamp.batch_in_epoch if self.per_epoch else timestamp.batch
        inactive = self.wait + self.warmup
        cycle, place = divmod(batch - self.skip_first, inactive + self.active)
        if cycle < 0 or place < inactive or (self.repeat and cycle >= self.repeat):
            return None
        return (timestamp.epoch, cycle) if self.per_epoch else cycle

    def quiet_until(self, moment: Moment) -> int:
        """Return the first batch of the next active part."""
        timestamp, length = moment.timestamp, moment.limits.batches_per_epoch
        if not self.per_epoch:
            return self._active_from(timestamp.batch)
        if length is None:
            return super().quiet_until(moment)
        begins = self._active_from(timestamp.batch_in_epoch)
        if begins >= length:
            begins = length + self._active_from(0)
        return max(timestamp.batch - timestamp.batch_in_epoch + begins, timestamp.batch + 1)

    def _active_from(self, batch: int) -> int:
        """Return where the active part of the cycle of an inactive batch begins."""
        inactive = self.wait + self.warmup
        length = inactive + self.active
        cycle = max(0, (batch - self.skip_first) // length)
        begins = self.skip_first + cycle * length + inactive
        return FOREVER if self.repeat and cycle >= self.repeat else begins
