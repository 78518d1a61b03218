"""Argument checks, whose errors name the argument and suggest a value."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from fractions import Fraction
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_perf.core.progress import STAGES
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


#: All units, for messages.
UNITS = "ep ba step sp tok sec dur, or 1h20m40s"

_UNIT = {
    **dict.fromkeys(("ep", "epoch", "epochs"), "ep"),
    **dict.fromkeys(("ba", "batch", "batches", "it", "iter", "iters"), "ba"),
    **dict.fromkeys(("iteration", "iterations", "minibatch", "minibatches"), "ba"),
    **dict.fromkeys(("step", "steps", "update", "updates"), "step"),
    **dict.fromkeys(("sp", "sample", "samples", "example", "examples"), "sp"),
    **dict.fromkeys(("tok", "token", "tokens"), "tok"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "sec"),
    **dict.fromkeys(("dur", "duration"), "dur"),
    **dict.fromkeys(("%", "percent"), "%"),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), "ms"),
    "s": "s",
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_SECONDS: dict[str, Fraction | int] = {
    **{"ms": Fraction(1, 1000), "s": 1, "sec": 1},
    **{"m": 60, "h": 3600, "d": 86400},
}
_SCALE = {"": 1, "k": 10**3, "m": 10**6}
#: Words for one unit, as in "every epoch".
ONE = {
    "epoch": "1ep",
    "batch": "1ba",
    "step": "1step",
    "second": "1sec",
    "minute": "1m",
    "hour": "1h",
}
_WORD = {
    **{word: word for word in ("every", "for", "first", "at", "always", "never")},
    **dict.fromkeys(("each", "interval"), "every"),
    **dict.fromkeys(("lasting", "during"), "for"),
    **dict.fromkeys(("after", "from"), "at"),
    **{name: f"1{unit}" for name, unit in _UNIT.items() if len(name) > 2},
    **ONE,
}
_AMOUNT = re.compile(r"(\d[\d.,_]*|\.\d+)([km](?=[a-z]{2}))?([a-z]+|%)?")
_CLOCK = re.compile(r"(\d+h)?(\d+m)?(\d+s)?")
_HALF_PAST = re.compile(r"(\d+)h(\d+)")


def percent_as_dur(word: str) -> str:
    """Convert a percentage to a fraction of the training; return other words unchanged.

    Example:
        >>> percent_as_dur("50%"), percent_as_dur("5ba")
        ('0.5dur', '5ba')
    """
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", word, re.ASCII)
    return f"{float(Fraction(match[1]) / 100)}dur" if match else word


def nearest_time(text: str) -> str:
    """Return the time that was probably meant, or the text itself if there is no guess.

    Example:
        >>> nearest_time("10 Batches"), nearest_time("10setp"), nearest_time("100")
        ('10ba', '10step', '100ba')
        >>> nearest_time("100ms"), nearest_time("1.5h"), nearest_time("2k tokens")
        ('1sec', '5400sec', '2000tok')
    """
    joined = "".join(text.lower().split())
    if joined in ONE:
        return ONE[joined]
    if joined and _CLOCK.fullmatch(joined):
        return joined
    if match := _HALF_PAST.fullmatch(joined):
        return f"{match[1]}h{match[2]}m"
    match = _AMOUNT.fullmatch(joined)
    if match is None:
        return text
    scale, unit = match[2] or "", match[3] or ""
    if scale + unit in _UNIT or unit not in _UNIT:
        scale, unit = "", scale + unit
    known = _closest(unit, _UNIT)
    try:
        amount = Fraction(match[1].replace(",", "").replace("_", "")) * _SCALE[scale]
    except ValueError:
        return text
    if not unit:
        known = "dur" if amount < 1 else "ba"
    return text if known is None else _written(amount, known)


def nearest_schedule(text: str) -> str:
    """Return the schedule that was probably meant. It may still be invalid.

    Example:
        >>> nearest_schedule("evry 10 batches for 3step")
        'every 10ba for 3step'
    """
    text = re.sub(r"[,;](?!\d)", " ", text.lower())
    text = re.sub(r"^\s*([a-z]+)(?=\d)", r"\1 ", text)
    # Join each number with its unit, also a misspelt one, and parts such as 1h 20m.
    joined = re.sub(rf"(\d[km]?)\s+(?=(?:{'|'.join(_UNIT)})\b|%)", r"\1", text)
    joined = re.sub(r"(\d[hm])\s+(?=\d+[ms]\b)", r"\1", joined)
    joined = re.sub(rf"(\d)\s+(?!(?:{'|'.join(_WORD)})\b)(?=[a-z])", r"\1", joined)
    return " ".join(_nearest_word(word) for word in joined.split())


def _written(amount: Fraction, unit: str) -> str:
    if unit == "%":
        return f"{float(amount / 100)}dur"
    if unit in _SECONDS and (amount.denominator > 1 or unit in ("ms", "d")):
        return f"{max(1, round(amount * _SECONDS[unit]))}sec"
    return f"{float(amount) if amount.denominator > 1 else amount.numerator}{unit}"


def _nearest_word(word: str) -> str:
    if word[0].isdigit() or word[0] == ".":
        return nearest_time(word)
    return _closest(word, _WORD) or word


def _closest(word: str, known: Mapping[str, str]) -> str | None:
    """Return the meaning of the closest word; words under 3 letters must match exactly."""
    if word in known or len(word) < 3:
        return known.get(word)
    near = get_close_matches(word, [each for each in known if len(each) > 2], n=1)
    return known[near[0]] if near else None


ALL_UNITS = frozenset(TimeUnit)
#: Units for the length of a window: the fraction of training may be unknown.
COUNTED_UNITS = ALL_UNITS - {TimeUnit.DURATION}


# Exact as a float, and longer than any training.
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
    """Return a whole number if it is at least ``minimum``.

    Args:
        field: Name of the argument, for the message.
        value: Its value.
        minimum: The smallest valid value.
        example: A valid value, as Python source (``"3"``; a string needs quotes of its own).

    Raises:
        ConfigError: The value is not valid.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        if isinstance(value, str | float) and re.fullmatch(r"\d{1,15}(?:\.0*)?", str(value)):
            meant = int(float(value))
            example = str(meant) if meant >= minimum else example
        problem = f"is not valid, expected a whole number of at least {minimum}"
        raise ConfigError(field, value, problem, example)
    return value


