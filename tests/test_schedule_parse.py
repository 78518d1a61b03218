"""Schedules written as text."""

import pytest

from lightning_perf.errors import ConfigError
from lightning_perf.schedule import Always, At, Every, Never, as_schedule


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100ba", Every("100ba")),
        ("every 100ba", Every("100ba")),
        ("every 100ba for 3ba", Every("100ba", lasting="3ba")),
        ("  every  1h30m   for 20sec ", Every("5400sec", lasting="20sec")),
        ("0.1dur", Every("0.1dur")),
        ("first 5ba", At("0ba", lasting="5ba")),
        ("first 2048sp", At("0sp", lasting="2048sp")),
        ("first 10m", At("0sec", lasting="600sec")),
        ("at 0.5dur", At("0.5dur")),
        ("at 0.5dur for 3ba", At("0.5dur", lasting="3ba")),
        ("always", Always()),
        ("never", Never()),
        (None, Always()),
    ],
)
def test_reads(text, expected):
    """Each form of text is the schedule it says."""
    assert as_schedule(text) == expected


def test_takes_schedules_and_defaults():
    """A schedule stays itself, and None is the default."""
    schedule, default = Every("5ba"), Every("7ba")
    assert as_schedule(schedule) is schedule
    assert as_schedule(None, default=default) is default
    assert as_schedule(schedule, default=default) is schedule


@pytest.mark.parametrize(
    "value",
    ["", "every", "sometimes", "every 0ba", "first 0.5dur", "at", "every 5ba for", "at 1.5dur",
     "first 5ba for 3ba", "5ba 3ba", "every 1.5ba", "never 5ba", ["100ba"], True, 1.5],
)  # fmt: skip
def test_refuses(value):
    """Everything else is refused by the name of the argument, with its value and an example."""
    with pytest.raises(ConfigError, match=r'Try capture_when="every 100ba for 3ba"\.$') as caught:
        as_schedule(value, field="capture_when")
    assert (caught.value.field, caught.value.value) == ("capture_when", value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("evry 10ba", "every 10ba"),
        ("Every 10ba", "every 10ba"),
        ("10steps", "10step"),
        ("every 10 batches", "every 10ba"),
        ("every 10 batches for 3 Epochs", "every 10ba for 3ep"),
        ("frist 5 samples", "first 5sp"),
        ("at 0.5", "at 0.5dur"),
        ("every 10 minuts", "every 10m"),
        ("alway", "always"),
        ("every 5", "every 5ba"),
        ("100", "100ba"),
        (100, "100ba"),
    ],
)
def test_suggests_what_was_probably_meant(written, meant):
    """A misspelling is refused with the nearest right spelling, which works."""
    with pytest.raises(ConfigError, match="ep ba step sp tok sec dur, or 1h20m40s") as caught:
        as_schedule(written)
    assert caught.value.example == f'"{meant}"'
    as_schedule(meant)
    assert str(caught.value).endswith(f'. Try schedule="{meant}".')


@pytest.mark.parametrize(
    "text", ["first 5ba & every 10ba", "~first 5ba", "every 10ba and first 5ba", "1ep|2ep"]
)
def test_strings_do_not_combine(text):
    """An operator within a string is refused with code that combines."""
    with pytest.raises(ConfigError, match="one side has to be a schedule") as caught:
        as_schedule(text)
    shown = eval(caught.value.example or "", {"Every": Every})
    assert shown == Every("10ba") & "first 5ba"
