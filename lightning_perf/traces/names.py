"""Names of trace files: format strings, checked at construction and safe when rendered."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath, PureWindowsPath
from string import Formatter
from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.traces.uploads import split_url, url_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_perf.core.progress import Ranks, Timestamp

Value = str | int | float

_FILE_EXAMPLE = "'rank{rank}.{batch}.json'"
_URL_EXAMPLE = "'s3://bucket/{run_name}/rank{rank}.{batch}.json'"

#: Known when a run starts.
FOLDER_VARIABLES = (
    "run_name",
    "rank",
    "local_rank",
    "world_size",
    "local_world_size",
    "node_rank",
)
#: They only grow, so they tell which of two traces is the later one.
TOTALS = ("epoch", "batch", "sample", "token", "step", "total_wct")
#: They start again with each epoch.
IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch", "epoch_wct")
TIME_VARIABLES = (*TOTALS, *IN_EPOCH, "batch_wct")
FILE_VARIABLES = (*FOLDER_VARIABLES, "stage", *TIME_VARIABLES)

# Seconds are floats, everything else is counted; padding with spaces can be read back, too.
_COUNT = r" *(\d+) *"
_SECONDS = r" *(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *"
# Separators and what is no character of a name: controls, line breaks, lone surrogates.
_UNSAFE = re.compile(
    r"[/\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff%s]" % (":" if os.name == "nt" else "")
)


class NameFormat:
    """A format string for file or folder names.

    Args:
        pattern: The format string, with ``/`` between folders.
        field: The setting that it comes from, for messages.
        variables: The names that may stand in braces.
        example: A pattern that works, for messages.

    Raises:
        ConfigError: If the pattern is empty, names an unknown variable, has a format specification
            that does not fit or that cannot be read back, or has a part ``..``.

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
        self._field, self._value, self._example = field, pattern, example
        if not isinstance(pattern, str) or not pattern.strip():
            raise self._error("is not a format string of at least one character")
        self._parts = self._parse(pattern, variables)
        self._check_values()

    def render(self, values: Mapping[str, Value]) -> str:
        """The name for these values, none of which can add a folder or leave one.

        Args:
            values: A value for each variable of the pattern; others are ignored.

        Returns:
            The name, with ``/`` between folders.
        """
        texts = (
            literal + (_safe(format(values[name], spec)) if name else "")
            for literal, name, spec in self._parts
        )
        return PurePosixPath("".join(texts)).as_posix()

    def read(self, name: str, fixed: Mapping[str, Value]) -> dict[str, float] | None:
        """The numbers that stand in a name for variables of time.

        Args:
            name: A name, with ``/`` between folders.
            fixed: The values of all other variables.

        Returns:
            Numbers by variable, or None if the name is not of this pattern and these values.
        """
        times = [variable for _, variable, _ in self._parts if variable in TIME_VARIABLES]
        groups = [
            re.escape(literal) + (self._group(variable, spec, fixed) if variable else "")
            for literal, variable, spec in self._parts
        ]
        found = re.fullmatch("".join(groups), name)
        return None if found is None else dict(zip(times, map(float, found.groups()), strict=True))

    @property
    def depth(self) -> int:
        """How many folders stand before the file's own name."""
        return sum(literal.count("/") for literal, _, _ in self._parts)

    @property
    def is_absolute(self) -> bool:
        """Whether the name begins at the root of a file system or at a drive."""
        return bool(PureWindowsPath(self._parts[0][0]).anchor)

    @staticmethod
    def _group(variable: str, spec: str, fixed: Mapping[str, Value]) -> str:
        if variable in TIME_VARIABLES:
            return _SECONDS if variable.endswith("_wct") else _COUNT
        return re.escape(_safe(format(fixed[variable], spec)))

    def _parse(self, pattern: str, variables: tuple[str, ...]) -> list[tuple[str, str, str]]:
        try:
            parsed = list(Formatter().parse(PurePosixPath(pattern).as_posix()))
        except ValueError as error:
            raise self._error(f"is not a format string ({error})") from None
        for _, name, _, conversion in parsed:
            asked = f"{name}!{conversion}" if conversion else name
            if asked is not None and asked not in variables:
                known = " ".join(variables)
                raise self._error(f"has {{{asked}}}, which is not one of the variables {known}")
        return [(literal, name or "", spec or "") for literal, name, spec, _ in parsed]

    def _check_values(self) -> None:
        """Refuse what no value could make a name within the folder, or a readable number."""
        for _, name, spec in self._parts:
            sample: Value = 36000.5 if name.endswith("_wct") else 1234567
            sample = "a" if name in ("", "run_name", "stage") else sample
            try:
                text = format(sample, spec)
            except (ValueError, OverflowError) as error:
                raise self._error(f"formats {name} as {spec!r} ({error})") from None
            if name in TIME_VARIABLES and not re.fullmatch(self._group(name, spec, {}), text):
                raise self._error(
                    f"writes {name} as {text!r}, which a later run cannot read as a number"
                )
        literals = "a".join(literal for literal, _, _ in self._parts)
        if ".." in PureWindowsPath(literals).parts:
            raise self._error("leaves its folder by '..'")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(self._field, self._value, problem, self._example)


