"""Every, At, Fixed and Cyclic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from lightning_perf.core.progress import Limits, Moment, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import At, Context, Cyclic, Every, Fixed

START = Moment("train", Timestamp(), Timestamp())


def moments(samples, stage="train", seconds=1.0):
    """Moments before, between and after batches with the given numbers of samples."""
    previous = now = Timestamp()
    for count in samples:
        yield Moment(stage, now, previous)
        previous, now = now, now.to_next_batch(samples=count, duration=seconds)
    yield Moment(stage, now, previous)


def observed(schedule, over):
    """Windows by batch, with `observe` called after every batch."""
    found = {}
    for moment in over:
        schedule.observe(moment)
        found[moment.timestamp.batch] = schedule.window(moment)
    return {batch: window for batch, window in found.items() if window is not None}


def predicted(schedule, batches, start=START):
    """Windows by batch, predicted from the start by `Moment.ahead`."""
    found, moment = {}, start
    for batch in range(batches):
        found[batch] = schedule.window(moment)
        moment = moment.ahead(1)
    return {batch: window for batch, window in found.items() if window is not None}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Every("4ba"), {4: 1, 8: 2, 12: 3}),
        (Every("4ba", lasting="2ba"), {4: 1, 5: 1, 8: 2, 9: 2, 12: 3}),
        (Every("4ba", lasting="4ba"), {n: n // 4 for n in range(4, 13)}),
        (Every("5ba", start="3ba"), {8: 1}),
        (Every("1ba", start="10ba"), {11: 1, 12: 2}),
        (At("0ba"), {0: 1}),
        (At("0ba", lasting="3ba"), {0: 1, 1: 1, 2: 1}),
        (At("7ba", lasting="2ba"), {7: 1, 8: 1}),
    ],
    ids=repr,
)
def test_batches_are_predicted(schedule, expected):
    """Windows in batches depend on the batch index alone and can be predicted."""
    assert predicted(schedule, 13) == expected
    assert observed(schedule, moments([1] * 12)) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Every("2step"), {4: 1, 7: 2, 10: 3}),
        (Every("2step", lasting="1step"), {4: 1, 7: 2, 8: 2, 10: 3, 11: 3}),
        (Every("1ep"), {5: 1, 10: 2}),
        (Every("1ep", start="1ep", lasting="1ep"), {10: 1, 11: 1}),
        (At("1ep", lasting="1ep"), dict.fromkeys(range(5, 10), 1)),
        (Every("0.25dur"), {5: 1, 10: 2}),
        (At("0.3dur"), {6: 1}),
        (At("0.2dur", lasting="0.1dur"), {4: 1, 5: 1}),
    ],
    ids=repr,
)
def test_steps_epochs_and_fractions_are_predicted(schedule, expected):
    """Accumulated steps, epochs of known length and fractions can be predicted."""
    limits = Limits(max_epochs=4, batches_per_epoch=5, batches_per_step=2)
    start = Moment("train", Timestamp(), Timestamp(), limits)
    assert predicted(schedule, 12, start) == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=40),
    st.integers(1, 60),
    st.integers(0, 40),
)
def test_no_interval_is_missed(samples, interval, start):
    """For any batch sizes, each crossing opens one window, identified by its number."""
    schedule = Every(f"{interval}sp", start=f"{start}sp")
    total, expected = 0, {}
    for batch, count in enumerate(samples, start=1):
        before, total = max(total - start, 0) // interval, total + count
        after = max(total - start, 0) // interval
        if after > before:
            expected[batch] = after
    assert observed(schedule, moments(samples)) == expected


@pytest.mark.parametrize(
    "schedule", [At("0dur"), At("0dur", lasting="0.1dur"), At("0.5dur"), Every("0.1dur")]
)
def test_no_window_opens_at_a_fraction_of_a_stage_that_has_none(schedule):
    """Only training has a fraction."""
    assert predicted(schedule, 9, Moment("validate", Timestamp(), Timestamp())) == {}


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(2, 100))
def test_no_fraction_is_missed_or_early(steps, parts):
    """A fraction is reached at the first step at or after it, however the quotients round."""
    schedule, limits = Every(f"{1 / parts}dur"), Limits(max_steps=steps)
    start = Moment("train", Timestamp(), Timestamp(), limits)
    crossed = {n: n * parts // steps for n in range(1, steps + 1)}
    expected = {n: number for n, number in crossed.items() if number > (n - 1) * parts // steps}
    assert predicted(schedule, steps + 1, start) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 30), st.integers(1, 5))
def test_a_window_lasts_from_where_it_opens(samples, interval, lasting):
    """With mixed units, each crossing opens its own window of that many batches."""
    schedule = Every(f"{interval}sp", lasting=f"{lasting}ba")
    openings = observed(Every(f"{interval}sp"), moments(samples))
    expected = {}
    for batch, number in openings.items():
        expected |= dict.fromkeys(range(batch, min(batch + lasting, len(samples) + 1)), number)
    assert observed(schedule, moments(samples)) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (At("10sp", lasting="2ba"), {3: 1, 4: 1}),
        (At("0ba", lasting="10sp"), {0: 1, 1: 1, 2: 1}),
        (At("0sp", lasting="3ba"), {0: 1, 1: 1, 2: 1}),
        (At("0sp", lasting="8sp"), {0: 1, 1: 1}),
        (Every("10sp", lasting="6sp"), {3: 1, 4: 1, 5: 2, 6: 2}),
        (At("2sec", lasting="2sec"), {4: 1, 5: 1, 6: 1, 7: 1}),
        (Every("3ba", lasting="1sec"), {3: 1, 4: 1, 6: 2, 7: 2}),
        (Every("2sec"), {4: 1}),
    ],
    ids=repr,
)
def test_mixed_units(schedule, expected):
    """Start and length may have different units; a batch has 4 samples and takes 0.5 s."""
    assert observed(schedule, moments([4] * 7, seconds=0.5)) == expected


def test_a_second_that_no_batch_ends_in_is_not_missed():
    """If a batch takes longer than the interval, the batch after it is in the window."""
    schedule = Every("10sec", lasting="2sec")
    assert observed(schedule, moments([1] * 3, seconds=25.0)) == {1: 2, 2: 5, 3: 7}


def test_steps_that_advance_by_two_are_not_missed():
    """With two optimizer steps per batch, an odd interval is still crossed."""
    schedule, now, found = Every("3step", lasting="1step"), Timestamp(), []
    for _ in range(6):
        previous, now = now, now.to_next_batch(steps=2)
        found.append(schedule.window(Moment("train", now, previous)))
    assert found == [None, 1, 2, None, 3, 4]


def test_stage_restricts():
    """With ``stage``, batches of other stages are in no window."""
    schedule = Every("2ba", stage="train")
    assert observed(schedule, moments([1] * 4)) == {2: 1, 4: 2}
    assert observed(schedule, moments([1] * 4, stage="validate")) == {}


def test_windows_of_stages_do_not_mix():
    """A training window excludes validation batches and is still open after them."""
    schedule = Every("8sp", lasting="3ba")
    training = list(moments([4] * 5))
    assert observed(schedule, training[:4]) == {2: 1, 3: 1}
    assert observed(schedule, moments([4] * 1, stage="validate")) == {}
    assert observed(schedule, training[4:]) == {4: 2, 5: 2}


def test_resume_opens_nothing_by_itself():
    """Resuming opens no window by itself; a window in batches continues."""
    resumed = Timestamp(batch=9, sample=36)
    moment = Moment("train", resumed, resumed)
    for schedule in (Every("36sp"), At("5ba"), At("20sp", lasting="9ba")):
        schedule.observe(moment)
        assert schedule.window(moment) is None
    assert Every("8ba", lasting="3ba").window(moment) == 1


def test_setup_discards_an_earlier_run():
    """A window that was open at the end of a run is closed in the next."""
    schedule = At("4sp", lasting="9ba")
    assert observed(schedule, moments([4] * 2)) == {1: 1, 2: 1}
    schedule.setup(Context())
    resumed = Timestamp(batch=2, sample=8)
    assert schedule.window(Moment("train", resumed, resumed)) is None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"interval": "0ba"}, "interval"),
        ({"interval": "-5ba"}, "interval"),
        ({"interval": "5"}, "interval"),
        ({"interval": "1.5ba"}, "interval"),
        ({"interval": 5}, "interval"),
        ({"interval": "5ba", "lasting": "0ba"}, "lasting"),
        ({"interval": "5ba", "start": "-1ba"}, "start"),
        ({"interval": "5ba", "start": "1ep"}, "start"),
        ({"interval": "5ba", "stage": "fit"}, "stage"),
        ({"interval": "2dur"}, "interval"),
        ({"interval": "1dur"}, "interval"),
        ({"interval": "0.1dur", "start": "1dur"}, "start"),
        ({"interval": "0.1dur", "start": "0.9dur"}, "start"),
        ({"interval": "0.6dur", "start": "0.5dur"}, "start"),
    ],
)
def test_every_refuses(arguments, field):
    """An invalid argument is refused at construction, with its name."""
    with pytest.raises(ConfigError) as caught:
        Every(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "arguments", [("-1ba", "1ba"), ("5ba", "0ba"), ("5", "1ba"), ("1.5dur",), ("1dur",)]
)
def test_at_refuses(arguments):
    """A time before the start or from the end on, or an empty window, is refused."""
    with pytest.raises(ConfigError):
        At(*arguments)


def test_the_end_of_training_is_a_multiple():
    """A fraction of exactly 1 is reached after the last batch, where metrics are reported."""
    limits = Limits(max_steps=10)
    done = Moment("train", Timestamp(batch=10, step=10), Timestamp(batch=9, step=9), limits)
    assert Every("0.5dur")(done)
    assert Every("0.1dur", start="0.8dur")(done)


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


def test_a_window_is_no_longer_than_its_interval():
    """Windows that overlap would be one that never ends; those that touch are allowed."""
    with pytest.raises(ConfigError, match=r"lasting=.10ba. is longer than the interval, 3ba. Try"):
        Every("3ba", lasting="10ba")
    Every("3ba", lasting="3ba")
    Every("1ep", lasting="10ba")
