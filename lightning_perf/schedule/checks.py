"""The arguments of schedules, checked and parsed once, at construction."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.moment import STAGES
from lightning_perf.schedule.spelling import UNITS, nearest_time
from lightning_perf.time import Time, TimeUnit

if TYPE_CHECKING:
    from collections.abc import Collection

ALL_UNITS = frozenset(TimeUnit)
#: What a trigger can last: the fraction done may stand still or be unknown.
COUNTED_UNITS = ALL_UNITS - {TimeUnit.DURATION}


# Beyond any training, and still exact as a float.
_LONGEST = 10**15
_STAGE = {
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluate"), "validate"),
    **dict.fromkeys(("fit", "training"), "train"),
    **dict.fromkeys(("testing",), "test"),
    **dict.fromkeys(("prediction", "infer", "inference"), "predict"),
    **{stage: stage for stage in STAGES},
}
_OFF = ("no", "off", "false", "0", "n", "f", "")


def whole(field: str, value: int, minimum: int, example: str) -> int:
    """Check a whole number against a minimum."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        if isinstance(value, str | float) and re.fullmatch(r"\d{1,15}(?:\.0*)?", str(value)):
            meant = int(float(value))
            example = str(meant) if meant >= minimum else example
        raise ConfigError(field, value, f"is not a whole number from {minimum} up", example)
    return value


def flag(field: str, value: bool) -> bool:
    """Check a switch: a text is always true, "no" included."""
    if not isinstance(value, bool):
        meant = str(value).strip().lower() not in _OFF
        raise ConfigError(field, value, "is neither True nor False", str(meant))
    return value


def times(
    field: str,
    value: Time | str,
    example: str,
    *,
    units: Collection[TimeUnit] = ALL_UNITS,
    positive: bool = True,
) -> Time:
    """Parse a time and check its unit and its sign.

    Args:
        field: The argument, for the message.
        value: The time as the user wrote it.
        example: One that works.
        units: The units that make sense here.
        positive: Whether zero is refused; what is negative always is.
    """
    try:
        time = Time.from_input(value)
    except (RuntimeError, TypeError, ValueError):
        problem = f"is not an amount of time (units: {UNITS}; only dur takes fractions)"
        near = _near(value, units) or example
        raise ConfigError(field, value, problem, f'"{near}"') from None
    example = f'"{example}"'
    if time.unit not in units:
        known = " ".join(unit for unit in TimeUnit if unit in units)
        raise ConfigError(field, str(time), f"is in none of the units {known}", example)
    if time.value < 0 or (positive and time.value == 0):
        problem = "is not positive" if positive else "is negative"
        raise ConfigError(field, str(time), problem, example)
    if time.value > _LONGEST:
        raise ConfigError(field, value, "is longer than any training", example)
    return time


def stage_list(field: str, value: list[str] | str) -> list[str]:
    """Check one or more names of stages."""
    names: list[str] = list(value) if isinstance(value, list | tuple) else [str(value)]
    if not names or any(name not in STAGES for name in names):
        near = [_near_stage(name) for name in names] or ["train"]
        example = json.dumps(near if isinstance(value, list | tuple) else near[0])
        raise ConfigError(field, value, f"is not of {', '.join(STAGES)}", example)
    return names


def rank_list(field: str, value: list[int] | int) -> list[int]:
    """Check one or more ranks."""
    ranks = list(value) if isinstance(value, list | tuple) else [value]
    for rank in ranks:
        whole(field, rank, 0, "0")
    if not ranks:
        raise ConfigError(field, value, "names no rank", "0")
    return ranks


def _near_stage(name: object) -> str:
    near = get_close_matches(str(name).lower(), _STAGE, n=1)
    return _STAGE[near[0]] if near else "train"


def _near(value: object, units: Collection[TimeUnit]) -> str | None:
    try:
        near = nearest_time(str(value))
        time = Time.from_timestring(near)
    except (TypeError, ValueError):
        return None
    return near if time.unit in units and time.value > 0 else None
