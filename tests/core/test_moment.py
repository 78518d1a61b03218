"""Moments: the completed fraction, and what can be predicted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_perf.core.progress import Limits, Moment, Timestamp


def start(limits):
    return Moment("train", Timestamp(), Timestamp(), limits)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), None),
        (Limits(max_steps=8), 0.25),
        (Limits(max_epochs=4), 0.25),
        (Limits(max_epochs=4, batches_per_epoch=6), 0.375),
        (Limits(max_seconds=10.0), 0.5),
        (Limits(max_steps=8, max_epochs=4, max_seconds=10.0), 0.5),
        (Limits(max_steps=1), 1.0),
    ],
)
def test_fraction_is_the_largest_of_the_limits(limits, expected):
    """Training ends at the first limit it reaches, so the largest fraction counts."""
    now = Timestamp(epoch=1, batch=9, batch_in_epoch=3, step=2, total_wct=5.0)
    assert limits.fraction(now) == expected
    assert limits.known == (expected is not None)


def test_a_moment_has_its_fraction_and_the_previous_one():
    """Both fractions use the same limits."""
    moment = Moment("train", Timestamp(step=2), Timestamp(step=1), Limits(max_steps=4))
    assert (moment.previous_fraction, moment.fraction) == (0.25, 0.5)


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 30))
def test_ahead_counts_like_lightning(per_epoch, per_step, batches):
    """Epochs end after their known length, and each end completes an optimizer step."""
    ahead = start(Limits(batches_per_epoch=per_epoch, batches_per_step=per_step)).ahead(batches)
    epoch, within = divmod(batches, per_epoch)
    steps_per_epoch = -(-per_epoch // per_step)
    assert ahead.timestamp == Timestamp(
        epoch=epoch,
        batch=batches,
        batch_in_epoch=within,
        step=epoch * steps_per_epoch + within // per_step,
    )


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_ahead_adds_up(per_epoch, a, b):
    """Looking ahead twice equals looking ahead by the sum."""
    moment = start(Limits(batches_per_epoch=per_epoch))
    assert moment.ahead(a).ahead(b) == moment.ahead(a + b)


def test_ahead_keeps_what_it_cannot_predict():
    """Samples, tokens, seconds and all other fields stay the same."""
    now = Timestamp(batch=1, sample=32, token=64, total_wct=1.5)
    moment = Moment("test", now, Timestamp(), run_name="run", batch_seconds=0.5)
    ahead = moment.ahead(1)
    assert ahead.previous == now
    assert (ahead.timestamp.sample, ahead.timestamp.token, ahead.timestamp.total_wct) == (
        32,
        64,
        1.5,
    )
    assert (ahead.stage, ahead.run_name, ahead.batch_seconds) == ("test", "run", 0.5)
