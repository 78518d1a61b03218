"""Names of trace files: format strings, checked at construction and safe when rendered."""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from hashlib import sha256
from pathlib import PurePosixPath, PureWindowsPath
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lightning_perf.core.progress import Ranks, Timestamp

Value = str | int | float

_FILE_EXAMPLE = "'rank{rank}.{batch}.json'"
_URL_EXAMPLE = "'s3://bucket/{run_name}/rank{rank}.{batch}.json'"

#: Constant during a run.
RANK_VARIABLES = ("local_rank", "world_size", "local_world_size", "node_rank")
FOLDER_VARIABLES = ("run_name", "rank", *RANK_VARIABLES)
#: These only grow, so they order traces in time.
TOTALS = ("epoch", "batch", "sample", "token", "step", "total_wct")
#: These restart with each epoch.
IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_wct")
TIME_VARIABLES = (*TOTALS, *IN_EPOCH, "batch_wct")
FILE_VARIABLES = (*FOLDER_VARIABLES, "stage", *TIME_VARIABLES)

# Seconds are floats, all others are integers; a format specification may pad with spaces.
_COUNT = r" *(\d+) *"
_SECONDS = r" *(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *"
# Separators, characters that a file name cannot have (controls, line breaks, surrogates), and those
# that MLflow's server refuses or decodes.
_UNSAFE = re.compile(
    r"[/\\#%%\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff%s]" % (":" if os.name == "nt" else "")
)
#: Bytes of a value: file systems take 255 for a name, which may have more parts.
_LONGEST = 200


class _Part(NamedTuple):
    """Text, and the variable after it with its format specification; the last may have none."""

    literal: str
    variable: str
    spec: str

    def render(self, values: Mapping[str, Value]) -> str:
        return self.literal + (self.value(values) if self.variable else "")

    def value(self, values: Mapping[str, Value]) -> str:
        return safe(format(values[self.variable], self.spec))

    def pattern(self, fixed: Mapping[str, Value]) -> str:
        """The regular expression of the variable, with a group for a time."""
        if self.variable in TIME_VARIABLES:
            return _SECONDS if self.variable.endswith("_wct") else _COUNT
        return re.escape(self.value(fixed)) if self.variable else ""


class NameFormat:
    """A format string for file or folder names, with ``/`` between folders.

    ``field`` is the name of the setting and ``example`` a valid pattern, for messages. Refuses a
    pattern that is empty, uses an unknown variable, has an invalid or unreadable format
    specification, or has a part ``..``.

    Example:
        >>> NameFormat("ep{epoch}-ba{batch:06d}.json").render({"epoch": 1, "batch": 42})
        'ep1-ba000042.json'
    """

    def __init__(
        self,
        pattern: str,
        field: str = "filename",
        variables: tuple[str, ...] = FILE_VARIABLES,
        example: str = _FILE_EXAMPLE,
    ) -> None:
        self._error = partial(ConfigError, field, pattern, example=example)
        if not isinstance(pattern, str) or not pattern.strip() or "\0" in pattern:
            raise self._error("must be a format string of at least one character, without NUL")
        self._parts = self._parse(pattern, variables)
        self._check_values()

    def render(self, values: Mapping[str, Value]) -> str:
        """The name for these values; see `safe`."""
        return PurePosixPath("".join(part.render(values) for part in self._parts)).as_posix()

    def read(self, name: str, fixed: Mapping[str, Value]) -> dict[str, float] | None:
        """The numbers of the time variables in a name, or None if it does not match.

        ``fixed`` has the values of all other variables.
        """
        times = [part.variable for part in self._parts if part.variable in TIME_VARIABLES]
        pattern = "".join(re.escape(part.literal) + part.pattern(fixed) for part in self._parts)
        match = re.fullmatch(pattern, name)
        return None if match is None else dict(zip(times, map(float, match.groups()), strict=True))

    @property
    def depth(self) -> int:
        """The number of folders before the file name."""
        return sum(part.literal.count("/") for part in self._parts)

    def _parse(self, pattern: str, variables: tuple[str, ...]) -> list[_Part]:
        try:
            parsed = list(Formatter().parse(PurePosixPath(pattern).as_posix()))
        except ValueError as error:
            raise self._error(f"is not a format string ({error})") from None
        for _, name, _, conversion in parsed:
            variable = f"{name}!{conversion}" if conversion else name
            if variable is not None and variable not in variables:
                known = " ".join(variables)
                raise self._error(f"has {{{variable}}}, which is not one of the variables {known}")
        return [_Part(literal, name or "", spec or "") for literal, name, spec, _ in parsed]

    def _check_values(self) -> None:
        """Refuse format specifications that fail or cannot be parsed back, and ``..``."""
        for part in self._parts:
            _, name, spec = part
            sample: Value = 36000.5 if name.endswith("_wct") else 1234567
            sample = "a" if name in ("", "run_name", "stage") else sample
            if re.search(r"\d{4}", spec):  # rendering it would take gigabytes
                raise self._error(f"formats {name} as {spec!r}, wider than a file name")
            try:
                text = format(sample, spec)
            except (ValueError, OverflowError) as error:
                raise self._error(f"formats {name} as {spec!r} ({error})") from None
            if name in TIME_VARIABLES and not re.fullmatch(part.pattern({}), text):
                raise self._error(
                    f"writes {name} as {text!r}, which a later run cannot read as a number"
                )
        names = "".join(part.literal for part in self._parts).split("/")
        if any(len(name.encode(errors="replace")) > _LONGEST for name in names):
            raise self._error(f"has a name of more than {_LONGEST} bytes")
        literals = "a".join(part.literal for part in self._parts)
        if ".." in PureWindowsPath(literals).parts:
            raise self._error("leaves its folder by '..'")


