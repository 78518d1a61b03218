"""Throughput over a rolling window: arithmetic that knows no trainer."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SECONDS_PER_UNIT = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


class Work(NamedTuple):
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
    #: Batches whose samples, tokens, or FLOPs could not be told.
    uncounted_samples: float = 0
    uncounted_tokens: float = 0
    uncounted_flops: float = 0


class RollingWindow:
    """The work of the most recent batches.

    Args:
        size: How many batches the window holds.
    """

    def __init__(self, size: int) -> None:
        self._now: tuple[float, ...] = Work()
        # Running totals at the edges of batches: a window is the difference of two of them.
        self._edges: deque[tuple[float, ...]] = deque([self._now], maxlen=size + 1)

    def add(
        self,
        seconds: float,
        samples: int | None,
        tokens: int | None,
        flops: float | None,
        ideal_seconds: float,
    ) -> None:
        """Take in one batch.

        Args:
            seconds: How long it took.
            samples: Samples in it, or None where they cannot be told.
            tokens: The same for tokens; 0 where they are not tracked.
            flops: Its model FLOPs, or None where they are not known.
            ideal_seconds: What these would take at the peak; 0 where it is not known.
        """
        s, b, n, t, f, i, un, ut, uf = self._now
        self._now = (
            s + seconds,
            b + 1,
            n + (samples or 0),
            t + (tokens or 0),
            f + (flops or 0),
            i + ideal_seconds,
            un + (samples is None),
            ut + (tokens is None),
            uf + (flops is None),
        )
        self._edges.append(self._now)

    def work(self) -> Work:
        """The work inside of the window."""
        last, first = self._edges[-1], self._edges[0]
        return Work._make(a - b for a, b in zip(last, first, strict=True))


def throughput(per_second: Work, least: Work, ranks: int) -> dict[str, float]:
    """The rates of all ranks together, and of one device on average.

    Args:
        per_second: One window a rank, of about the same stretch of time, each by its seconds; their
            sum.
        least: The least of each field on any rank.
        ranks: How many they are.

    Returns:
        ``throughput/...`` and ``throughput/device/...`` by name, all per second; ``mfu`` is a
        fraction of the peak. What no rank knows is left out.

    Example:
        >>> found = throughput(Work(2.0, batches=4.0, samples=128.0), Work(), ranks=2)
        >>> found["throughput/batches_per_sec"], found["throughput/samples_per_sec"]
        (2.0, 128.0)
    """
    # Every rank takes part in every batch, so batches are averaged where samples are summed.
    rates = {"batches_per_sec": per_second.batches / ranks}
    for name in ("samples", "tokens", "flops"):
        total = getattr(per_second, name)
        # One batch that could not be counted would make the rate too low.
        if total > 0 and not getattr(per_second, f"uncounted_{name}"):
            rates[f"{name}_per_sec"] = total
    found = {f"throughput/{key}": value for key, value in rates.items()}
    found |= {f"throughput/device/{key}": value / ranks for key, value in rates.items()}
    if least.ideal_seconds > 0 and not per_second.uncounted_flops:
        found["throughput/device/mfu"] = per_second.ideal_seconds / ranks
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