def folder_format(pattern: str, field: str = "folder") -> NameFormat:
    """A folder's name; it may be absolute, because that is the user's explicit choice.

    Args:
        pattern: A format string over `FOLDER_VARIABLES`.
        field: The setting that it comes from.

    Raises:
        ConfigError: As `NameFormat`.
    """
    return NameFormat(pattern, field, FOLDER_VARIABLES, "'{run_name}/torch_traces'")


def file_format(pattern: str, field: str = "filename", gz: bool = False) -> NameFormat:
    """A file's name within its folder.

    Args:
        pattern: A format string over `FILE_VARIABLES`.
        field: The setting that it comes from.
        gz: Whether the file is compressed, so that ``.gz`` is appended once.

    Raises:
        ConfigError: As `NameFormat`, and if the name is absolute or that of a folder.
    """
    name = NameFormat(pattern, field)
    if name.is_absolute:
        raise ConfigError(field, pattern, "leaves its folder", _FILE_EXAMPLE)
    if pattern.endswith(("/", "\\")) or not PurePosixPath(pattern).name:
        raise ConfigError(field, pattern, "names no file", _FILE_EXAMPLE)
    return NameFormat(with_gz(pattern), field) if gz else name


def remote_format(pattern: str, field: str = "remote_file_name", gz: bool = False) -> NameFormat:
    """A file's name where it is uploaded to; slashes in front are stripped.

    Args:
        pattern: A format string over `FILE_VARIABLES`; of a URL, what stands below the host or
            bucket is the name.
        field: The setting that it comes from.
        gz: Whether the file is compressed, so that ``.gz`` is appended once.

    Raises:
        ConfigError: As `file_format`, and for a URL that names no single store.
    """
    if not isinstance(pattern, str):
        return file_format(pattern, field)
    if (problem := url_problem(pattern)) is not None:
        raise ConfigError(field, pattern, problem, _URL_EXAMPLE)
    try:
        return file_format(split_url(pattern)[2].lstrip("/"), field, gz)
    except ConfigError as error:
        raise ConfigError(field, pattern, error.problem, error.example) from None


def with_gz(name: str) -> str:
    """The name of the compressed file: ``.gz`` is appended once.

    Args:
        name: A file's name, or a format string for it.

    Example:
        >>> with_gz("trace.json"), with_gz("trace.json.gz")
        ('trace.json.gz', 'trace.json.gz')
    """
    return name if name.endswith(".gz") else f"{name}.gz"


def numbered(name: str, number: int) -> str:
    """A name with a number before its first dot, so that viewers still know its suffixes.

    Args:
        name: A file's name, with folders or without.
        number: 1 leaves the name as it is.

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
    """The values of `FOLDER_VARIABLES`.

    Args:
        run_name: Any text; what cannot stand in a name is replaced by ``_`` when rendered.
        ranks: Where this process stands.
    """
    return {
        "run_name": run_name,
        "rank": ranks.global_rank,
        "local_rank": ranks.local_rank,
        "world_size": ranks.world_size,
        "local_world_size": ranks.local_world_size,
        "node_rank": ranks.node_rank,
    }


def time_values(timestamp: Timestamp) -> dict[str, Value]:
    """The values of `TIME_VARIABLES`: counts, and wall-clock times in seconds.

    Args:
        timestamp: The time that the name tells.
    """
    return {name: getattr(timestamp, name) for name in TIME_VARIABLES}


def _safe(text: str) -> str:
    text = _UNSAFE.sub("_", text)
    return text if text.strip(".") else "_"
