"""The events of a trace in Chrome's format, one at a time, in bounded memory."""

from __future__ import annotations

import json
import re
import zlib
from codecs import getincrementaldecoder
from gzip import BadGzipFile, GzipFile
from typing import TYPE_CHECKING, Any

from lightning_perf.files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Event = dict[str, Any]
#: Bytes per read.
_CHUNK = 1 << 20
#: Characters of the longest event; a file with a longer one is damaged or no trace.
_MOST_CHARACTERS = 1 << 22
#: A gzipped file may unpack to this many bytes, or to this multiple of its size if that is more.
#: Traces unpack to 10 to 30 times their size, and files made to fill a memory or a disk to 1000.
_UNPACKED, _RATIO = 1 << 24, 200
#: The keys beside the events that are used; VizTracer's others hold all source files.
_HEAD = (
    "baseTimeNanoseconds", "batch", "run_name", "stage", "viztracer_metadata",
    "world_size",
)  # fmt: skip
_GZIPPED = b"\x1f\x8b"
#: Times beyond this (microseconds) do not fit into 64 bits as nanoseconds.
_LATEST = 9e15
#: NaN and Infinity, which no other reader of JSON takes, become null.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_SPACE = re.compile(r"[\s,]*")
#: What ends a skipped value: quotes and brackets; and escapes, which do not.
_MARK = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class TraceError(LookupError):
    """A file that is not a trace; the message says why, in one line."""


class CutShort(TraceError):
    """A trace that ends early or is damaged, after the events that were read."""


def microseconds(value: float) -> float:
    """A time of a trace; raises `ValueError` for one that is not finite or too large."""
    if not abs(number := float(value)) <= _LATEST:
        raise ValueError(f"{number} is not a time")
    return number


def stream(path: Path, head: dict[str, Any]) -> Iterator[Event]:
    """The events of a trace, gzipped or not.

    ``head`` receives those of the file's other keys that are used: those before the events first,
    the rest at the end.
    Raises `TraceError` if the file is not a trace, `CutShort` if it ends early, and `OSError` if it
    cannot be read.
    """
    buffer = _Buffer(path)
    if buffer.peek("{"):
        buffer.skip()
        while not buffer.peek("}"):
            key = str(buffer.value())
            if not buffer.peek(":"):
                raise CutShort(f"{path} is damaged")
            buffer.skip()
            if key == "traceEvents" and buffer.peek("["):
                yield from buffer.elements()
            elif key in _HEAD:
                head[key] = buffer.value()
            else:
                buffer.skip_value()
    elif buffer.peek("["):
        yield from buffer.elements()
    else:
        raise TraceError(f"{path} is not a trace in Chrome's format")


def _texts(path: Path) -> Iterator[str]:
    """The text of a file in pieces; of a truncated gzipped file, all that can be read."""
    decode, size = getincrementaldecoder("utf-8")().decode, 0
    with opened(path) as raw:
        file = GzipFile(fileobj=raw) if raw.peek(2).startswith(_GZIPPED) else raw
        try:
            # Not more than one call of the decompressor: an error in the next one loses nothing.
            while content := file.read1(_CHUNK):
                size += len(content)
                if size > max(_UNPACKED, _RATIO * raw.tell()):
                    raise CutShort(f"{path} unpacks to more than {_RATIO} times its size")
                yield decode(content)
        except EOFError:  # the gzipped file is cut short, and with it the text
            return
        except (BadGzipFile, zlib.error, UnicodeDecodeError) as error:
            raise CutShort(f"{path} is damaged ({error})") from error


class _Buffer:
    """The part of a file that is being parsed."""

    def __init__(self, path: Path) -> None:
        self._path, self._texts = path, _texts(path)
        self._text, self._at = "", 0

    def peek(self, mark: str) -> bool:
        """Whether the next character, after spaces and commas, is this one."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None  # it matches nothing, too
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at] == mark
            self._more()

    def skip(self) -> None:
        """Skip one character."""
        self._at += 1

    def value(self) -> Any:
        """The next value."""
        self.peek("")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                self._more()
                continue
            except (ValueError, RecursionError) as error:  # a number of too many digits
                raise CutShort(f"{self._path} is damaged ({error})") from error
            if end == len(self._text):  # a number may continue in the next piece
                self._more()
                continue
            self._at = end
            return value

    def skip_value(self) -> None:
        """Skip the next value, which may be of any size."""
        self.peek("")
        if self._text[self._at] not in '"[{':
            self.value()
            return
        depth, quoted = 0, False
        while True:
            for found in _MARK.finditer(self._text, self._at):
                self._at, mark = found.end(), found[0]
                if mark == '"':
                    quoted = not quoted
                elif not quoted and mark in "[]{}":
                    depth += 1 if mark in "[{" else -1
                if not (depth or quoted):
                    return
            # A backslash at the end belongs to the next character.
            self._at = max(self._at, len(self._text) - self._text.endswith("\\"))
            self._more()

    def elements(self) -> Iterator[Any]:
        """The elements of an array."""
        self.skip()
        while not self.peek("]"):
            yield self.value()
        self.skip()

    def _more(self) -> None:
        """Read as much again as there is: a long value is not parsed once per piece."""
        pieces = [self._text[self._at :]]
        if (length := len(pieces[0])) > _MOST_CHARACTERS:
            raise CutShort(f"{self._path} is damaged, or not a trace in Chrome's format")
        more = 0
        while more <= length:
            try:
                piece = next(self._texts, None)
            except CutShort:
                if not more:
                    raise
                piece = None
            if piece is None:
                break
            pieces.append(piece)
            more += len(piece)
        if not more:
            raise CutShort(f"{self._path} is cut short, or not a trace in Chrome's format")
        self._text, self._at = "".join(pieces), 0
