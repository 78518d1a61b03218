"""What goes wrong, and the one way in which we say it."""

from __future__ import annotations

import warnings


class ConfigError(ValueError):
    """A setting that cannot work, found at construction or set-up.

    Args:
        field: The setting, as the user writes it.
        value: What it was given.
        problem: Why that cannot work, as a clause.
        example: A value that works.

    Example:
        >>> raise ConfigError("window_size", 0, "is not a positive number of batches", "100")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: window_size=0 is not a positive number of batches. \
Try window_size=100.
    """

    def __init__(self, field: str, value: object, problem: str, example: str) -> None:
        super().__init__(field, value, problem, example)
        self.field, self.value, self.problem, self.example = field, value, problem, example

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} {self.problem}. Try {self.field}={self.example}."


class RecorderBusy(RuntimeError):
    """Two recorders that cannot run at the same time in one process.

    Args:
        wanted: The recorder that was to start.
        holder: The one that is recording.
    """

    def __init__(self, wanted: str, holder: str) -> None:
        super().__init__(wanted, holder)
        self.wanted, self.holder = wanted, holder

    def __str__(self) -> str:
        return f"{self.wanted} cannot record while {self.holder} does: give them different windows."


class PerfWarning(UserWarning):
    """Something of ours could not be done; training goes on."""


def warn(message: str) -> None:
    """Warn in the one form that all our warnings have.

    Args:
        message: What happened, and what to do about it.
    """
    warnings.warn(f"lightning_perf: {message}", PerfWarning, stacklevel=3)
