"""Timestamps: how they advance, and their state in checkpoints."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_perf.core.progress import Timestamp
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError

counts = st.integers(0, 10**6)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(counts, counts, st.integers(0, 1)), max_size=4), max_size=4))
def test_totals_are_the_sums_of_the_epochs(epochs):
    """Totals are summed over all epochs, counts within an epoch over that epoch only."""
    now = Timestamp()
    for batches in epochs:
        for samples, tokens, steps in batches:
            now = now.to_next_batch(samples, tokens, 0.5, steps)
        assert now.batch_in_epoch == len(batches)
        assert now.sample_in_epoch == sum(batch[0] for batch in batches)
        assert now.token_in_epoch == sum(batch[1] for batch in batches)
        assert now.epoch_wct == 0.5 * len(batches)
        now = now.to_next_epoch()
    everything = [batch for batches in epochs for batch in batches]
    assert (now.epoch, now.batch) == (len(epochs), len(everything))
    assert (now.sample, now.token, now.step) == tuple(
        sum(batch[i] for batch in everything) for i in range(3)
    )
    assert now.total_wct == 0.5 * len(everything)


def test_get_returns_each_count():
    """Each unit has its own total; seconds are rounded down."""
    now = Timestamp(epoch=1, batch=2, sample=3, token=4, step=5, total_wct=6.9)
    assert [str(now.get(unit)) for unit in ("ep", "ba", "sp", "tok", "step", TimeUnit.SECOND)] == [
        "1ep",
        "2ba",
        "3sp",
        "4tok",
        "5step",
        "6sec",
    ]


def test_get_refuses_a_fraction():
    """A timestamp does not contain the length of training."""
    with pytest.raises(ConfigError, match="dur"):
        Timestamp().get("dur")


def test_the_state_has_plain_numbers():
    """The state has plain ints and floats, loads with weights_only, and restores the timestamp."""
    now = Timestamp(epoch=2).to_next_batch(32, 64, 0.25, 1)
    state = now.state_dict()
    assert {type(value) for value in state.values()} == {int, float}
    assert Timestamp.from_state_dict(state) == now


def test_state_of_another_version_loads():
    """Missing counts are 0, unknown ones are ignored."""
    assert Timestamp.from_state_dict({"batch": 3, "iteration": 7}) == Timestamp(batch=3)


def test_is_immutable_and_pickles():
    """A timestamp cannot be changed and can be pickled."""
    now = Timestamp(batch=3)
    with pytest.raises(AttributeError):
        now.batch = 4
    assert pickle.loads(pickle.dumps(now)) == now


def test_compares_with_times():
    """Comparison with a time or time string uses the count in its unit."""
    now = Timestamp(epoch=2, batch=30, total_wct=61.5)
    assert now < "31ba"
    assert now <= "2ep"
    assert now > Time(29, "ba")
    assert now >= "1m"
    assert now == "30ba"
    assert now != "31ba"
    assert not now < "30ba"
    with pytest.raises(TypeError):
        now < 5  # noqa: B015
    with pytest.raises(TypeError):
        now < Timestamp()  # noqa: B015
    with pytest.raises(ConfigError, match="dur"):
        now < "0.5dur"  # noqa: B015


def test_hashes_by_its_counts():
    """Equal timestamps have equal hashes."""
    assert len({Timestamp(batch=3), Timestamp(batch=3), Timestamp(batch=4)}) == 2
