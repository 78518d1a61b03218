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

#: Rounds after which a comparison is looked at; the last number are all that it has.
LOOKS = (3, 4, 5, 8, 12)
FEWEST = LOOKS[0]
#: Student's quantile of 0.995, from 2 degrees of freedom on. Five looks at intervals of 99 % are
#: together wrong at most as often as one look at 95 %.
_STUDENT = (9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.25, 3.169, 3.106)
#: A smaller gain is not worth a change.
LEAST = 0.02
#: Two means of other batches differ by fewer standard errors in 95 % of cases.
_CHANCES = 2.77
#: What is compared, in this order.
_LOADED, _COMPUTED = ("samples", "batches"), ("losses", "weights")


class Speedup(NamedTuple):
    """How many times as fast something is, with a 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    def with_rest(self, share: float) -> Speedup:
        """The same of a whole whose rest, with this share of the time before, stays as it is.

        Example:
            >>> found = Speedup(2.0, 1.5, 3.0, 3).with_rest(0.5)
            >>> f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
            '1.33 (1.20 to 1.50)'
        """
        known = (0.0, inf)  # without an interval
        ratio, low, high = (x if x in known else 1 / ((1 - share) / x + share) for x in self[:3])
        return Speedup(ratio, low, high, self.rounds)

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
    half = _STUDENT[min(count, LOOKS[-1]) - FEWEST] * spread / sqrt(count)
    return Speedup(exp(mean), exp(mean - half), exp(mean + half), count)


def same_training(
    ours: Result,
    baselines: Sequence[Result],
    seeded: Sequence[Result],
    exact: bool,
    dataset: str,
    resident: bool = False,
) -> str:
    """Whether a training with a change is the same as without it, in a few words.

    ``equal``: batches and losses are the same bit by bit. ``alike``: they may differ, and losses
    differ no more than those of other seeds. ``not equal``: anything else. ``unknown``: the losses
    are, and may differ.

    Args:
        ours: The result of a trial with the change.
        baselines: The results without it, at the same seed.
        seeded: The results without it, at other seeds.
        exact: Whether the change must not touch numbers.
        dataset: As `kind_of_items` says; empty for a change that leaves loading as it is.
        resident: Whether the change lets workers stay between epochs, each with its dataset.
    """
    base, *again = baselines
    if ours.get("batch_size") != base.get("batch_size"):
        ours, base, *seeded = _of_same_samples(ours, base, *seeded)
        return _within(ours, base, seeded, "other batches")
    if resident and any(each.get("dataset_changes") for each in baselines):
        return "not equal: the training changes the dataset, which persistent workers do not see"
    compared = (*_LOADED, *_COMPUTED)
    name = next((each for each in compared if _difference(base, ours, each) is not None), None)
    if name is None:
        return "equal"
    if any(_difference(base, each, name) is not None for each in again):
        # Workers may repeat a stream, and copy a state such as a generator of random numbers.
        if dataset in ("unknown", "stateful") and name in _LOADED:
            return "unknown: two runs as it is have other batches, too"
        return _within(ours, base, seeded, "two runs as it is differ, too")
    if name == "batches" and dataset == "random":
        return _within(ours, base, seeded, "the dataset draws random numbers, in each process")
    if name in _COMPUTED and not exact:
        return _within(ours, base, seeded, "rounding")
    number = _difference(base, ours, name)
    return {
        "samples": f"not equal: batch {number} has other samples",
        "batches": f"not equal: batch {number} differs",
        "losses": f"not equal: the loss of batch {number} differs",
        "weights": "not equal: the weights after some batches differ",
    }[name]


def _difference(one: Result, other: Result, name: str) -> int | None:
    """The first batch of the first epoch that differs in what is named."""
    pairs = list(zip(one[name], other[name], strict=False))[: one.get("epoch")]
    return next((number for number, (here, there) in enumerate(pairs) if here != there), None)


def _of_same_samples(ours: Result, *others: Result) -> list[Result]:
    """Results with losses of as many samples: larger batches are fewer."""
    ratio = (ours.get("batch_size") or 1) / (others[0].get("batch_size") or 1)
    count = min(len(others[0]["losses"]), int(len(ours["losses"]) * ratio))
    counts = int(count / ratio), *(count for _ in others)
    return [
        {**each, "losses": each["losses"][:most]}
        for each, most in zip((ours, *others), counts, strict=True)
    ]


def _within(ours: Result, base: Result, seeded: Sequence[Result], why: str) -> str:
    """Whether losses differ from those without a change no more than those of other seeds do."""
    level, *others = (_level(each) for each in (ours, base, *seeded))
    if not seeded or not all(map(isfinite, others)):
        return f"unknown ({why})"
    # Three levels have a range that a fourth one, as good, exceeds in three of ten cases.
    same = all(each[name] == base[name] for each in seeded for name in _LOADED)
    chance = _chance(base) * (1 if same else _CHANCES)
    limit = max(chance, *(abs(a - b) for a, b in combinations(others, 2)))
    if abs(level - others[0]) <= limit:
        return f"alike ({why})"  # not with NaN
    return f"not equal: losses differ by more than those of other seeds ({why})"


def _later(result: Result) -> list[float]:
    """The later half of the losses."""
    losses = [float(each) for each in result["losses"]]
    return losses[len(losses) // 2 :]


def _level(result: Result) -> float:
    """The mean of the later half of the losses."""
    return float(np.mean(_later(result))) if result["losses"] else float("nan")


def _chance(result: Result) -> float:
    """The standard error of `_level`: from neighbouring losses, so that learning is no noise."""
    losses = _later(result)
    if len(losses) < 2:
        return 0.0
    return float(np.sqrt(np.mean(np.diff(losses) ** 2) / 2 / len(losses)))
