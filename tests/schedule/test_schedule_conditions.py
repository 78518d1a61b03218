"""Schedules by rank, stage, time and tag."""

import numpy as np
import pytest

from lightning_perf.core.progress import STAGES, Moment, Ranks, Timestamp
from lightning_perf.errors import ConfigError, PerfWarning
from lightning_perf.schedule import (
    Context,
    Cyclic,
    Elapsed,
    Every,
    Fixed,
    GlobalRank,
    HasTag,
    LocalRank,
    OnSlowBatch,
    Stages,
)


def at(stage="train", **ranks):
    return Moment(stage, Timestamp(), Timestamp(), ranks=Ranks(**ranks))


def test_global_and_local_ranks_differ():
    """Global rank 5 may be local rank 1."""
    moment = at(global_rank=5, local_rank=1)
    assert GlobalRank(5)(moment)
    assert GlobalRank([0, 5])(moment)
    assert not GlobalRank(1)(moment)
    assert LocalRank(1)(moment)
    assert not LocalRank([0, 5])(moment)


@pytest.mark.parametrize("chosen", ["train", ["validate", "test"], ["predict"]])
def test_stages(chosen):
    """Only the given stages match, each with a window of its own."""
    schedule = Stages(chosen)
    found = [stage for stage in STAGES if schedule(at(stage))]
    assert found == ([chosen] if isinstance(chosen, str) else chosen)
    assert len({schedule.window(at(stage)) for stage in found}) == len(found)


def test_ranks_beyond_the_run_give_a_warning_at_setup():
    """A job that is started again with fewer processes continues; rank 0 warns."""
    context = Context(ranks=Ranks(world_size=4, local_world_size=2))
    GlobalRank(3).setup(context)
    LocalRank(1).setup(context)
    with pytest.warns(PerfWarning, match="of processes in the run is 4"):
        (~GlobalRank([0, 4])).setup(context)
    with pytest.warns(PerfWarning, match="of processes on this node is 2"):
        LocalRank(2).setup(context)
    GlobalRank(4).setup(Context(ranks=Ranks(global_rank=1, world_size=4)))


@pytest.mark.parametrize("ranks", [[0, 2, 4], (0, 2, 4), range(0, 5, 2), {0, 2, 4}])
def test_ranks_may_be_any_collection(ranks):
    """They are kept as a list."""
    assert GlobalRank(ranks).ranks == [0, 2, 4]


def test_numbers_may_be_those_of_numpy():
    """They become Python's, which JSON and YAML have; bools are none."""
    assert repr(GlobalRank([0, np.int64(1)]).ranks) == "[0, 1]"
    cyclic = Cyclic(wait=np.int32(3), warmup=np.int64(2))
    assert (repr(cyclic.wait), repr(cyclic.lead)) == ("3", "2")
    assert OnSlowBatch(np.float32(2.5)).factor == 2.5
    with pytest.raises(ConfigError, match="whole number"):
        Cyclic(wait=np.True_)


def test_a_number_beyond_any_training_is_refused():
    """The message names the argument, not what is computed from it."""
    with pytest.raises(ConfigError, match=r"^warmup_steps=.* is too large.*Try warmup_steps=10\.$"):
        Fixed(10**30, 3)


@pytest.mark.parametrize("ranks", [[], -1, [0, -1], "0", 1.0, True, None])
def test_ranks_refuse(ranks):
    """Anything but one or more whole numbers from 0 is refused."""
    for make in (GlobalRank, LocalRank):
        with pytest.raises(ConfigError, match="ranks"):
            make(ranks)


@pytest.mark.parametrize("stages", [[], "fit", ["train", "validation"], None])
def test_stages_refuse(stages):
    """Anything but Lightning's names of stages is refused."""
    with pytest.raises(ConfigError, match="stages"):
        Stages(stages)


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
