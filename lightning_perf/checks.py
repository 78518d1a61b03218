"""Argument checks, whose errors name the argument and suggest a value."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence, Set
from fractions import Fraction
from importlib.util import find_spec
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from lightning_perf.core.progress import STAGES
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.errors import ConfigError, closest

if TYPE_CHECKING:
    from collections.abc import Collection

#: All units, for messages.
UNITS = "ep ba step sp tok sec dur, or 1h20m40s"

#: Words for units: the unit of `Time`, and how many of it one is.
_UNITS: list[tuple[str, str, int | Fraction]] = [
    ("ep epoch", "ep", 1),
    ("ba batch it iter iteration minibatch", "ba", 1),
    ("step update", "step", 1),
    ("sp sample example", "sp", 1),
    ("tok token", "tok", 1),
    ("dur duration", "dur", 1),
    ("% percent", "%", 1),
    ("ms msec millisecond", "sec", Fraction(1, 1000)),
    ("s sec second", "sec", 1),
    ("m min minute", "sec", 60),
    ("h hr hour", "sec", 3600),
    ("d day", "sec", 86400),
    ("w wk week", "sec", 604_800),
]
_WORDS = {word: (unit, factor) for words, unit, factor in _UNITS for word in words.split()}
#: Words for one unit, as in "every epoch".
_ONE = {
    "epoch": "1ep", "batch": "1ba", "step": "1step", "second": "1sec", "minute": "1m", "hour": "1h",
}  # fmt: skip
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]+|%)", re.ASCII | re.IGNORECASE)


def amount(text: str) -> tuple[Fraction, str]:
    """The number and the unit of an amount in words; the unit is empty if a text is none.

    Example:
        >>> amount("500 ms"), amount("2 Epochs")
        ((Fraction(1, 2), 'sec'), (Fraction(2, 1), 'ep'))
    """
    match = _AMOUNT.fullmatch(_ONE.get(text.lower(), text))
    number, word = match.groups() if match else ("0", "")
    names = (word.lower().removesuffix(end) for end in ("", "s", "es"))
    unit, factor = next((_WORDS[name] for name in names if name in _WORDS), ("", 1))
    return Fraction(number) * factor, unit


def worded(text: str) -> str:
    """Convert an amount in words to a time string; return other texts unchanged.

    Example:
        >>> worded("100 batches"), worded("epoch"), worded("1.5 hours"), worded("100ba")
        ('100ba', '1ep', '5400sec', '100ba')
        >>> worded("10%"), worded("50 percent")
        ('0.1dur', '0.5dur')
    """
    number, unit = amount(text)
    if unit in ("%", "dur"):
        return f"{float(number / 100 if unit == '%' else number)}dur"
    return f"{number}{unit}" if unit and number.denominator == 1 else text


ALL_UNITS = frozenset(TimeUnit)
#: Units for the length of a window: the fraction of training may be unknown.
COUNTED_UNITS = ALL_UNITS - {TimeUnit.DURATION}


# Exact as a float, and longer than any training.
_LONGEST = 10**15
_OFF = ("no", "off", "false", "0", "n", "f", "")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, of numpy or not, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(field: str, value: int, minimum: int, example: str, maximum: int = _LONGEST) -> int:
    """Return a whole number if it is in a range; the example is Python source."""
    if isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum:
        if value > maximum:
            raise ConfigError(field, value, f"is too large, expected {maximum} at most", example)
        return int(value)  # numpy's are neither JSON nor equal in texts
    if isinstance(value, str | float) and re.fullmatch(r"\d{1,15}(?:\.0*)?", str(value)):
        meant = int(float(value))
        example = str(meant) if meant >= minimum else example
    problem = f"is not valid, expected a whole number of at least {minimum}"
    raise ConfigError(field, value, problem, example)


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

    Units may be words: ``"2 epochs"``.

    The example is a valid time, without quotes.
    """
    try:
        time = Time.from_input(worded(value) if isinstance(value, str) else value)
    except (RuntimeError, TypeError, ValueError):
        known = f"{UNITS}; only dur can be a fraction"
        if units == {TimeUnit.SECOND}:
            known = "sec, or 1h20m40s"
        problem = f"is not a valid time (units: {known})"
        raise ConfigError(field, value, problem, f'"{example}"') from None
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


def is_list(value: object) -> bool:
    """Whether a value is a list, tuple, range, set, or a sequence of Hydra; not a string."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def stage_list(field: str, value: list[str] | str) -> list[str]:
    """Return one or more names of stages as a list."""
    names: list[str] = list(value) if is_list(value) else [str(value)]
    if not names or any(name not in STAGES for name in names):
        near = [closest(str(name).lower(), STAGES, "train") for name in names] or ["train"]
        example = json.dumps(near if is_list(value) else near[0])
        problem = f"is not valid, expected one of {', '.join(STAGES)}"
        raise ConfigError(field, value, problem, example)
    return names


def rank_list(field: str, value: Any) -> list[int]:
    """Return one or more ranks as a list."""
    ranks = [whole(field, rank, 0, "0") for rank in (value if is_list(value) else [value])]
    if not ranks:
        raise ConfigError(field, value, "is empty, expected at least one rank", "0")
    return ranks


#: The extras of lightning_perf by the packages that they bring.
EXTRAS = {
    "memray": "memray",
    "mlflow": "mlflow",
    "opentelemetry.exporter.otlp.proto.http": "otel",
    "prometheus_client": "prometheus",
    "viztracer": "viztracer",
}


def install_command(package: str) -> str:
    """The pip command that installs a package; for memray on Windows, the systems that it needs."""
    if package == "memray" and sys.platform == "win32":
        return "Linux or macOS"
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
