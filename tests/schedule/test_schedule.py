"""What all schedules have in common, and how they combine."""

import copy
import itertools
import pickle

import pytest
from jsonargparse import ArgumentParser

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
    All([Every("10ba"), Not(Stages("test"))]),
    AnyOf(["every 10ba", Fixed(1, 1) & "first 3ba"]),
]
every_kind = pytest.mark.parametrize("schedule", EVERY_KIND, ids=lambda s: type(s).__name__)


class Recorded(Schedule):
    """Notes what it is told."""

    def __init__(self, lead=1):
        self._lead = lead
        self.told = []

    @property
    def lead(self):
        return self._lead

    def window(self, moment):
        return None

    def setup(self, context):
        self.told.append(context)

    def observe(self, moment):
        self.told.append(moment)

    def close(self):
        self.told.append("closed")

    def validate(self, limits):
        self.told.append(limits)


@every_kind
def test_is_a_value(schedule):
    """A schedule equals one of the same arguments, as it prints and hashes, and no other."""
    again = eval(repr(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert [other == schedule for other in EVERY_KIND].count(True) == 1


@every_kind
def test_pickles_and_copies_in_the_middle_of_a_run(schedule):
    """What a run leaves in a schedule, handlers too, neither hinders a pickle nor is in it."""
    schedule = copy.deepcopy(schedule)
    schedule.setup(Context(ranks=Ranks(world_size=2), clock=lambda: 0.0))
    try:
        schedule.observe(START)
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert copy.deepcopy(schedule) == schedule
    finally:
        schedule.close()


@every_kind
def test_asking_changes_nothing(schedule):
    """The same question has the same answer, and a yes is a window."""
    schedule = copy.deepcopy(schedule)
    schedule.setup(Context(ranks=Ranks(world_size=2), clock=lambda: 0.0))
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
def test_is_written_in_yaml(schedule):
    """A schedule is made from class_path and init_args, nested ones too."""

    def written(value):
        if isinstance(value, Schedule):
            arguments = {k: written(v) for k, v in vars(value).items() if not k.startswith("_")}
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
    """And, or and not hold where they should, in windows made of their parts' windows."""
    windows = {n: schedule.window(START.ahead(n)) for n in range(8)}
    assert {n: window for n, window in windows.items() if window is not None} == expected


def test_a_string_may_stand_on_either_side():
    """Strings combine with schedules from the left as from the right."""
    assert "every 10ba" & GlobalRank([0]) == All(["every 10ba", GlobalRank([0])])
    assert "every 10ba" | GlobalRank([0]) == AnyOf(["every 10ba", GlobalRank([0])])


@every_kind
def test_no_schedule_is_true_or_false(schedule):
    """``and``, ``or`` and ``not`` would drop a schedule without a word, so they are refused."""
    with pytest.raises(TypeError, match=r"& \| ~ instead of and, or, not"):
        _ = schedule and Always()


@pytest.mark.parametrize("make", [All, AnyOf], ids=["All", "AnyOf"])
def test_compositions_tell_their_parts(make):
    """What a composition is told, its parts are told too, and it looks as far ahead as they."""
    near, far = Recorded(), Recorded(lead=3)
    schedule = make([near, ~far])
    context, limits = Context(), Limits()
    schedule.validate(limits)
    schedule.setup(context)
    schedule.observe(START)
    schedule.close()
    assert near.told == far.told == [limits, context, START, "closed"]
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
def test_shared_tells_what_may_stand_before_a_collective(schedule, shared):
    """Only what every rank judges alike is shared, and a composition only if all its parts are."""
    assert schedule.shared is shared


def test_a_fraction_of_a_time_limit_is_not_shared():
    """With max_time, each rank's own clock tells the fraction done."""
    schedule = Always() & Every("0.1dur")
    schedule.setup(Context(limits=Limits(max_seconds=60.0)))
    assert not schedule.shared


@pytest.mark.parametrize(
    "schedule", [Every("0.1dur"), At("0.5dur"), Every("9ba", lasting="0.1dur"), ~At("0.5dur")]
)
def test_a_fraction_needs_a_limit(schedule):
    """A fraction of training of unknown length is refused before training."""
    schedule.validate(Limits(max_epochs=1))
    with pytest.raises(ConfigError, match="max_time"):
        schedule.validate(Limits())


@pytest.mark.parametrize("schedules", [[], "100ba", [100], None])
def test_compositions_refuse(schedules):
    """A composition takes a list of schedules with something in it."""
    for make in (All, AnyOf):
        with pytest.raises(ConfigError, match="schedules"):
            make(schedules)


def test_the_usual_lead_is_one_batch():
    """Without a warm-up of its own, a schedule is looked at one batch ahead."""
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
def test_no_window_opens_while_it_is_said_to_be_quiet(schedule, limits):
    """A caller that sleeps as long as it may misses no window."""
    stamps = [Timestamp(batch=n, batch_in_epoch=n % 20, sample=2 * n, step=n) for n in range(80)]
    for before, now in itertools.pairwise(stamps):
        moment = Moment("train", now, before, limits)
        if schedule.window(moment) is None:
            until = schedule.quiet_until(moment)
            assert until > now.batch
            for batch in range(now.batch + 1, min(until, len(stamps))):
                assert not schedule(Moment("train", stamps[batch], stamps[batch - 1]))
