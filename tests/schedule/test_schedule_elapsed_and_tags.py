"""Elapsed and HasTag, with a fake clock and fake tags."""

import pytest

from lightning_perf.core.progress import Moment, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import Context, Elapsed, Every, HasTag

START = Moment("train", Timestamp(), Timestamp())


def observe(schedule, batch):
    moment = START.ahead(batch)
    schedule.observe(moment)
    return schedule.window(moment)


def test_elapsed_is_true_at_first_and_after_each_duration():
    """The time counts from the last window, not from multiples of the duration."""
    clock = iter([100.0, 101.0, 159.0, 165.0, 221.0, 225.0])
    schedule = Elapsed("1m")
    schedule.setup(Context(clock=lambda: next(clock)))
    found = [observe(schedule, batch) for batch in range(6)]
    assert found == [1, None, None, 2, None, 3]


def test_elapsed_is_true_for_one_batch():
    """A window is a single batch."""
    schedule = Elapsed("1m")
    schedule.setup(Context(clock=lambda: 0.0))
    assert observe(schedule, 0) == 1
    assert not schedule(START.ahead(1))


def test_elapsed_restarts_at_setup():
    """In a second run it is true for the first batch again."""
    schedule = Elapsed("1h")
    for _ in range(2):
        schedule.setup(Context(clock=lambda: 7.0))
        assert observe(schedule, 0) is not None
        assert observe(schedule, 1) is None


@pytest.mark.parametrize("duration", ["0sec", "10ba", "10", None])
def test_elapsed_refuses(duration):
    """Any value but a positive wall-clock time is refused."""
    with pytest.raises(ConfigError, match="duration"):
        Elapsed(duration)


@pytest.mark.parametrize(
    ("tag", "tags", "matches"),
    [
        ("profile", {"profile": "anything"}, True),
        ("profile", {"profile": ""}, True),
        ("profile", {"other": "1"}, False),
        ("profile=1", {"profile": "1"}, True),
        ("profile=1", {"profile": "0"}, False),
        ("profile=", {"profile": ""}, True),
        ("profile=", {"profile": "1"}, False),
        ("url=a=b", {"url": "a=b"}, True),
    ],
)
def test_tag_is_a_key_or_a_key_with_its_value(tag, tags, matches):
    """A key alone matches any value; key=value matches that value."""
    schedule = HasTag(tag)
    schedule.setup(Context(read_tags=lambda: tags))
    assert (observe(schedule, 0) is not None) is matches


def test_tag_comes_and_goes_during_a_run():
    """HasTag is true where the tag is set and the inner schedule is true."""
    tags = {}
    schedule = HasTag("profile", schedule="every 2ba")
    schedule.setup(Context(read_tags=lambda: tags))
    assert observe(schedule, 2) is None
    tags["profile"] = "1"
    assert observe(schedule, 3) is None
    assert observe(schedule, 4) == Every("2ba").window(START.ahead(4))
    tags.clear()
    assert observe(schedule, 6) is None


def test_has_tag_without_a_reader_is_never_true():
    """Tags of an earlier run are discarded by `setup`."""
    schedule = HasTag("profile")
    schedule.setup(Context(read_tags=lambda: {"profile": "1"}))
    assert observe(schedule, 0) is not None
    schedule.setup(Context())
    assert not schedule(START)
    assert observe(schedule, 0) is None


@pytest.mark.parametrize("tag", ["", "=1"])
def test_tag_needs_a_key(tag):
    """A tag without a key is refused."""
    with pytest.raises(ConfigError, match="tag"):
        HasTag(tag)


def test_has_tag_refuses_an_invalid_schedule():
    """The inner schedule is parsed and checked like any other."""
    with pytest.raises(ConfigError, match="every 100ba"):
        HasTag("profile", schedule="sometimes")


def test_has_tag_is_quiet_while_its_schedule_is():
    """`quiet_until` is that of the inner schedule while it has no window, tag or not."""
    schedule = HasTag("profile", schedule="100ba")
    moments = [Moment("train", Timestamp(batch=n), Timestamp(batch=n - 1)) for n in (5, 100)]
    assert [schedule.quiet_until(moment) for moment in moments] == [100, 101]
