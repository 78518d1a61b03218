"""Schedules from strings, and the messages for invalid arguments."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_perf.errors import ConfigError
from lightning_perf.schedule import (
    Always,
    At,
    Cyclic,
    Elapsed,
    Every,
    GlobalRank,
    HasTag,
    LocalRank,
    Never,
    OnSignal,
    OnSlowBatch,
    OnVerdict,
    Schedule,
    Stages,
    as_schedule,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100ba", Every("100ba")),
        ("every 100ba", Every("100ba")),
        ("every 100ba for 3ba", Every("100ba", lasting="3ba")),
        ("  every  1h30m   for 20sec ", Every("5400sec", lasting="20sec")),
        ("0.1dur", Every("0.1dur")),
        ("every epoch", Every("1ep")),
        ("every step for 2ba", Every("1step", lasting="2ba")),
        ("every minute", Every("60sec")),
        ("10steps", Every("10step")),
        ("every 10 batches for 3 Epochs", Every("10ba", lasting="3ep")),
        ("every 10min", Every("600sec")),
        ("every 2 epochs", Every("2ep")),
        ("100 iterations", Every("100ba")),
        ("every 1.5 hours", Every("5400sec")),
        ("2 days", Every("172800sec")),
        ("2 weeks", Every("1209600sec")),
        ("at 100 steps for 30 secs", At("100step", lasting="30sec")),
        ("first 5 samples", At("0sp", lasting="5sp")),
        ("first epoch", At("0ep", lasting="1ep")),
        ("every 12.5%", Every("0.125dur")),
        ("at 50%", At("0.5dur")),
        ("every 4_000tok", Every("4000tok")),
        ("first 5ba", At("0ba", lasting="5ba")),
        ("EVERY 100 BA for 3 Batches", Every("100ba", lasting="3ba")),
        ("At 10 s", At("10sec")),
        ("Every Epoch", Every("1ep")),
        ("every 10 % for 3ba", Every("0.1dur", lasting="3ba")),
        ("every 1.5h", Every("5400sec")),
        ("Always", Always()),
        ("first 2048sp", At("0sp", lasting="2048sp")),
        ("first 10m", At("0sec", lasting="600sec")),
        ("first 0.1dur", At("0dur", lasting="0.1dur")),
        ("first 10%", At("0dur", lasting="0.1dur")),
        ("at 0.5dur", At("0.5dur")),
        ("at 0.5dur for 3ba", At("0.5dur", lasting="3ba")),
        ("at 50 percent", At("0.5dur")),
        ("every minute for second", Every("60sec", lasting="1sec")),
        ("always", Always()),
        ("never", Never()),
        (None, Always()),
    ],
)
def test_reads(text, expected):
    """Each form of string becomes the schedule it describes."""
    assert as_schedule(text) == expected


def test_takes_schedules_and_defaults():
    """A schedule is returned unchanged, and None becomes the default."""
    schedule, default = Every("5ba"), Every("7ba")
    assert as_schedule(schedule) is schedule
    assert as_schedule(None, default=default) is default
    assert as_schedule(schedule, default=default) is schedule


@pytest.mark.parametrize(
    "value",
    ["", "every", "sometimes", "every 0ba", "first 0dur", "at", "every 5ba for", "at 1.5dur",
     "at 100%", "at end", "end", "start", "last 3ba",
     "first 5ba for 3ba", "5ba 3ba", "every 1.5ba", "never 5ba", "evry 10ba",
     "every 5", "every 100ms", "1,000ba", "every 100ba, lasting 3ba", 100, ["100ba"], True, 1.5],
)  # fmt: skip
def test_refuses(value):
    """Anything else is refused with the name of the argument, its value and an example."""
    with pytest.raises(ConfigError, match=r'Try capture_when="every 100ba for 3ba"\.$') as caught:
        as_schedule(value, field="capture_when")
    assert (caught.value.field, caught.value.value) == ("capture_when", value)


@pytest.mark.parametrize(
    "text",
    ["OnSignal", "Every('10ba')", "lightning_perf.Elapsed", "first 5ba & every 10ba",
     "~first 5ba", "every 10ba and first 5ba", "1ep|2ep"],
)  # fmt: skip
def test_classes_and_combinations_are_no_text(text):
    """The message says that these are objects, in YAML with class_path."""
    with pytest.raises(ConfigError, match="are objects: in YAML with class_path"):
        as_schedule(text)


def test_a_long_value_is_cut_in_the_message():
    """A very long string is refused like any other and shortened in the message."""
    with pytest.raises(ConfigError) as caught:
        as_schedule("9" * 5000 + "ba")
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("text", ["1e16ba", "every 1e400sec", "at 9999999999999999tok"])
def test_an_amount_that_would_overflow_is_refused(text):
    """An amount too large for a float is refused at construction."""
    with pytest.raises(ConfigError, match="is too large"):
        as_schedule(text)


WORDS = "every at first for always epoch ba ms % . , _ - 1 0 0.5 1e9 nan inf h m s k dur tok & ( e"
PIECES = st.sampled_from([*WORDS.split(), " ", "  ", "\n"])
TEXTS = st.one_of(st.text(max_size=30), st.lists(PIECES, max_size=8).map("".join))


@settings(deadline=None, max_examples=500)
@given(st.one_of(TEXTS, st.integers(), st.floats(), st.lists(TEXTS, max_size=2), st.booleans()))
def test_any_value_is_a_schedule_or_a_config_error(value):
    """No value raises another error, and the example of each error works."""
    try:
        schedule = as_schedule(value)
    except ConfigError as error:
        schedule = as_schedule(json.loads(error.example or ""))
    assert as_schedule(schedule) is schedule


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (OnSignal, "signal"),
        (GlobalRank, "ranks"),
        (LocalRank, "ranks"),
        (Stages, "stages"),
        (HasTag, "tag"),
        (Elapsed, "duration"),
        (OnSlowBatch, "factor"),
        (lambda value: Every("1ba", stage=value), "stage"),
        (OnVerdict, "codes"),
        (lambda value: Cyclic(per_epoch=value), "per_epoch"),
        (lambda value: Cyclic(active=value), "active"),
    ],
)
@settings(deadline=None)
@given(value=st.one_of(TEXTS, st.integers(), st.floats(), st.none(), st.lists(TEXTS, max_size=2)))
def test_every_argument_is_checked(make, field, value):
    """For any value, construction succeeds or the error names the argument."""
    try:
        made, named = make(value), field
    except ConfigError as error:
        made, named = None, error.field
    assert named == field
    assert made is None or isinstance(made, Schedule)


def test_only_accepted_units_are_listed():
    """A schedule of time takes no batches."""
    with pytest.raises(ConfigError, match=r"is not a valid time \(units: sec, or 1h20m40s\)\."):
        Elapsed("10")


@pytest.mark.parametrize(
    ("make", "written", "meant"),
    [
        (Stages, "val", '"validate"'),
        (Stages, "fit", '"train"'),
        (Stages, ["train", "validation"], '["train", "validate"]'),
        (Stages, "predcit", '"predict"'),
        (GlobalRank, "1", "1"),
        (OnSignal, "SIGINT", '"SIGUSR2"'),
        (Elapsed, "500ms", '"10m"'),
        (lambda value: Every("1ba", stage=value), "val", '"validate"'),
        (lambda value: Cyclic(per_epoch=value), "no", "False"),
        (lambda value: Cyclic(per_epoch=value), "yes", "True"),
        (lambda value: Cyclic(active=value), "6", "6"),
        (lambda value: Cyclic(active=value), 6.0, "6"),
    ],
)
def test_suggests_what_an_argument_probably_meant(make, written, meant):
    """The example of the message is the value that was meant, and works."""
    with pytest.raises(ConfigError) as caught:
        make(written)
    assert caught.value.example == meant
    make(eval(meant))
