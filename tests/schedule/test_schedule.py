"""Properties that all schedules share, and their combinations."""

import copy
import itertools
import pickle

import pytest
from jsonargparse import ArgumentParser

import lightning_perf
from lightning_perf.core.progress import Limits, Moment, Ranks, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import (
    All,
    Always,
    AnyOf,
    At,
    Context,
    Cyclic,
    Elapsed,
    Every,
    Fixed,
    GlobalRank,
    HasTag,
    LocalRank,
    Never,
    Not,
    OnSignal,
    OnSlowBatch,
    OnVerdict,
    Schedule,
    Stages,
    as_schedule,
)

START = Moment("train", Timestamp(), Timestamp())

EVERY_KIND = [
    Always(),
    Never(),
    Every("100ba", lasting="3ba", start="10ba", stage="train"),
    Every("2048sp", lasting="3ba"),
    Fixed(warmup_steps=1, active_steps=2),
    Cyclic(skip_first=1, wait=2, warmup=3, active=4, repeat=5, per_epoch=True),
    At("0.5dur", lasting="3ba"),
    Elapsed("10m"),
    GlobalRank([0, 1]),
    LocalRank(0),
    Stages(["train", "test"]),
    HasTag("profile=1", schedule="first 5ba"),
    OnSignal("SIGUSR1", lasting="30sec"),
    OnSlowBatch(factor=3, lasting="2ba", cooldown="0ba"),
    OnVerdict(["input-bound"], lasting="2ba"),
    Not("every 10ba"),
    All([Every("10ba"), Not(Stages("test"))]),
    AnyOf(["every 10ba", Fixed(1, 1) & "first 3ba"]),
]
every_kind = pytest.mark.parametrize("schedule", EVERY_KIND, ids=lambda s: type(s).__name__)


#: A run in which every schedule works.
CONTEXT = Context(ranks=Ranks(world_size=2), limits=Limits(max_steps=100), clock=lambda: 0.0)


class Spy(Schedule):
    """Records the calls of its methods."""

    def __init__(self, lead=1):
        self._lead = lead
        self.calls = []

    @property
    def lead(self):
        return self._lead

    def window(self, moment):
        return None

    def setup(self, context):
        self.calls.append(context)

    def observe(self, moment):
        self.calls.append(moment)

    def close(self):
        self.calls.append("closed")


def test_every_public_schedule_is_tested():
    """No kind is missing in the list of these tests."""
    public = [getattr(lightning_perf, name) for name in lightning_perf.__all__]
    schedules = {each for each in public if isinstance(each, type) and issubclass(each, Schedule)}
    assert {type(each) for each in EVERY_KIND} == schedules - {Schedule}


@every_kind
def test_is_a_value(schedule):
    """Schedules with the same arguments are equal, have one hash, and differ from all others."""
    again = eval(repr(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert [other == schedule for other in EVERY_KIND].count(True) == 1


@every_kind
def test_pickles_and_copies_in_the_middle_of_a_run(schedule):
    """Pickling and copying work during a run and leave out its state."""
    schedule = copy.deepcopy(schedule)
    schedule.setup(CONTEXT)
    try:
        schedule.observe(START)
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert copy.deepcopy(schedule) == schedule
    finally:
        schedule.close()


@every_kind
def test_window_has_no_side_effects(schedule):
    """`window` returns the same value when called again, also after a call for a later moment."""
    schedule = copy.deepcopy(schedule)
    schedule.setup(CONTEXT)
    try:
        for moment in (START.ahead(n) for n in range(15)):
            schedule.observe(moment)
            first = schedule.window(moment)
            schedule.window(moment.ahead(3))
            assert schedule.window(moment) == first
            assert schedule(moment) == (first is not None)
    finally:
        schedule.close()


@every_kind
def test_can_be_written_in_yaml(schedule):
    """A schedule is constructed from class_path and init_args, also when nested."""

    def written(value):
        if isinstance(value, Schedule):
            arguments = {name: written(each) for name, each in value._arguments().items()}
            return {"class_path": f"lightning_perf.schedule.{type(value).__name__}"} | (
                {"init_args": arguments} if arguments else {}
            )
        return [written(item) for item in value] if isinstance(value, list) else value

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--schedule", type=Schedule | str | None)
    config = parser.parse_object({"schedule": written(schedule)})
    # The name until jsonargparse 4.48, and since.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert instantiate(config).schedule == schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Every("2ba") & Every("3ba"), {6: (3, 2)}),
        (Every("2ba") | Every("3ba"), {2: (1, None), 3: (None, 1), 4: (2, None), 6: (3, 2)}),
        (~Every("2ba") & "first 4ba", {0: (0, 1), 1: (0, 1), 3: (0, 1)}),
        (~Always(), {}),
        (Always() & Never(), {}),
        (Always() | Never(), dict.fromkeys(range(8), (0, None))),
        (~~(Every("2ba") & Every("3ba")), {6: 0}),
    ],
)
def test_algebra(schedule, expected):
    """`&`, `|` and `~` combine the windows of their parts."""
    windows = {n: schedule.window(START.ahead(n)) for n in range(8)}
    assert {n: window for n, window in windows.items() if window is not None} == expected


