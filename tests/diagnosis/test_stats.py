"""The statistics of the diagnosis, against scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lightning_perf.diagnosis.stats import larger_by_chance, trend

#: Integers have ties; floats rarely do.
NUMBERS = st.integers(0, 8).map(float) | st.floats(0, 1e9, allow_subnormal=False)


def series(least: int, most: int):
    return st.lists(NUMBERS, min_size=least, max_size=most).map(np.array)


@given(series(2, 30), series(2, 30))
def test_the_p_value_of_ranks_is_that_of_scipy(values, others):
    """With ties and without, of few values (exact) and of many (a normal approximation)."""
    if len({*values, *others}) == 1:
        return  # undefined, and no level that changed
    expected = scipy_stats.mannwhitneyu(values, others, alternative="greater").pvalue
    assert larger_by_chance(values, others) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("sizes", [(3, 197), (8, 192), (192, 8), (9, 191), (100, 100)])
@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_the_p_value_of_a_long_series_is_that_of_scipy(sizes, shift):
    """The sizes of the change point's search, up to 200 blocks."""
    random = np.random.default_rng(0)
    values, others = (random.normal(mean, 1, n) for mean, n in zip((shift, 0), sizes, strict=True))
    expected = scipy_stats.mannwhitneyu(values, others, alternative="greater").pvalue
    assert larger_by_chance(values, others) == pytest.approx(expected, rel=1e-9)


@given(st.data(), st.integers(3, 40))
def test_the_trend_is_that_of_scipy(data, count):
    """The slope and its lower bound, with ties of values and of times."""
    times = np.sort(data.draw(series(count, count)))
    values = data.draw(series(count, count))
    if times[0] == times[-1]:
        return  # no slope
    expected = scipy_stats.theilslopes(values, times)
    assert trend(times, values) == pytest.approx((expected.slope, expected.low_slope), rel=1e-9)
