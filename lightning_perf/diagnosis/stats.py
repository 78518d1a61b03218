"""Robust statistics on short, autocorrelated series."""

from __future__ import annotations

from math import ceil, sqrt
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
#: Blocks of steps in which a change point is searched, and minimum steps per block.
_MOST_MEDIANS, FEWEST_STEPS = 200, 5
#: The quantile of values that is the usual one: fewer are slow.
_USUAL = 0.25
#: Values are slow from this part of the level of slow ones on.
SLOW = 0.4
#: The part of the variance between the levels of a series that has two. Halves of normal values
#: have 0.64, and of uniform values 0.75.
_LEVELS = 0.7
#: Stretches have this part of what slow values lose, and the last is over after this part of its
#: events.
_ONE, OVER = 0.7, 0.5
#: Stalls below this part of the usual one are another thing.
_SMALL = 0.2
#: Standard deviations of a normal distribution: of a probability of 0.001 and of 0.05 on one side,
#: and of 0.95 on both.
_SURE, _ONE_SIDED, _CONFIDENCE = 3.09, 1.645, 1.96


def lower_share(
    parts: Numbers,
    wholes: Numbers,
    events: float | None = None,
    waits: Numbers | None = None,
    number: float | None = None,
) -> float:
    """The 5th percentile of ``sum(parts) / sum(wholes)``, by a block bootstrap over windows.

    With too few windows, the ratio itself. Rare ``events`` are in few windows, so windows are
    merged until each holds about two. Of a ``number`` of equal events, which may all be in one part
    of the run, it is the share of the `fewest` if that is more, or if there are too few windows.
    ``waits`` are seconds in which the thread waited for a CPU; with them, the share excludes this
    waiting.

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
        return float(parts.sum() / wholes.sum()) * (1.0 if number is None else fewest(number))
    series = (parts, wholes, np.zeros_like(wholes) if waits is None else waits)
    sums, drawn = _blocks(series, blocks, _RESAMPLES, seed=0)
    lower = float(np.quantile(_uncontended(*(each[drawn] for each in sums)), _LOWER))
    if number is None:
        return lower
    whole = _uncontended(*(each[np.newaxis] for each in series))
    return max(lower, fewest(number) * float(whole[0]))


def equal(costs: Numbers) -> float:
    """The number of events of equal cost that vary as much as these do.

    Example:
        >>> equal(np.array([0.0, 2.0, 0.0, 2.0, 2.0]))
        3.0
    """
    return max(float(costs.sum() ** 2 / max((costs**2).sum(), 1e-24)), 1.0)


def fewest(number: float) -> float:
    """The 5th percentile of a number of events, as a part of it.

    It varies like Poisson's (approximation by Wilson and Hilferty).

    Example:
        >>> round(fewest(3), 2)
        0.27
    """
    return max(1 - 1 / (9 * number) - _ONE_SIDED / (3 * sqrt(number)), 0.0) ** 3


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


class Slow(NamedTuple):
    """Stretches of a series in which an event takes some times as long as usual."""

    #: The positions of each.
    stretches: list[NDArray[np.intp]]
    #: The seconds of a usual event, and beyond them of a slow one.
    usual: float
    longer: float
    #: Seconds at each position beyond those of usual events.
    excess: Numbers

    def passed(self, counts: Numbers) -> tuple[NDArray[np.intp], Numbers] | None:
        """The stretch that matters and its excess; None if there are more, or it is not over."""
        number = np.arange(len(self.excess))
        largest = max(self.stretches, key=lambda each: float(self.excess[each].sum()))
        begin, end = largest[0], largest[-1] + 1
        # The positions at which it begins and ends may be slow for a small part.
        part = np.where((number >= begin - 1) & (number <= end), self.excess, 0.0)
        if part.sum() < _ONE * self.excess[np.concatenate(self.stretches)].sum():
            return None
        later = counts[end:].sum()
        return None if later < max(OVER * counts[largest].sum(), 1.0) else (largest, part)

    def lasting(self, fewest: int) -> NDArray[np.intp]:
        """The positions in stretches of some, if these are at one level, and others at another.

        Gaps of one position are noise.
        """
        positions, within = np.concatenate(self.stretches), np.zeros(len(self.excess))
        for part in np.split(positions, np.flatnonzero(np.diff(positions) > 2) + 1):
            within[part[0] : part[-1] + 1] = len(part) >= fewest
        both = (within - within.mean()) @ self.excess / len(within)
        return np.flatnonzero(within * (both**2 > _LEVELS * within.var() * self.excess.var()))


def slow(seconds: Numbers, counts: Numbers, least: float, ratio: float) -> Slow | None:
    """Slow stretches of events, given their seconds and number at each position.

    None if no event takes longer than usual by a ratio, and by the ``least`` seconds.

    Example:
        >>> found = slow(np.array([1.0, 4, 4, 1, 1]), np.ones(5), least=0.1, ratio=3)
        >>> found.stretches, found.usual, found.longer
        ([array([1, 2])], 1.0, 3.0)
    """
    measured = counts > 0
    each = seconds / np.maximum(counts, 1.0)
    usual = float(np.quantile(each[measured], _USUAL, method="lower"))
    longer = np.where(measured, np.maximum(each - usual, 0.0), 0.0)
    excess = longer * counts
    # The mean of the lost time: a second of it is mostly in an event that takes so long.
    level = float((excess * longer).sum() / max(excess.sum(), 1e-12))
    if level < max(least, (ratio - 1) * usual):
        return None
    positions = np.flatnonzero(longer > SLOW * level)
    stretches = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return Slow(stretches, usual, level, excess)


class ChangePoint(NamedTuple):
    """Where a series changed its level."""

    #: The first value after the change.
    start: int
    before: float
    after: float


def change_point(values: Numbers, ratio: float, sustained: int) -> ChangePoint | None:
    """Find the point after which values are higher by a ratio, with ``sustained`` on each side.

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
    # The split with the largest difference of mean ranks, which is robust to outliers. Equal values
    # share the mean of their ranks.
    _, places, alike = np.unique(medians, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(alike) - (alike - 1) / 2)[places]
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
    # The test of Mann and Whitney, with the normal approximation.
    pairs = split * (count - split)
    above = ranks[split:].sum() - (count - split) * (count - split + 1) / 2
    ties = (alike**3 - alike).sum() / (count * (count - 1))
    if above - pairs / 2 - 0.5 < _SURE * np.sqrt(pairs / 12 * (count + 1 - ties)):
        return None
    return ChangePoint(split * size, before, after)


