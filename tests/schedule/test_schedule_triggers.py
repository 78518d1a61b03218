"""Triggers: which windows an event opens, when, and for how long."""

from dataclasses import replace

import pytest

from lightning_perf.core.progress import Moment, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import (
    At,
    Context,
    Elapsed,
    Never,
    OnSlowBatch,
    OnVerdict,
    Stages,
    Trigger,
)

START = Moment("train", Timestamp(), Timestamp())


class OnBatches(Trigger):
    """Fires at the given batches."""

    def __init__(self, batches, lasting="2ba"):
        super().__init__(lasting)
        self.batches = batches

    def fired(self, moment):
        return moment.timestamp.batch in self.batches


def windows(schedule, seconds, stage="train", first=0):
    """Windows by batch, for batches with the given durations in seconds."""
    found = {}
    for batch, duration in enumerate(seconds, start=first):
        moment = replace(START.ahead(batch), stage=stage, batch_seconds=duration)
        schedule.observe(moment)
        found[batch] = schedule.window(moment)
    return {batch: window for batch, window in found.items() if window is not None}


def test_a_trigger_opens_one_batch_later_and_is_predicted():
    """After firing before batch 3, the window is batches 4 and 5, predicted from batch 3."""
    schedule = OnBatches([3])
    assert windows(schedule, [1.0] * 4) == {}
    assert [schedule.window(START.ahead(batch)) for batch in range(3, 7)] == [None, 1, 1, 1]
    assert windows(schedule, [1.0] * 4, first=4) == {4: 1, 5: 1}


def test_a_trigger_cannot_fire_while_its_window_is_open():
    """An event during a window neither extends it nor opens another."""
    assert windows(OnBatches([1, 2, 3, 5]), [1.0] * 10) == {2: 1, 3: 1, 6: 2, 7: 2}


def test_a_window_ends_by_any_count():
    """A window in samples closes after that many samples."""
    schedule, now, found = OnBatches([1], lasting="10sp"), Timestamp(), []
    for _ in range(7):
        moment = Moment("train", now, now)
        schedule.observe(moment)
        found.append(schedule.window(moment))
        now = now.to_next_batch(samples=4)
    assert found == [None, None, 1, 1, 1, None, None]


def test_a_window_is_of_the_next_batches_of_any_stage():
    """One that opens at the end of training continues in validation, and the other way round."""
    schedule = OnBatches([3], lasting="4ba")
    assert windows(schedule, [1.0] * 4) == {}
    assert windows(schedule, [1.0] * 3, stage="validate") == {1: 1, 2: 1}
    assert windows(schedule, [1.0] * 5, first=3) == {3: 1, 4: 1, 5: 1}
    schedule = OnBatches([9], lasting="2ba")
    assert windows(schedule, [1.0] * 4) == {}
    assert windows(schedule, [1.0] * 3, stage="validate", first=7) == {}
    assert windows(schedule, [1.0] * 5, first=3) == {4: 1, 5: 1}


def test_epochs_of_a_window_are_those_of_training():
    """Validation inside of an epoch does not end a window of one epoch."""
    schedule = OnBatches([2], lasting="1ep")
    assert windows(schedule, [1.0] * 4) == {3: 1}
    for epoch in range(3):
        now = Timestamp(epoch=epoch, batch=epoch)
        moment = Moment("validate", now, now)
        schedule.observe(moment)
        assert schedule.window(moment) == 1
    later = Moment("train", Timestamp(epoch=1, batch=5), Timestamp(epoch=0, batch=4))
    schedule.observe(later)
    assert schedule.window(later) is None


@pytest.mark.parametrize(
    "make", [lambda event: event & Stages("train"), lambda event: (event | Never()) & "first 99ba"]
)
def test_an_event_waits_for_the_other_schedule(make):
    """Where the other part excludes validation, an event in it opens the window after it."""
    schedule = make(OnBatches([7, 99], lasting="2ba")) & Stages("train")
    assert windows(schedule, [1.0] * 4) == {}
    assert windows(schedule, [1.0] * 3, stage="validate", first=99) == {}
    assert list(windows(schedule, [1.0] * 6, first=4)) == [8, 9]


def test_elapsed_keeps_its_time_for_the_stage_that_is_selected():
    """Time that passes in validation gives a window to the next batch of training."""
    now = [0.0]
    schedule = Elapsed("1s") & Stages("train")
    schedule.setup(Context(clock=lambda: now[0]))
    found = []
    for epoch in range(3):
        found += windows(schedule, [0.1] * 2, first=2 * epoch)
        now[0] += 1.0
        assert windows(schedule, [0.1] * 2, stage="validate", first=2 * epoch) == {}
    assert found == [0, 2, 4]


