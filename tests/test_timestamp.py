"""Timestamps: how they advance, and that checkpoints can hold them."""

import pickle
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_perf.errors import ConfigError
from lightning_perf.time import TimeUnit
from lightning_perf.timestamp import Timestamp

counts = st.integers(0, 10**6)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(counts, counts, st.integers(0, 1)), max_size=4), max_size=4))
def test_totals_are_the_sums_of_the_epochs(epochs):
    """Totals add up over all epochs, and counts within an epoch over that epoch alone."""
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


@pytest.mark.parametrize("advance", [Timestamp.to_next_batch, Timestamp.to_next_epoch])
def test_durations_may_be_timedeltas(advance):
    """A timedelta and its seconds are the same duration."""
    now = Timestamp()
    assert advance(now, duration=timedelta(seconds=1.5)) == advance(now, duration=1.5)
    assert advance(now, duration=1.5).total_wct == 1.5


def test_get_tells_each_count():
    """Each unit gives its own total, seconds cut to whole ones."""
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
    """A timestamp does not know how long training will be."""
    with pytest.raises(ConfigError, match="dur"):
        Timestamp().get("dur")


def test_state_holds_plain_numbers():
    """A state is plain ints and floats, which load with weights_only, and gives the same back."""
    now = Timestamp(epoch=2).to_next_batch(32, 64, 0.25, 1)
    state = now.state_dict()
    assert {type(value) for value in state.values()} == {int, float}
    assert Timestamp.from_state_dict(state) == now


def test_state_of_another_version_loads():
    """Counts that a state lacks are zero, and what it has besides is left out."""
    assert Timestamp.from_state_dict({"batch": 3, "iteration": 7}) == Timestamp(batch=3)


def test_is_immutable_and_pickles():
    """A timestamp cannot be changed, and survives a trip to another process."""
    now = Timestamp(batch=3)
    with pytest.raises(AttributeError):
        now.batch = 4
    assert pickle.loads(pickle.dumps(now)) == now
