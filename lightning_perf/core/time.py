"""Amounts of training, in epochs, batches, samples, tokens, steps, seconds or a fraction."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from fractions import Fraction
from functools import total_ordering
from math import isfinite
from typing import SupportsIndex

from lightning_perf.errors import ConfigError


class TimeUnit(StrEnum):
    """The units of a `Time`, by suffix.

    Units can be looked up by suffix or name, in upper or lower case. Other values raise
    `ConfigError`.

    Example:
        >>> TimeUnit("ba") is TimeUnit("Batch") is TimeUnit.BATCH
        True
    """

    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"  # noqa: S105 - a suffix, no password
    STEP = "step"
    DURATION = "dur"
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> TimeUnit:
        for unit in cls:
            if str(value).lower() in (unit.value, unit.name.lower()):
                return unit
        raise ConfigError("unit", value, f"is not a unit, expected one of {', '.join(cls)}", '"ba"')


# numpy's integers are not int.
_NUMBER = (float, SupportsIndex)

# Underscores are allowed as in Python: 4_000.
_DIGITS = r"\d+(?:_\d+)*"
# Python refuses integers of more than 4300 digits.
_LONGEST_TEXT = 100
# The exponent is limited to three digits: 1e999999999ba would fill the memory.
_COUNT = re.compile(
    rf"([+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:e[+-]?\d{{1,3}})?)({'|'.join(TimeUnit)})",
    re.ASCII | re.IGNORECASE,
)
_NOT_A_TIME = "is not a valid time", '"10ba", "0.5dur" or "1h30m"'
_CLOCK = re.compile(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)


@total_ordering
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Time:
    """An amount of training in one unit.

    Times of the same unit can be added, subtracted, divided and compared. Other operands may be
    strings, or numbers in the same unit. A time multiplied by a ``dur`` is that fraction of it,
    rounded down. Whole numbers keep their full precision.

    Args:
        value: A whole number; for ``dur``, a fraction of the whole training.
        unit: A `TimeUnit`, or its suffix or name.

    Raises:
        TypeError: If the value is not a whole number or an operand is not a time.
        RuntimeError: If the operands have different units.
        ConfigError: If the unit is unknown or the value is not finite.

    Example:
        >>> Time(7, "ep") * "0.2dur" + 1
        Time(2, TimeUnit.EPOCH)
        >>> Time.from_timestring("1h20m40s").to_timestring()
        '4840sec'
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: SupportsIndex | float, unit: TimeUnit | str) -> None:
        unit = TimeUnit(unit)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "value", _checked(value, unit))

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Parse a string such as ``10ep``, ``4_000tok``, ``0.7dur``, ``30sec`` or ``1h20m40s``.

        Raises:
            ConfigError: If the value is not a string, or malformed.
            TypeError: If the value is a fraction and the unit is not ``dur``.
        """
        if not isinstance(timestring, str) or len(timestring) > _LONGEST_TEXT:
            raise ConfigError("time", timestring, *_NOT_A_TIME)
        if match := _COUNT.fullmatch(timestring):
            number, unit = match[1], TimeUnit(match[2])
            if unit is TimeUnit.DURATION:
                return cls(float(number), unit)
            exact = Fraction(number)
            return cls(exact.numerator if exact.denominator == 1 else float(exact), unit)
        return cls.from_timedelta(timestring)

    @classmethod
    def from_input(
        cls,
        value: Time | str | timedelta | SupportsIndex | float,
        default_unit: TimeUnit | str | None = None,
    ) -> Time:
        """Convert a value to a time.

        Args:
            value: A time, a string, a timedelta, or a number of the default unit.
            default_unit: The unit of a plain number.

        Raises:
            RuntimeError: If the value has another type, or is a number without a default unit.
        """
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if isinstance(value, timedelta):
            return cls.from_timedelta(value)
        if isinstance(value, _NUMBER) and default_unit is not None:
            return cls(value, default_unit)
        raise RuntimeError(f"{value!r} is not a time, expected a string with a unit (10ba).")

    @classmethod
    def from_timedelta(cls, value: timedelta | str) -> Time:
        """Convert a timedelta, or a string such as ``90m`` or ``1h20s``, to whole seconds."""
        if isinstance(value, timedelta):
            return cls(int(value.total_seconds()), TimeUnit.SECOND)
        match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError("time", value, *_NOT_A_TIME)
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return cls(hours * 3600 + minutes * 60 + seconds, TimeUnit.SECOND)

    @classmethod
    def from_epoch(cls, epoch: int) -> Time:
        """Create a time in epochs."""
        return cls(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: int) -> Time:
        """Create a time in batches."""
        return cls(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: int) -> Time:
        """Create a time in samples."""
        return cls(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: int) -> Time:
        """Create a time in tokens."""
        return cls(token, TimeUnit.TOKEN)

    @classmethod
    def from_step(cls, step: int) -> Time:
        """Create a time in optimizer steps."""
        return cls(step, TimeUnit.STEP)

    @classmethod
    def from_duration(cls, duration: float) -> Time:
        """Create a time as a fraction of the whole training."""
        return cls(duration, TimeUnit.DURATION)

    @classmethod
    def from_second(cls, second: int) -> Time:
        """Create a time in seconds."""
        return cls(second, TimeUnit.SECOND)

    def to_timestring(self) -> str:
        """Return the string that `from_timestring` parses to this time."""
        return f"{self.value}{self.unit}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value}, TimeUnit.{self.unit.name})"

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Time, str, *_NUMBER)):
            return NotImplemented
        return self.value == self._operand(other).value

    def __lt__(self, other: Time | str | float) -> bool:
        return self.value < self._operand(other).value

    def __add__(self, other: Time | str | float) -> Time:
        return Time(self.value + self._operand(other).value, self.unit)

    __radd__ = __add__

    def __sub__(self, other: Time | str | float) -> Time:
        return Time(self.value - self._operand(other).value, self.unit)

    def __rsub__(self, other: Time | str | float) -> Time:
        return self._operand(other) - self

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __pos__(self) -> Time:
        return self

    def __mod__(self, other: Time | str | float) -> Time:
        return Time(self.value % self._operand(other).value, self.unit)

    def __truediv__(self, other: Time | str | float) -> Time:
        if isinstance(other, _NUMBER):
            return Time(_rounded_down(_exact(self.value) / _exact(other), self.unit), self.unit)
        return Time(self.value / self._operand(other).value, TimeUnit.DURATION)

    def __mul__(self, other: Time | str | float) -> Time:
        if isinstance(other, _NUMBER):
            return Time(_rounded_down(_exact(self.value) * _exact(other), self.unit), self.unit)
        time = self._read(other)
        if TimeUnit.DURATION not in (self.unit, time.unit):
            raise RuntimeError(f"cannot multiply {self} by {time}: neither is a fraction (dur).")
        return self * time.value if time.unit is TimeUnit.DURATION else time * self.value

    __rmul__ = __mul__

    def _read(self, other: Time | str | SupportsIndex | float) -> Time:
        try:
            return Time.from_input(other, self.unit)
        except RuntimeError:
            raise TypeError(f"cannot combine {self} with {other!r}.") from None

    def _operand(self, other: Time | str | SupportsIndex | float) -> Time:
        time = self._read(other)
        if time.unit is not self.unit:
            raise RuntimeError(f"{self} and {time} have different units.")
        return time


def _checked(value: SupportsIndex | float, unit: TimeUnit) -> int | float:
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise TypeError(f"{value!r} is not a number of {unit}.")
    if unit is TimeUnit.DURATION:
        if not isfinite(value):
            raise ConfigError("time", value, "is not a finite fraction", '"0.5dur"')
        return float(value)
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{value!r} is not a whole number of {unit}.") from None


def _exact(number: float) -> Fraction:
    # The decimal value: 0.29 is 29/100, so that 0.29dur of 100ep is 29ep, not 28.
    try:
        return Fraction(str(number))
    except ValueError:
        raise TypeError(f"{number!r} is not a finite number.") from None


def _rounded_down(exact: Fraction, unit: TimeUnit) -> int | float:
    return float(exact) if unit is TimeUnit.DURATION else int(exact)