def flag(field: str, value: bool) -> bool:
    """Return a bool; refuse anything else, because the string "no" would be true."""
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
    """Parse a time and check its unit and sign; negative times are always refused.

    The example is a valid time, without quotes.
    """
    try:
        time = Time.from_input(value)
    except (RuntimeError, TypeError, ValueError):
        problem = f"is not a valid time (units: {UNITS}; only dur can be a fraction)"
        near = _near(value, units) or example
        raise ConfigError(field, value, problem, f'"{near}"') from None
    example = f'"{example}"'
    if time.unit not in units:
        known = " ".join(unit for unit in TimeUnit if unit in units)
        raise ConfigError(field, str(time), f"has a wrong unit, expected one of {known}", example)
    if time.value < 0 or (positive and time.value == 0):
        problem = "is not positive" if positive else "is negative"
        raise ConfigError(field, str(time), problem, example)
    if time.value > _LONGEST:
        raise ConfigError(field, value, "is too large", example)
    return time


def stage_list(field: str, value: list[str] | str) -> list[str]:
    """Return one or more names of stages as a list."""
    names: list[str] = list(value) if isinstance(value, list | tuple) else [str(value)]
    if not names or any(name not in STAGES for name in names):
        near = [_near_stage(name) for name in names] or ["train"]
        example = json.dumps(near if isinstance(value, list | tuple) else near[0])
        problem = f"is not valid, expected one of {', '.join(STAGES)}"
        raise ConfigError(field, value, problem, example)
    return names


def rank_list(field: str, value: list[int] | int) -> list[int]:
    """Return one or more ranks as a list."""
    ranks = list(value) if isinstance(value, list | tuple) else [value]
    for rank in ranks:
        whole(field, rank, 0, "0")
    if not ranks:
        raise ConfigError(field, value, "is empty, expected at least one rank", "0")
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


#: The extras of lightning_perf by the packages that they bring.
EXTRAS = {"matplotlib": "charts", "memray": "memray", "mlflow": "mlflow", "viztracer": "viztracer"}


def install_command(package: str) -> str:
    """The pip command that brings a package.

    Example:
        >>> install_command("mlflow"), install_command("rich")
        ('pip install "lightning_perf[mlflow]"', 'pip install rich')
    """
    extra = EXTRAS.get(package)
    return f"pip install {package}" if extra is None else f'pip install "lightning_perf[{extra}]"'


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # it is being imported, or blocked
        return False


def needs(what: str, package: str) -> None:
    """Refuse a class, ``what``, whose package is missing.

    Raises:
        ModuleNotFoundError: The package is not installed; the message has the pip command.
    """
    if not is_installed(package):
        message = f"{what} needs the package {package}. Try {install_command(package)}."
        raise ModuleNotFoundError(message, name=package)
