"""Errors for users, and warnings that are given once."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


_log = logging.getLogger("lightning_perf.warnings")
_MESSAGE_LENGTH, _VALUE_LENGTH = 300, 200


class ConfigError(ValueError):
    """A setting that cannot work, found at construction or set-up.

    Args:
        field: The setting, as the user writes it.
        value: What it was given; an address loses what may be secret in it.
        problem: Why that cannot work, as a clause.
        example: A value that works; None where no value would.

    Example:
        >>> raise ConfigError("window_size", 0, "is not a positive number of batches", "100")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: window_size=0 is not a positive number of batches. \
Try window_size=100.
    """

    def __init__(self, field: str, value: object, problem: str, example: str | None) -> None:
        if isinstance(value, str):
            value = _redacted(value)
        super().__init__(field, value, problem, example)
        self.field, self.value, self.problem, self.example = field, value, problem, example
        if "jsonargparse" in sys.modules:
            _LastLine.announce(str(self))

    def __str__(self) -> str:
        told = f"{self.field}={shown(self.value)} {self.problem}"
        told += "" if told.endswith("?") else "."
        return told if self.example is None else f"{told} Try {self.field}={self.example}."


class _LastLine:
    """Repeats a message as the last line of what is printed about an error that it is part of.

    LightningCLI constructs callbacks by jsonargparse, which wraps the errors of constructors in one
    of its own, of a hundred lines with ours in the middle. Only what is printed changes: the same
    error is raised, and hooks that were there are called.

    Args:
        message: The message.
        before: The hook that was there.
    """

    def __init__(self, message: str, before: Callable[..., object]) -> None:
        self._message, self._before = message, before

    @classmethod
    def announce(cls, message: str) -> None:
        """Repeat this message, and no earlier one, should it be part of an uncaught error."""
        hook = sys.excepthook
        sys.excepthook = cls(message, hook._before if isinstance(hook, cls) else hook)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._before(kind, error, trace)
        if not isinstance(error, ConfigError) and self._message in str(error):
            print(f"\nlightning_perf: {self._message}", file=sys.stderr)  # noqa: T201


def shown(value: object) -> str:
    """How a message shows a value: as Python would write it, cut where it is long.

    Args:
        value: Anything.

    Example:
        >>> shown("10 batches"), len(shown("9" * 5000))
        ("'10 batches'", 203)
    """
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


class RecorderBusy(RuntimeError):
    """Two recorders that cannot run at the same time in one process.

    Args:
        wanted: The recorder that was to start.
        holder: The one that is recording.
        remedy: What the user can do about it, as an imperative.

    Example:
        >>> raise RecorderBusy("Memray", "VizTracer")
        Traceback (most recent call last):
        lightning_perf.errors.RecorderBusy: Memray cannot record while VizTracer does: \
give them different windows.
    """

    def __init__(
        self, wanted: str, holder: str, remedy: str = "give them different windows"
    ) -> None:
        super().__init__(wanted, holder, remedy)
        self.wanted, self.holder, self.remedy = wanted, holder, remedy

    def __str__(self) -> str:
        return f"{self.wanted} cannot record while {self.holder} does: {self.remedy}."


class PerfWarning(UserWarning):
    """Something of ours could not be done; training goes on."""


def warn(message: str) -> None:
    """Warn in the one form that all our warnings have, without what may be secret in addresses.

    It never raises: where the user has turned warnings into errors, it is a line in the log, since
    ours must neither stop training nor keep what follows them from being done.

    Args:
        message: What happened, and what to do about it.
    """
    text = f"lightning_perf: {_redacted(message)}"
    try:
        warnings.warn(text, PerfWarning, stacklevel=3)
    except PerfWarning:
        _log.warning(text)


def describe(error: BaseException) -> str:
    """An error's class and message, short and without what may be secret in addresses.

    Args:
        error: What was raised.

    Example:
        >>> describe(OSError("PUT https://me:secret@host/x?signature=abc failed"))
        'OSError: PUT https://host/x failed'
    """
    return _redacted(f"{type(error).__name__}: {error}")[:_MESSAGE_LENGTH]


def without_credentials(address: str) -> str:
    """A text whose addresses have lost their user names and passwords.

    Args:
        address: An address, or a text with addresses in it.

    Example:
        >>> without_credentials("https://me:secret@host/path")
        'https://host/path'
    """
    return re.sub(r"://[^\s/?#]*@", "://", address)


def _redacted(text: str) -> str:
    # urllib3 tells an address without its host: "Max retries exceeded with url: /x?signature=abc".
    return re.sub(r"((?:://|\burl: )[^\s?]*)\?[^\s'\"]*", r"\1", without_credentials(text))


class WarningDigest:
    """Says each kind of trouble when it first comes, and at the end how often it came again.

    A server that is gone for a million windows fills no terminal, and no registry of warnings.
    """

    def __init__(self) -> None:
        self._again: dict[str, int] = {}

    def once(self, kind: str, message: str, count: int = 1) -> None:
        """Warn, unless this kind of trouble was told before.

        Args:
            kind: What to say of the number that came again, such as "files were not uploaded".
            message: What to say the first time.
            count: How many this is about.
        """
        if kind in self._again:
            self._again[kind] += count
            return
        self._again[kind] = 0
        warn(message)

    def summarize(self) -> None:
        """Say how often each kind of trouble came again, once."""
        for kind, count in self._again.items():
            if count:
                self._again[kind] = 0
                warn(f"{count} more {kind}.")