def folder_format(pattern: str) -> NameFormat:
    """The format of a folder, which may be absolute."""
    return NameFormat(pattern, "folder", FOLDER_VARIABLES, "'{run_name}/torch_traces'")


def file_format(pattern: str, field: str = "filename", gz: bool = False) -> NameFormat:
    """The format of file names within their folder, ending with ``.gz`` once if ``gz``."""
    name = NameFormat(pattern, field)
    if PureWindowsPath(pattern).anchor:
        raise ConfigError(field, pattern, "leaves its folder", _FILE_EXAMPLE)
    if pattern.endswith(("/", "\\")) or not PurePosixPath(pattern).name:
        raise ConfigError(field, pattern, "has no file name", _FILE_EXAMPLE)
    return NameFormat(f"{pattern.removesuffix('.gz')}.gz", field) if gz else name


def remote_format(pattern: str, field: str = "remote_file_name", gz: bool = False) -> NameFormat:
    """As `file_format`, for the upload target: without leading slashes; a URL gives its path."""
    if not isinstance(pattern, str):
        return file_format(pattern, field)
    if (problem := _url_problem(pattern)) is not None:
        raise ConfigError(field, pattern, problem, _URL_EXAMPLE)
    try:
        return file_format(split_url(pattern).path.lstrip("/"), field, gz)
    except ConfigError as error:
        raise ConfigError(field, pattern, error.problem, error.example) from None


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)


class Url(NamedTuple):
    """The parts of a URL; a plain name has a path only."""

    protocol: str
    #: A host or a bucket.
    host: str
    #: Without leading slashes.
    path: str


def split_url(name: str) -> Url:
    """The parts of a URL, or of a name, which is the path unchanged.

    Example:
        >>> split_url("s3://bucket/traces/{run_name}.json")
        Url(protocol='s3', host='bucket', path='traces/{run_name}.json')
        >>> split_url("/a/long/path").path
        '/a/long/path'
    """
    match = _URL.fullmatch(name)
    return Url("", "", name) if match is None else Url(*match.groups())


def _url_problem(name: str) -> str | None:
    """Why a remote name is not a valid URL, as a clause; None if it is valid or not a URL."""
    protocol, host, path = split_url(name)
    if not protocol:
        return "is neither a name nor the URL of a store" if "://" in name else None
    if "{" in host:
        return "has a variable in its host or bucket"
    if "::" in name or "://" in path:
        return "is a chain of URLs"
    if "?" in name:
        return "has a query, which may hold a secret: give that in fsspec's own settings"
    if protocol in ("file", "local") and host:
        return f"is not absolute: {protocol}:// must be followed by a third slash"
    return None


def numbered(name: str, number: int) -> str:
    """Insert a number other than 1 before the first dot of a file name, so that its suffixes stay.

    Example:
        >>> numbered("traces/rank0.43.json.gz", 2)
        'traces/rank0-2.43.json.gz'
    """
    if number == 1:
        return name
    path = PurePosixPath(name)
    stem, dot, suffixes = path.name.partition(".")
    return str(path.with_name(f"{stem}-{number}{dot}{suffixes}"))


def run_values(run_name: str, ranks: Ranks) -> dict[str, Value]:
    """The values of `FOLDER_VARIABLES`; `run_name` may hold any characters."""
    own = {name: getattr(ranks, name) for name in RANK_VARIABLES}
    return {"run_name": run_name, "rank": ranks.global_rank, **own}


def time_values(timestamp: Timestamp) -> dict[str, Value]:
    """The values of `TIME_VARIABLES`: counts, and wall-clock times in seconds."""
    return {name: getattr(timestamp, name) for name in TIME_VARIABLES}


def safe(value: str) -> str:
    """A value as a part of a name, on the disk and in MLflow: the one place that changes values.

    What is not allowed becomes ``_``. A long value is cut, and ends with a hash of the whole value.
    """
    text = _UNSAFE.sub("_", value)
    text = re.sub(r"^(?:\.{2,}|\.$)", "_", text) or "_"
    text = re.sub(r"^([a-z]|file):", r"\1_", text, flags=re.IGNORECASE)
    if len(encoded := text.encode()) > _LONGEST:
        digest = sha256(value.encode(errors="replace")).hexdigest()[:8]
        text = f"{encoded[: _LONGEST - 9].decode(errors='ignore')}-{digest}"
    return text


class TakenNames:
    """The paths that were given to files of a run: two writers may have names that render alike."""

    def __init__(self) -> None:
        # The last number that each path got.
        self._numbers: dict[str, int] = {}
        self._lock = threading.RLock()

    def take(self, path: Path, most: int) -> int:
        """The first number with which neither a file nor an earlier trace has the path.

        After ``most`` other names, a name whose file was deleted may be given again.
        """
        with self._lock:
            plain = str(path)  # a path takes four times the memory
            number = self._numbers.pop(plain, 0) + 1
            # Another trace in progress may have this name with a number.
            while (full := str(path.with_name(numbered(path.name, number)))) in self._numbers or (
                os.path.lexists(full)
            ):
                number += 1
            self._numbers[full] = 1
            self._numbers[plain] = number
            while len(self._numbers) > most:
                del self._numbers[next(iter(self._numbers))]
            return number
