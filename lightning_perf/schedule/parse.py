"""Schedules from strings."""

from __future__ import annotations

import re

from lightning_perf.checks import COUNTED_UNITS, ONE, UNITS, nearest_schedule, percent_as_dur, times
from lightning_perf.errors import ConfigError, shown
from lightning_perf.schedule.base import Schedule
from lightning_perf.schedule.intervals import Always, At, Every, Never

_TEXT = re.compile(r"(?:(every|at)\s+)?(\S+)(?:\s+for\s+(\S+))?|first\s+(\S+)")
_FORMS = "TIME, every TIME for TIME, at TIME for TIME, first TIME, always, never"
_EXAMPLE = '"every 100ba for 3ba"'
_OPERATOR = re.compile(r"[&|~]|\b(?:and|or|not)\b")
_COMBINED = 'Every("10ba") & "first 5ba"'


def as_schedule(
    value: Schedule | str | None, field: str = "schedule", default: Schedule | None = None
) -> Schedule:
    """Convert an argument to a schedule.

    Args:
        value: A schedule; a string such as ``"100ba"``, ``"every 100ba for 3ba"``,
            ``"every epoch"``, ``"first 5ba"``, ``"at 0.5dur"``, ``"at 50%"``, ``"always"`` or
            ``"never"``; or None for the default.
        field: Name of the argument, for the message.
        default: The schedule for None; `Always` if not given.

    Raises:
        ConfigError: If the value is not a valid schedule.

    Example:
        >>> as_schedule("every 100ba for 3ba")
        Every(interval='100ba', lasting='3ba', start='0ba', stage=None)
        >>> as_schedule("first 5ba")
        At(time='0ba', lasting='5ba')
    """
    if isinstance(value, Schedule):
        return value
    if value is None:
        return Always() if default is None else default
    if not isinstance(value, str):
        problem = f"is not a valid schedule, expected a string or a Schedule (units: {UNITS})"
        raise ConfigError(field, value, problem, _example(str(value)))
    if _OPERATOR.search(value):
        problem = "is not a valid schedule: operators combine Schedule objects, not text"
        raise ConfigError(field, value, problem, _COMBINED)
    try:
        return _parse(value.strip())
    except ConfigError as error:
        reason = error.problem
        if error.field != "text":  # a part of it
            reason = f"{shown(error.value)} {reason}"
        problem = f"is not a valid schedule: {reason}"
        raise ConfigError(field, value, problem, _example(value)) from None


def _parse(text: str) -> Schedule:
    if text in ("always", "never"):
        return Always() if text == "always" else Never()
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError("text", text, f"expected one of {_FORMS} (units: {UNITS})", _EXAMPLE)
    word, time, lasting, first = (part and percent_as_dur(part) for part in match.groups())
    if word == "every":
        time = ONE.get(time, time)
    if first is not None:
        length = times("lasting", first, "5ba", units=COUNTED_UNITS)
        return At(time=f"0{length.unit}", lasting=length)
    kind = At if word == "at" else Every
    return kind(time, lasting=lasting or "1ba")


def _example(text: str) -> str:
    near = nearest_schedule(text)
    try:
        _parse(near)
    except ConfigError:
        return _EXAMPLE
    return f'"{near}"'
