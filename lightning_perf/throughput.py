"""Throughput over a rolling window: arithmetic that knows no trainer."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS_PER_UNIT = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank did in some seconds.

    Example:
        >>> Work(seconds=2.0, batches=4, samples=64).samples / 2.0
        32.0
    """

    seconds: float = 0.0
    batches: float = 0
    samples: float = 0
    tokens: float = 0
    #: Model FLOPs, 0 where they are not known.
    flops: float = 0
    #: Seconds that these FLOPs would take at the device's peak, 0 where the peak is not known.
    ideal_seconds: float = 0.0

    def __sub__(self, other: Work) -> Work:
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class RollingWindow:
    """The work of the most recent batches.

    Args:
        size: How many batches the window holds.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._now: tuple[float, ...] = (0.0, 0, 0, 0, 0, 0.0)
        # Running totals at the edges of batches: a window is the difference of two of them.
        self._edges: deque[tuple[float, ...]] = deque([self._now], maxlen=size + 1)

    def add(
        self, seconds: float, samples: int, tokens: int, flops: float, ideal_seconds: float
    ) -> None:
        """Take in one batch."""
        s, b, n, t, f, i = self._now
        self._now = (
            s + seconds, b + 1, n + samples, t + tokens, f + flops, i + ideal_seconds
        )  # fmt: skip
        self._edges.append(self._now)

    def __len__(self) -> int:
        return len(self._edges) - 1

    @property
    def full(self) -> bool:
        """Whether the window holds as many batches as it can."""
        return len(self) == self.size

    def work(self) -> Work:
        """The work inside of the window."""
        return Work(*self._edges[-1]) - Work(*self._edges[0])

    def clear(self) -> None:
        """Forget all batches."""
        self._edges.clear()
        self._edges.append(self._now)


def throughput(ranks: Sequence[Work]) -> dict[str, float]:
    """The rates of all ranks together, and of one device on average.

    Args:
        ranks: One window a rank, of about the same stretch of time.

    Returns:
        ``throughput/...`` and ``throughput/device/...`` by name, all per second; ``mfu`` is a
        fraction of the peak. What no rank knows is left out.
    """
    rates: dict[str, float] = {}
    # Every rank takes part in every batch, so batches are averaged where samples are summed.
    rates["batches_per_sec"] = sum(_rate(w.batches, w) for w in ranks) / len(ranks)
    for name in ("samples", "tokens", "flops"):
        total = sum(_rate(getattr(w, name), w) for w in ranks)
        if total > 0:
            rates[f"{name}_per_sec"] = total
    found = {f"throughput/{key}": value for key, value in rates.items()}
    found |= {f"throughput/device/{key}": value / len(ranks) for key, value in rates.items()}
    if all(w.ideal_seconds > 0 for w in ranks):
        mfu = sum(_rate(w.ideal_seconds, w) for w in ranks) / len(ranks)
        found["throughput/device/mfu"] = mfu
    return found


def elapsed(train: float, validation: float, unit: str) -> dict[str, float]:
    """Elapsed time by what it was spent on.

    Args:
        train: Seconds of training.
        validation: Seconds of validation inside of fit.
        unit: One of ``SECONDS_PER_UNIT``.

    Example:
        >>> elapsed(5400.0, 1800.0, "hours")
        {'time/train': 1.5, 'time/val': 0.5, 'time/total': 2.0}
    """
    each = SECONDS_PER_UNIT[unit]
    return {
        "time/train": train / each,
        "time/val": validation / each,
        "time/total": (train + validation) / each,
    }


def _rate(amount: float, work: Work) -> float:
    return amount / work.seconds if work.seconds > 0 else 0.0
