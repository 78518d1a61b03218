"""Errors and warnings for users."""

from __future__ import annotations

import logging
import re
import signal
import traceback
import warnings
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_log = logging.getLogger("lightning_perf.warnings")
_SIGNALS = sorted(signal.valid_signals())
_MESSAGE_LENGTH, _VALUE_LENGTH = 300, 200
#: What reading a damaged file may raise, besides `OSError`.
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ConfigError(ValueError):
    """A setting that cannot work, found at construction or set-up.

    Args:
        field: The setting, as the user writes it.
        value: Its value; credentials in URLs are removed.
        problem: Why the value cannot work, as a clause.
        example: A value that works, or None.

    Example:
        >>> raise ConfigError("window_size", 0, "is not a positive number of batches", "100")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: window_size=0 is not a positive number of batches. \
Try window_size=100.
    """

    def __init__(self, field: str, value: object, problem: str, example: str | None) -> None:
        if isinstance(value, str):
            value = redacted(value)
        super().__init__(field, value, problem, example)
        self.field, self.value, self.problem, self.example = field, value, problem, example

    def __str__(self) -> str:
        text = f"{self.field}={shown(self.value)} {self.problem}"
        text += "" if text.endswith("?") else "."
        return text if self.example is None else f"{text} Try {self.field}={self.example}."


def closest(name: object, known: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """The known name that was probably meant, or another text if none is near."""
    return (get_close_matches(str(name), [*known], n=1, cutoff=cutoff) or [otherwise])[0]


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """A hint at the known name that was probably meant, or another text if none is near."""
    near = closest(name, known)
    return f"Did you mean {near}?" if near else otherwise


def shown(value: object) -> str:
    """Return the repr of a value, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}..."


class RecorderBusy(RuntimeError):
    """Two profilers cannot record at the same time in one process.

    Args:
        wanted: The profiler that was about to start.
        holder: The profiler that is recording.
        remedy: What the user can do, as an imperative.

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
    """A function of lightning_perf failed or is limited. Training continues.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", PerfWarning)
    """


def warn(message: str) -> None:
    """Issue a `PerfWarning`, with credentials in URLs removed.

    One line, whatever an error or a name has. Never raises: if the user has turned warnings into
    errors, the message is logged instead, because our warnings must not stop training or skip the
    code after them.
    """
    text = f"lightning_perf: {printable(redacted(message))}".replace("\n", r"\n")
    try:
        warnings.warn(text, PerfWarning, stacklevel=3)
    except Exception:  # also of whatever shows warnings: Lightning's needs the current folder
        _log.warning(text)


def handled_signals() -> dict[int, Any]:
    """The signals with a handler in Python, and these handlers."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}


def let_through(error: Exception) -> None:
    """Raise an error again that a signal's handler of the user has raised, such as a timeout.

    It may come between any two lines, and is not a failure of what ran there.
    """
    codes = {_code_of(handler) for handler in handled_signals().values()}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


@contextmanager
def own_errors_dropped() -> Iterator[None]:
    """Drop the errors of a block, but not those that `let_through` raises."""
    try:
        yield
    except Exception as error:
        let_through(error)


def _code_of(function: Any) -> Any:
    """The code that a call runs; None if that is not Python."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


def describe(error: BaseException) -> str:
    """Return the class and message of an error, shortened and without credentials in URLs."""
    return redacted(f"{type(error).__name__}: {error}")[:_MESSAGE_LENGTH]


#: Characters that a terminal obeys instead of showing them: controls but tab and newline, and those
#: that reorder text.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text with escapes in place of control characters, for terminals.

    Example:
        >>> print(printable("owl\x1b[2J"))
        owl\x1b[2J
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


#: The user and the password of a URL. Passwords may have any unescaped character, so that one ends
#: at the last ``@`` of the line or before the next URL: rather too much is removed than too little.
#: A password that was read from a file may end with a line break.
#: Digits after the colon are a port of a server, but never of a database.
_USER = re.compile(
    r"((?<!http)(?<!https)://|://(?![^\s/?#@:]*:\d+(?:[/\s'\"),]|$)))"
    r"(?:[^\s/?#@:\[]*:(?:(?![\s'\"(][\w+.-]{1,30}://)(?:[^\n]|\n(?=@)))*@|[^\s/?#]*@)",
    re.IGNORECASE,
)
#: The start of a URL in a text, before its query or fragment. Paths of this machine may have a
#: "#". From urllib3: "Max retries exceeded with url: /x?signature=abc".
_START = r"((?:://|\burl: )(?:/[^?{0}]*(?=\?)|(?!/)[^?#{0}]*))[?#]"
_QUERY = re.compile(_START.format(""), re.DOTALL)
_QUERY_IN_TEXT = re.compile(_START.format(r"\s") + r"[^\s'\"]*")


def without_user(text: str) -> str:
    """Remove user names and passwords from the URLs in a text."""
    return _USER.sub(r"\1", text)


def without_credentials(address: str) -> str:
    """Remove what may be secret from an address: user, password, query and fragment.

    Example:
        >>> without_credentials("postgresql://me:secret@host/runs?sslkey=secret")
        'postgresql://host/runs'
    """
    address = without_user(address)
    found = _QUERY.search(address)
    return address if found is None else address[: found.end(1)]


def redacted(text: str) -> str:
    """As `without_credentials`, for all URLs in a text."""
    return _QUERY_IN_TEXT.sub(r"\1", without_user(text))


class WarningDigest:
    """Warns once per kind of problem, and at the end about the number of repetitions."""

    def __init__(self) -> None:
        self._repeated: dict[str, int] = {}

    def once(self, kind: str, message: str, count: int = 1) -> None:
        """Warn, unless this kind of problem was reported before; then count the items concerned.

        ``kind`` is the text for the repetitions, after their number: "files were not uploaded".
        """
        if kind in self._repeated:
            self._repeated[kind] += count
            return
        self._repeated[kind] = 0
        warn(message)

    def summarize(self) -> None:
        """Warn about the number of repetitions of each kind, once."""
        for kind, count in self._repeated.items():
            if count:
                self._repeated[kind] = 0
                warn(f"{count} more {kind}.")