def test_a_string_combines_on_either_side():
    """The left or the right operand may be a string."""
    assert "every 10ba" & GlobalRank([0]) == All(["every 10ba", GlobalRank([0])])
    assert "every 10ba" | GlobalRank([0]) == AnyOf(["every 10ba", GlobalRank([0])])


@every_kind
def test_a_schedule_has_no_truth_value(schedule):
    """``and``, ``or`` and ``not`` would silently drop an operand, so they raise."""
    with pytest.raises(TypeError, match=r"& \| ~ instead of and, or, not"):
        _ = schedule and Always()


@pytest.mark.parametrize("make", [All, AnyOf], ids=["All", "AnyOf"])
def test_a_composition_forwards_to_its_parts(make):
    """Parts receive every call of the composition, which has the longest of their leads."""
    near, far = Spy(), Spy(lead=3)
    schedule = make([near, ~far])
    schedule.setup(CONTEXT)
    schedule.observe(START)
    schedule.close()
    assert near.calls == far.calls == [CONTEXT, START, "closed"]
    assert schedule.lead == 3


@pytest.mark.parametrize(
    ("schedule", "shared"),
    [
        (Always(), True),
        (Never(), True),
        (Every("10ba", lasting="3step"), True),
        (Every("1ep"), True),
        (At("0.5dur"), True),
        (Fixed(1, 2), True),
        (Cyclic(), True),
        (Stages("train"), True),
        (Every("10sp"), False),
        (Every("10ba", lasting="10tok"), False),
        (Every("10sec"), False),
        (Elapsed(), False),
        (GlobalRank(0), False),
        (LocalRank(0), False),
        (HasTag("a"), False),
        (OnSignal(), False),
        (OnSlowBatch(), False),
        (Every("10ba") & ~Stages("test"), True),
        (Every("10ba") | GlobalRank(0), False),
    ],
    ids=repr,
)
def test_a_schedule_is_shared_if_all_ranks_agree(schedule, shared):
    """Only schedules without rank, clock or data are shared; compositions if all parts are."""
    schedule.setup(Context(limits=Limits(max_steps=9)))
    assert schedule.shared is shared
    schedule.close()


def test_a_fraction_of_a_time_limit_is_not_shared():
    """With max_time, the fraction depends on the clock of each rank."""
    schedule = Always() & Every("0.1dur")
    schedule.setup(Context(limits=Limits(max_seconds=60.0)))
    assert not schedule.shared


@pytest.mark.parametrize(
    "schedule", [Every("0.1dur"), At("0.5dur"), Every("9ba", lasting="0.1dur"), ~At("0.5dur")]
)
def test_a_fraction_needs_a_limit(schedule):
    """A fraction of a training of unknown length is refused by `setup`."""
    schedule.setup(Context(limits=Limits(max_epochs=1)))
    with pytest.raises(ConfigError, match="max_time"):
        schedule.setup(Context())


@pytest.mark.parametrize("schedules", [[], "100ba", [100], None])
def test_compositions_refuse(schedules):
    """A composition refuses anything but a non-empty list of schedules."""
    for make in (All, AnyOf):
        with pytest.raises(ConfigError, match="schedules"):
            make(schedules)


def test_the_default_lead_is_one_batch():
    """A schedule without a warm-up of its own has a lead of one batch."""
    assert Every("10ba").lead == 1
    assert as_schedule(None).lead == 1


@pytest.mark.parametrize(
    "schedule",
    [
        Never(),
        Always(),
        Every("7ba"),
        Every("7ba", lasting="2ba", start="3ba"),
        Every("5sp"),
        Every("7ba", stage="validate"),
        At("11ba", lasting="3ba"),
        At("0ba"),
        Fixed(4, 3),
        Cyclic(skip_first=2, wait=1, warmup=2, active=2, repeat=3),
        Cyclic(wait=0, warmup=0, active=1, repeat=2),
        Cyclic(wait=3, repeat=0),
        Cyclic(wait=3, repeat=0, per_epoch=True),
        Cyclic(wait=3, warmup=9, active=2, repeat=1, per_epoch=True),
        Cyclic(warmup=30, per_epoch=True),
        GlobalRank([1]),
        Every("7ba") & GlobalRank([1]),
        Every("7ba") & Stages("train") & Every("2ba"),
        Every("7ba") | Every("11ba"),
        ~Every("7ba"),
    ],
    ids=str,
)
@pytest.mark.parametrize("limits", [Limits(), Limits(batches_per_epoch=20)], ids=["", "epochs"])
def test_no_window_opens_before_quiet_until(schedule, limits):
    """A caller that skips all batches before `quiet_until` misses no window."""
    stamps = [Timestamp(batch=n, batch_in_epoch=n % 20, sample=2 * n, step=n) for n in range(80)]
    for before, now in itertools.pairwise(stamps):
        moment = Moment("train", now, before, limits)
        if schedule.window(moment) is None:
            until = schedule.quiet_until(moment)
            assert until > now.batch
            for batch in range(now.batch + 1, min(until, len(stamps))):
                assert not schedule(Moment("train", stamps[batch], stamps[batch - 1]))
