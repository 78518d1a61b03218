"""How many times as fast a training is with a change, and whether it is the same training."""

from __future__ import annotations

from itertools import combinations
from math import exp, inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: The result of a trial.
    Result = Mapping[str, Any]

#: Rounds of a comparison. It is looked at after each one from the first number on.
FEWEST, MOST = 3, 7
#: Student's quantile of 0.995, by degrees of freedom. Five looks at intervals of 99 % are together
#: wrong at most as often as one look at 95 %.
_STUDENT = {2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707}
#: A smaller gain is not worth a change.
LEAST = 0.02
#: What is compared, in this order.
_COMPARED = ("samples", "batches", "losses")


class Speedup(NamedTuple):
    """How many times as fast something is, with a 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def better(self) -> bool:
        """Whether it is certainly faster, by enough."""
        return self.low > 1 + LEAST

    @property
    def settled(self) -> bool:
        """Whether further rounds would not change the answer."""
        return self.better or self.high < 1 + LEAST


def speedup(logs: Sequence[float], noise: float) -> Speedup:
    """The speed-up from logarithms of ratios, one per round.

    Args:
        logs: Of at least one round.
        noise: The least standard deviation: few rounds may agree by chance.

    Example:
        >>> found = speedup([0.69, 0.70, 0.69], noise=0.01)
        >>> f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
        '2.00 (1.89 to 2.12)'
    """
    mean, count = float(np.mean(logs)), len(logs)
    if count < FEWEST:
        return Speedup(exp(mean), 0.0, inf, count)
    spread = max(float(np.std(logs, ddof=1)), noise)
    half = _STUDENT[min(count - 1, max(_STUDENT))] * spread / sqrt(count)
    return Speedup(exp(mean), exp(mean - half), exp(mean + half), count)


def same_training(
    ours: Result, baselines: Sequence[Result], seeded: Sequence[Result], exact: bool, dataset: str
) -> str:
    """Whether a training with a change is the same as without it, in a few words.

    ``equal``: batches and losses are the same bit by bit. ``alike``: they may differ, and losses
    differ no more than those of other seeds. ``not equal``: anything else. ``unknown``: the losses
    are.

    Args:
        ours: The result of a trial with the change.
        baselines: The results without it, at the same seed.
        seeded: The results without it, at other seeds.
        exact: Whether the change must not touch numbers.
        dataset: As `kind_of_items` says.
    """
    base, *again = baselines
    if ours.get("batch_size") != base.get("batch_size"):
        return _within(ours, base, seeded, "other batches")
    if any(_difference(base, each) for each in again):
        return _within(ours, base, seeded, "two runs as it is differ, too")
    difference = _difference(base, ours)
    if difference is None:
        return "equal" if base["losses"] else "unknown"
    name, number = difference
    if name == "samples":
        return f"not equal: batch {number} has other samples"
    if name == "batches" and dataset == "random":
        return _within(ours, base, seeded, "the dataset draws random numbers, in each process")
    if name == "batches":
        return f"not equal: batch {number} differs"
    if exact:
        return f"not equal: the loss of batch {number} differs"
    return _within(ours, base, seeded, "rounding")


def _difference(one: Result, other: Result) -> tuple[str, int] | None:
    """What differs first, and in which batch of the first epoch."""
    for name in _COMPARED:
        pairs = list(zip(one[name], other[name], strict=False))[: one.get("epoch")]
        for number, (here, there) in enumerate(pairs):
            if here != there:
                return name, number
    return None


def _within(ours: Result, base: Result, seeded: Sequence[Result], why: str) -> str:
    """Whether losses differ from those without a change no more than those of other seeds do."""
    level, *others = (_level(each) for each in (ours, base, *seeded))
    if not seeded or not all(map(isfinite, others)):
        return f"unknown ({why})"
    if abs(level - others[0]) <= max(abs(a - b) for a, b in combinations(others, 2)):
        return f"alike ({why})"  # not with NaN
    return f"not equal: losses differ by more than those of other seeds ({why})"


def _level(result: Result) -> float:
    """The mean of the later half of the losses."""
    losses = [float(each) for each in result["losses"]]
    return float(np.mean(losses[len(losses) // 2 :])) if losses else float("nan")
