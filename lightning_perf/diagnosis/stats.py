"""Robust statistics on short, autocorrelated series."""

from __future__ import annotations

from math import ceil, erfc, sqrt
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Numbers: TypeAlias = NDArray[np.float64]

#: Resamples of a bootstrap, and the quantile that is its lower bound.
_RESAMPLES, _LOWER = 400, 0.05
#: Longer series are averaged before they are resampled.
_MOST_BLOCKS = 200
#: Windows whose shares of waiting differ by less are considered equal.
_ALIKE = 0.05
#: Below this many blocks there is no interval.
_FEWEST_BLOCKS = 3
#: The normal quantile that bounds a two-sided interval of 95%.
_QUANTILE = 1.959963984540054
#: Up to this many values, the p-value of ranks is exact.
_FEW = 8
#: Blocks of steps in which a change point is searched, and minimum steps per block.
_MOST_MEDIANS, FEWEST_STEPS = 200, 5


def lower_share(
    parts: Numbers, wholes: Numbers, events: float | None = None, waits: Numbers | None = None
) -> float:
    """The 5th percentile of ``sum(parts) / sum(wholes)``, by a block bootstrap over windows.

    With too few windows, the ratio itself. Rare ``events`` are in few windows, so windows are
    merged until each holds about two. ``waits`` are seconds in which the thread waited for a CPU;
    with them, the share excludes this waiting.

    Example:
        A part that takes longer by as much as the thread waited:

        >>> parts, wholes, waits = np.array([[1, 9, 1, 9], [10, 18, 10, 18], [0, 8, 0, 8]])
        >>> round(lower_share(parts, wholes, waits=waits), 1)
        0.1
    """
    blocks = min(len(parts), _MOST_BLOCKS)
    if events is not None:
        blocks = min(blocks, int(events / 2))
    if blocks < _FEWEST_BLOCKS:
        return float(parts.sum() / wholes.sum())
    series = (parts, wholes, np.zeros_like(wholes) if waits is None else waits)
    (parts, wholes, waits), drawn = _blocks(series, blocks, _RESAMPLES, seed=0)
    shares = _uncontended(parts[drawn], wholes[drawn], waits[drawn])
    return float(np.quantile(shares, _LOWER))


def resampled_ratios(parts: Numbers, wholes: Numbers, resamples: int, seed: int) -> Numbers:
    """Values that ``sum(parts) / sum(wholes)`` may have in runs like this, by a block bootstrap.

    Both are in order of time, since neighbours are drawn together.
    """
    blocks = min(len(parts), _MOST_BLOCKS)
    (parts, wholes), drawn = _blocks((parts, wholes), blocks, resamples, seed)
    ratios: Numbers = parts[drawn].sum(1) / np.maximum(wholes[drawn].sum(1), 1e-12)
    return ratios


def _blocks(
    series: Sequence[Numbers], count: int, resamples: int, seed: int
) -> tuple[list[Numbers], NDArray[np.int64]]:
    """Sums of series over some blocks of windows, and the blocks that each resample draws."""
    edges = np.linspace(0, len(series[0]), count, endpoint=False).astype(int)
    length = max(1, round(count ** (1 / 3)))
    # A separate generator, so that training's random numbers do not change.
    starts = np.random.default_rng(seed).integers(0, count, (resamples, ceil(count / length), 1))
    drawn = ((starts + np.arange(length)) % count).reshape(resamples, -1)
    return [np.add.reduceat(values, edges) for values in series], drawn


def _uncontended(parts: Numbers, wholes: Numbers, waits: Numbers) -> Numbers:
    """The share of the parts if the thread did not wait for a CPU.

    A regression over the windows: the more the part's share grows with the share of waiting, the
    more of the waiting happened within the part. If all windows wait alike, the part is charged in
    proportion. Seconds have one row per resample.
    """
    total = np.maximum(wholes.sum(1, keepdims=True), 1e-12)
    share, contention = parts.sum(1, keepdims=True) / total, waits.sum(1, keepdims=True) / total
    wholes = np.maximum(wholes, 1e-12)
    more = waits / wholes - contention
    spread = (wholes * more**2).sum(1, keepdims=True) + _ALIKE**2 * total
    slope = (wholes * more * (parts / wholes - share)).sum(1, keepdims=True) / spread
    # Between none and all of the wait is within the part.
    free = np.maximum(1 - contention, 1e-12)
    slope = np.clip(slope, -share / free, (1 - share) / free)
    shares: Numbers = np.clip(share - slope * contention, 0.0, 1.0)[:, 0]
    return shares


class ChangePoint(NamedTuple):
    """Where a series changed its level."""

    #: The first value after the change.
    start: int
    before: float
    after: float


