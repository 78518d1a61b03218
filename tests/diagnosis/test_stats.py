"""Statistics of the diagnosis, compared with scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as oracle

from lightning_perf.diagnosis.stats import change_point, stalls, trend


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [3, 8, 40])
def test_a_trend_is_that_of_theil_and_sen(size: int, ties: bool) -> None:
    """Slope and the lower end of its interval are scipy's, with equal times and values as well."""
    random = np.random.default_rng(size)
    for _ in range(50):
        times = np.sort(random.uniform(0, 9, size))
        values = 0.3 * times + random.normal(size=size)
        if ties:
            times, values = np.round(times), np.round(values)
        if len(set(times)) == 1:
            continue
        expected = oracle.theilslopes(values, times)
        found = trend(times, values)
        assert found.slope == pytest.approx(expected.slope, abs=1e-12)
        assert found.least == pytest.approx(expected.low_slope, abs=1e-12)


def test_equal_times_have_no_trend() -> None:
    """Samples of one moment say nothing."""
    assert trend(np.zeros(4), np.arange(4.0)) == (0.0, 0.0)


@pytest.mark.parametrize("digits", [1, 8])
def test_a_change_is_found_if_the_test_of_mann_and_whitney_says_so(digits: int) -> None:
    """Of series whose level rises by 20 %, those with much noise have no significant change."""
    random, found = np.random.default_rng(digits), []
    for noise in np.linspace(0.05, 1.5, 60):
        level = np.repeat([1.0, 1.2], 60)
        values = np.round(level + noise * random.exponential(size=120), digits)
        point = change_point(values, ratio=1.05, sustained=20)
        found.append(point is not None)
        if point is None:
            continue
        # Blocks of five steps, as in the function.
        medians = np.median(values.reshape(-1, 5), axis=1)
        early, late = np.split(medians, [point.start // 5])
        way = {"alternative": "greater", "method": "asymptotic"}
        assert oracle.mannwhitneyu(late, early, **way).pvalue <= 1.01e-3
        assert point.before == np.median(early)
    assert any(found[:10])
    assert not all(found)


def test_small_stalls_do_not_hide_large_ones() -> None:
    """Stalls of 0.6 s each 50 batches keep their size and period beside some of 8 ms."""
    values = np.full(1000, 0.012)
    values[[7, 130, 131, 444, 790]] = 0.020
    values[49::50] = 0.612
    found = stalls(values)
    assert found.positions.tolist() == [*range(49, 1000, 50)]
    assert found.period == 50
    assert found.excess == pytest.approx(0.6)
    values[:] = np.where(values > 0.1, 0.012, values)
    values[600] = 6.0
    assert stalls(values).positions.tolist() == [600]