class Trend(NamedTuple):
    """A slope, and the lower end of its 95 % confidence interval."""

    slope: float
    least: float


def trend(times: Numbers, values: Numbers) -> Trend:
    """The slope of Theil and Sen: the median over all pairs, which is robust to outliers.

    Source: P. K. Sen (1968), Estimates of the regression coefficient based on Kendall's tau.

    Example:
        >>> trend(np.arange(10.0), 3 * np.arange(10.0))
        Trend(slope=3.0, least=3.0)
    """
    first, second = np.triu_indices(len(times), 1)
    apart = times[second] - times[first]
    slopes = np.sort((values[second] - values[first])[apart > 0] / apart[apart > 0])
    if not len(slopes):
        return Trend(0.0, 0.0)
    # The variance of Kendall's statistic, which equal values make smaller.
    alike = (np.unique(each, return_counts=True)[1] for each in (times, values))
    variance = (_orders(np.array([len(times)])) - sum(map(_orders, alike))) / 18
    lowest = round((len(slopes) - _CONFIDENCE * np.sqrt(variance)) / 2) - 1
    return Trend(float(np.median(slopes)), float(slopes[max(lowest, 0)]))


def _orders(counts: NDArray[np.int64]) -> float:
    return float((counts * (counts - 1) * (2 * counts + 5)).sum())


class Stalls(NamedTuple):
    """Values far above the others."""

    #: Their positions.
    positions: NDArray[np.int64]
    #: How far each is above the usual value.
    excess: Numbers
    #: The usual distance between two stalls; None if it is irregular.
    period: float | None


def stalls(values: Numbers, least: float = 0.0, beside: int = 0) -> Stalls:
    """Values above the median by more than 8 times the median deviation, by half of it, and least.

    Those that are small beside the others are left out, and NaN. With ``beside``, values are above
    those of so many beside them as well: a stretch of long ones has no stall, but may contain some.

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
    limit = median + max(8 * np.median(np.abs(values - median)), median / 2, least)
    level = np.maximum(_levels(values, beside), median) if beside else median
    excess = np.where(values > limit - median + level, values - level, 0.0)
    # The mean of the lost time: a second is mostly part of a stall of this size.
    usual_excess = (excess**2).sum() / max(excess.sum(), 1e-12)
    index = np.flatnonzero(excess > _SMALL * usual_excess)
    gaps = np.diff(index)
    usual = np.median(gaps) if len(gaps) >= 2 else 0
    # Adjacent stalls are bursts, not a period.
    regular = usual > 1 and np.median(np.abs(gaps - usual)) <= 0.2 * usual
    period = float(np.median(np.diff(known[index]))) if regular else None
    return Stalls(known[index], excess[index], period)


def _levels(values: Numbers, size: int) -> Numbers:
    """The medians of blocks of values, at each value the highest of its block and its neighbours.

    A stretch of high values may begin anywhere within a block.
    """
    count = max(len(values) // size, 1)
    medians = np.median(values[: count * size].reshape(count, -1), axis=1)
    near = np.pad(medians, 1, mode="edge")
    highest = np.maximum(medians, np.maximum(near[:-2], near[2:]))
    return np.pad(np.repeat(highest, size), (0, size), mode="edge")[: len(values)]