@pytest.mark.parametrize("length", ["1ba", "1ep", "1step"])
def test_an_event_waits_for_a_window_of_any_length(length):
    """Also if the end of the other schedule's window cannot be predicted."""
    assert list(windows(Elapsed("1h") & At("3ba", lasting=length), [1.0] * 6)) == [3]


def test_a_verdict_records_training():
    """A verdict that is reached during validation inside of fit records batches of training."""
    reached = []
    schedule = OnVerdict("critical", lasting="2ba")
    schedule.setup(Context(reached=reached))
    assert windows(schedule, [1.0] * 3) == {}
    reached.append("critical")
    assert windows(schedule, [1.0] * 3, stage="validate") == {}
    assert list(windows(schedule, [1.0], first=3)) == []
    assert windows(schedule, [1.0] * 3, stage="validate", first=3) == {}
    assert list(windows(schedule, [1.0] * 4, first=4)) == [4, 5]


def test_a_batch_is_compared_once():
    """Where a stage begins or an epoch has ended early, the last batch is not compared again."""
    schedule = OnSlowBatch(lasting="3ba", cooldown="0ba")
    seconds = [1.0] * 20 + [9.0]
    windows(schedule, seconds)
    assert windows(schedule, [9.0], first=20) == {}
    assert list(windows(schedule, [1.0] * 6, first=21)) == [21, 22, 23]


def test_a_trigger_discards_an_earlier_run():
    """A pending window of an earlier run does not block the next run."""
    schedule = OnBatches([1, 3])
    windows(schedule, [1.0], first=3)
    schedule.setup(Context())
    assert list(windows(schedule, [1.0] * 6)) == [2, 3]


def test_setup_discards_the_median_and_the_cooldown():
    """Neither the median nor the cooldown of an earlier run affects the next."""
    schedule = OnSlowBatch()
    for pace in (1.0, 5.0):
        schedule.setup(Context())
        assert windows(schedule, [pace] * 20 + [9 * pace]) == {}
        assert schedule(START.ahead(21))


def test_a_slow_batch_opens_a_window():
    """A batch above twice the median of 20 batches opens a window after it."""
    seconds = [1.0] * 20 + [2.1] + [1.0] * 10
    assert list(windows(OnSlowBatch(), seconds)) == [21, 22, 23]


@pytest.mark.parametrize(
    "seconds", [[1.0] * 20 + [2.0] + [1.0] * 5, [1.0] * 19 + [9.0] + [1.0] * 5, [1.0, 1.9] * 30]
)
def test_a_normal_batch_opens_no_window(seconds):
    """Exactly the factor, a batch before the 20th, and noise below the factor do not fire."""
    assert windows(OnSlowBatch(), seconds) == {}


def test_cooldown_begins_when_the_window_ends():
    """Slow batches inside the window and the cooldown are ignored."""
    schedule = OnSlowBatch(lasting="3ba", cooldown="10ba")
    seconds = [1.0] * 20 + [9.0] + [1.0] * 29
    for batch in (22, 24, 33):
        seconds[batch] = 9.0
    assert list(windows(schedule, seconds)) == [21, 22, 23]
    seconds[34] = 9.0
    schedule.setup(Context())
    assert list(windows(schedule, seconds)) == [21, 22, 23, 35, 36, 37]


def test_batches_inside_a_window_are_ignored():
    """Batches slowed by profiling neither extend the window nor enter the median."""
    schedule = OnSlowBatch(lasting="3ba", cooldown="0ba")
    seconds = [1.0] * 20 + [9.0] + [1.0] + [9.0] * 3 + [1.0] * 10
    assert list(windows(schedule, seconds)) == [21, 22, 23]


def test_the_median_covers_the_last_hundred_batches():
    """After a lasting change of speed, the median is that of the new speed."""
    schedule = OnSlowBatch()
    windows(schedule, [5.0] * 200)
    windows(schedule, [1.0] * 100, first=200)
    assert list(windows(schedule, [3.0, 1.0, 1.0, 1.0, 1.0], first=300)) == [301, 302, 303]


def test_each_stage_has_its_own_median():
    """Validation batches are not compared with training batches."""
    schedule = OnSlowBatch()
    windows(schedule, [1.0] * 30)
    assert windows(schedule, [9.0] * 30, stage="validate") == {}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"factor": 1.0}, "factor"),
        ({"factor": "2"}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"lasting": "0ba"}, "lasting"),
        ({"lasting": "0.1dur"}, "lasting"),
        ({"cooldown": "-1ba"}, "cooldown"),
        ({"cooldown": "0.1dur"}, "cooldown"),
    ],
)
def test_refuses(arguments, field):
    """An invalid argument is refused at construction, with its name."""
    with pytest.raises(ConfigError) as caught:
        OnSlowBatch(**arguments)
    assert caught.value.field == field
