"""Schedules written as text."""

from __future__ import annotations

import re

from lightning_perf.errors import ConfigError
from lightning_perf.schedule.base import Schedule
from lightning_perf.schedule.checks import COUNTED_UNITS, times
from lightning_perf.schedule.intervals import Always, At, Every, Never

_TEXT = re.compile(r"(?:(every|at)\s+)?(\S+)(?:\s+for\s+(\S+))?|first\s+(\S+)")
_EXAMPLE = '"every 100ba for 3ba"'


def as_schedule(
    value: Schedule | str | None, field: str = "schedule", default: Schedule | None = None
) -> Schedule:
    """Make a schedule of whatever an argument takes for one.

    Args:
        value: A schedule; text such as ``"100ba"``, ``"every 100ba for 3ba"``, ``"first 5ba"``,
            ``"at 0.5dur"``, ``"always"``, ``"never"``; or None for the default.
        field: The argument, for the message.
        default: The schedule for None; `Always` if None itself.

    Raises:
        ConfigError: If the value is none of these.

    Example:
        >>> as_schedule("every 100ba for 3ba")
        Every(interval='100ba', lasting='3ba', start='0ba', stage=None)
        >>> as_schedule("first 5ba")
        At(time='0ba', lasting='5ba')
    """
    if isinstance(value, Schedule):
        return value
    if value is None:
        return default or Always()
    if not isinstance(value, str):
        raise ConfigError(field, value, "is no schedule", _EXAMPLE)
    try:
        return _parse(value.strip())
    except ConfigError as error:
        problem = f"is no schedule: {error.value!r} {error.problem}"
        raise ConfigError(field, value, problem, _EXAMPLE) from None


def _parse(text: str) -> Schedule:
    if text in ("always", "never"):
        return Always() if text == "always" else Never()
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError("text", text, "has words that do not belong there", _EXAMPLE)
    word, time, lasting, first = match.groups()
    if first is not None:
        length = times("lasting", first, "5ba", units=COUNTED_UNITS)
        return At(time=f"0{length.unit}", lasting=length)
    kind = At if word == "at" else Every
    return kind(time, lasting=lasting or "1ba")