def change_point(values: Numbers, ratio: float, sustained: int) -> ChangePoint | None:
    """Find the point after which values are higher by a ratio, with so many values on both sides.

    Example:
        >>> change_point(np.repeat([1.0, 2.0], 100), ratio=1.1, sustained=50)
        ChangePoint(start=100, before=1.0, after=2.0)
    """
    size = max(FEWEST_STEPS, ceil(len(values) / _MOST_MEDIANS))
    count = len(values) // size
    margin = max(ceil(sustained / size), 2)
    if count < 2 * margin:
        return None
    medians = np.median(values[: count * size].reshape(count, size), axis=1)
    # The split with the largest difference of mean ranks, which is robust to outliers.
    ranks = _ranks(medians)
    splits = np.arange(margin, count - margin + 1)
    below = np.cumsum(ranks)[splits - 1]
    gain = (ranks.sum() - below) / (count - splits) - below / splits
    weight = np.sqrt(splits * (count - splits))
    split = int(splits[np.argmax(gain * weight)])
    early, late = medians[:split], medians[split:]
    before, after = float(np.median(early)), float(np.median(late))
    if after < ratio * before:
        return None
    # At least two thirds of the later blocks are above the earlier level, so that it is not
    # temporary.
    if np.mean(late > np.sqrt(ratio) * before) < 2 / 3:
        return None
    if larger_by_chance(late, early) > 1e-3:
        return None
    return ChangePoint(split * size, before, after)


def larger_by_chance(values: Numbers, others: Numbers) -> float:
    """The one-sided p-value of the Mann-Whitney U test that values are larger than others.

    Exact for few values without ties; otherwise a normal approximation.

    Example:
        >>> larger_by_chance(np.array([3.0, 4.0]), np.array([1.0, 2.0]))  # 1 of 6 orders
        0.16666666666666666
    """
    count, other = len(values), len(others)
    total = count + other
    ranks = _ranks(np.append(values, others))
    above = float(ranks[:count].sum()) - count * (count + 1) / 2
    ties = _repetitions(ranks)
    fewer, more = sorted((count, other))
    if fewer <= _FEW and ties.max() == 1:
        # How many orders have each U: the coefficients of a Gaussian binomial.
        orders = np.zeros(count * other + 1)
        orders[0] = 1
        for k in range(1, fewer + 1):
            orders[more + k :] -= orders[: -(more + k)]
            for start in range(k):
                orders[start::k] = np.cumsum(orders[start::k])
        return float(orders[int(above) :].sum() / orders.sum())
    tied = (ties**3 - ties).sum() / (total * (total - 1))
    deviation = sqrt(count * other / 12 * (total + 1 - tied))
    # U is whole: half of one is the correction for continuity.
    return erfc((above - count * other / 2 - 0.5) / deviation / sqrt(2)) / 2


def trend(times: Numbers, values: Numbers) -> tuple[float, float]:
    """The Theil-Sen slope, which few outliers do not change, and its lower 95% bound by ranks.

    Example:
        >>> trend(np.arange(5.0), np.array([0.0, 2.0, 4.0, 6.0, 99.0]))
        (2.0, 2.0)
    """
    first, second = np.triu_indices(len(times), 1)
    apart = times[second] - times[first]
    rises = values[second] - values[first]
    slopes = np.sort(rises[apart > 0] / apart[apart > 0])

    def pairs(counts: NDArray[np.int64]) -> float:
        return float((counts * (counts - 1) * (2 * counts + 5)).sum() / 18)

    ties = pairs(_repetitions(times)) + pairs(_repetitions(values))
    width = _QUANTILE * sqrt(pairs(np.array([len(times)])) - ties)
    lower = max(round((len(slopes) - width) / 2) - 1, 0)
    return float(np.median(slopes)), float(slopes[lower])


def _ranks(values: Numbers) -> Numbers:
    """The ranks from 1; equal values share the mean of theirs."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[positions]
    return ranks


def _repetitions(values: Numbers) -> NDArray[np.int64]:
    """How often each value occurs."""
    return np.unique(values, return_counts=True)[1]


class Stalls(NamedTuple):
    """Values far above the others."""

    #: Their positions.
    positions: NDArray[np.int64]
    #: How far each is above the median.
    excess: Numbers
    #: The usual distance between two stalls; None if it is irregular.
    period: float | None


def stalls(values: Numbers) -> Stalls:
    """Values above the median by more than 8 times the median deviation, and by half of it.

    NaN are left out.

    Example:
        >>> values = np.where(np.arange(100) % 20 == 7, 5.0, 1.0)
        >>> found = stalls(values)
        >>> len(found.positions), float(found.excess.sum()), found.period
        (5, 20.0, 20.0)
    """
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return Stalls(known, np.empty(0), None)
    values = values[known]
    median = np.median(values)
    limit = median + max(8 * np.median(np.abs(values - median)), median / 2)
    index = np.flatnonzero(values > limit)
    gaps = np.diff(index)
    usual = np.median(gaps) if len(gaps) >= 2 else 0
    # Adjacent stalls are bursts, not a period.
    regular = usual > 1 and np.median(np.abs(gaps - usual)) <= 0.2 * usual
    period = float(np.median(np.diff(known[index]))) if regular else None
    return Stalls(known[index], values[index] - median, period)
