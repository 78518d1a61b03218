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
    first: Result | None = None,
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
        first: The result of the first run; None to compare what trials have seen alone.
    """
    base, *again = baselines
    if ours.get("batch_size") != base.get("batch_size"):
        ours, base, *seeded = _of_same_samples(ours, base, *seeded)
        return _within(ours, base, seeded, "other batches")
    stay = ours.get("stays") and not base.get("stays")
    if stay and any(each.get("dataset_changes") for each in baselines):
        return "not equal: the training changes the dataset, which persistent workers do not see"
    compared = (*_LOADED, *_COMPUTED)
    name = next((each for each in compared if _difference(base, ours, each) is not None), None)
    if name is None:
        why = first and _drawn_otherwise(ours, base, first)
        return f"alike ({why})" if why else "equal"
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
    if name == "losses" and (since := _validated_since(base, ours)) is not None:
        # Each validation draws the seed of its workers, and its modules may draw more.
        shared = {*base["drawn"]["batch"]} & {*base["drawn"]["validation"]}
        if shared and (number or 0) >= since:
            return _within(ours, base, seeded, "validations draw random numbers")
    return {
        "samples": f"not equal: batch {number} has other samples",
        "batches": f"not equal: batch {number} differs",
        "losses": f"not equal: the loss of batch {number} differs",
        "weights": "not equal: the weights after some batches differ",
    }[name]


def _drawn_otherwise(ours: Result, base: Result, first: Result) -> str:
    """Which random numbers differ where a trial does not show it; empty if none do.

    In a trial, the order of samples has random numbers of its own, and few epochs. In a training,
    DataLoaders draw seeds from the numbers that also decide the order or that modules use.

    Args:
        ours: The result of a trial with a change, which is equal to the one without it.
        base: The one without it.
        first: The result of the first run.
    """
    order, batch = first["order"], {*base["drawn"]["batch"]}
    begin, later, end = ({*order[name]} for name in ("first", "later", "end"))
    starts = zip(base["starts"], ours["starts"], strict=False)
    differ = [any(here[x] != there.get(x) for x in begin & {*here}) for here, there in starts]
    moved = set()
    if base["stays"] != ours["stays"]:
        moved.add(order["seeds"])
    if (since := _validated_since(base, ours)) is not None:
        moved.update(base["drawn"]["validation"], ours["drawn"]["validation"])
    one, two = (each["workers"] * (each["prefetch"] or 2) for each in (base, ours))
    # Workers draw for batches that come later, and ask for one after the last one.
    starts_or_ends = bool(one) != bool(two)
    anew = order["eager"] and (starts_or_ends or base["stays"] != ours["stays"])
    within = (later and one != two) or (later & moved and since is not None)
    if any(differ[:1]) or anew or within:
        return "another shuffle"
    if order["epochs"] == 1:
        return ""
    asks = starts_or_ends or (one != two and order["cut"])
    if any(differ) or (end and asks) or (begin | later | end) & moved:
        return "another shuffle from the second epoch on"
    draws = first["dataset"] != "fixed" or moved & batch
    return "other random numbers from the second epoch on" if moved and draws else ""


def _validated_since(one: Result, other: Result) -> int | None:
    """The batches before the first validation that only one of both has; None without one."""
    both = [{*each.get("validated", ())} for each in (one, other)]
    most = min(one.get("done", 0), other.get("done", 0))
    return min((each for each in both[0] ^ both[1] if each <= most), default=None)


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
    # Trials of other seeds may be shorter, and a training that learns has smaller losses later.
    count = min(len(each["losses"]) for each in (base, *seeded))
    others = [_level({"losses": each["losses"][:count]}) for each in (base, *seeded)]
    if not seeded or not all(map(isfinite, others)):
        return f"unknown ({why})"
    # Three levels have a range that a fourth one, as good, exceeds in three of ten cases.
    same = all(each[name] == base[name] for each in seeded for name in _LOADED)
    chance = _chance(base) * (1 if same else _CHANCES)
    limit = max(chance, *(abs(a - b) for a, b in combinations(others, 2)))
    if abs(_level(ours) - _level(base)) <= limit:
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
