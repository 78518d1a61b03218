"""Fixed and Cyclic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from lightning_perf.core.progress import Limits, Moment, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import Cyclic, Fixed

START = Moment("train", Timestamp(), Timestamp())
few = st.integers(0, 4)


@pytest.mark.filterwarnings("ignore:.*warmup:UserWarning")
@settings(deadline=None)
@given(few, few, few, st.integers(1, 4), few)
def test_cyclic_matches_torch(skip_first, wait, warmup, active, repeat):
    """A batch is in a window exactly where torch.profiler would record it."""
    arguments = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    schedule = Cyclic(skip_first=skip_first, **arguments)
    reference = torch_schedule(skip_first=skip_first, **arguments)
    recorded = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
    for batch in range(60):
        assert schedule(START.ahead(batch)) == (reference(batch) in recorded)


def test_cyclic_counts_across_epochs_unless_per_epoch():
    """The cycle continues in the next epoch; with per_epoch it restarts, in a new window."""
    start = Moment("train", Timestamp(), Timestamp(), Limits(batches_per_epoch=3))
    moments = [start.ahead(batch) for batch in range(6)]
    across, restarted = Cyclic(active=9), Cyclic(active=9, per_epoch=True)
    assert [across.window(moment) for moment in moments] == [None, 0, 0, 0, 0, 0]
    assert [restarted.window(moment) for moment in moments] == [
        None, (0, 0), (0, 0), None, (1, 0), (1, 0),
    ]  # fmt: skip


def test_each_cycle_is_a_window():
    """Adjacent cycles have different windows."""
    schedule = Cyclic(warmup=0, active=2, repeat=0)
    assert [schedule.window(START.ahead(batch)) for batch in range(6)] == [0, 0, 1, 1, 2, 2]


def test_the_lead_of_cyclic_is_its_warmup():
    """A profiler warms up during the warm-up batches of the cycle."""
    assert Cyclic(warmup=3).lead == 3
    assert Cyclic(warmup=0).lead == 0


def test_fixed_counts_optimizer_steps():
    """All batches of an optimizer step are in the window together, after the warm-up."""
    start = Moment("train", Timestamp(), Timestamp(), Limits(batches_per_step=2))
    schedule = Fixed(warmup_steps=1, active_steps=2)
    assert [schedule.window(start.ahead(batch)) for batch in range(8)] == [
        None, None, 1, 1, 1, 1, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "arguments", "field"),
    [
        (Cyclic, {"active": 0}, "active"),
        (Cyclic, {"wait": -1}, "wait"),
        (Cyclic, {"repeat": 1.5}, "repeat"),
        (Cyclic, {"skip_first": True}, "skip_first"),
        (Fixed, {"warmup_steps": -1, "active_steps": 1}, "warmup_steps"),
        (Fixed, {"warmup_steps": 0, "active_steps": 0}, "active_steps"),
    ],
)
def test_refuses(make, arguments, field):
    """An invalid number is refused at construction, with the name of the argument."""
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    assert caught.value.field == field
