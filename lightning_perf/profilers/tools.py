"""What recorders ask of the tools that they drive: are they here, are they free, what they take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from lightning_perf.errors import ConfigError, RecorderBusy

#: Bytes in which a file of JSON ends, blanks included.
_LAST = 16
#: Seconds that the making of one file may take.
_PATIENCE = 300.0


def check_options(
    profiler: type, options: Mapping[str, Any], known: Iterable[str], tool: str
) -> None:
    """Refuse options that the tool does not know, with the nearest one that is known.

    Args:
        profiler: The class that was given the options.
        options: What it was given beyond its own arguments.
        known: What the tool takes.
        tool: Its name.

    Raises:
        ConfigError: An option of another name.

    Example:
        >>> class Tracer: ...
        >>> check_options(Tracer, {"log_gz": True}, ["log_gc"], "viztracer")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: log_gz=True is no option of Tracer: did you mean log_gc?
    """
    known = set(known)
    for name, value in options.items():
        # LightningCLI sees through to the tool's arguments, and hands all of them over.
        if name not in known and value is not None:
            near = get_close_matches(name, sorted(known | _own_arguments(profiler)), n=1)
            told = f"; {tool} has {', '.join(sorted(known))}"
            told = f": did you mean {near[0]}?" if near else told
            raise ConfigError(name, value, f"is no option of {profiler.__name__}{told}", None)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that LightningCLI wrote down as None."""
    return {name: value for name, value in options.items() if value is not None}


def installed(module: str) -> bool:
    """Whether a tool's package is there, without importing it."""
    return find_spec(module) is not None


def check_whole(path: Path) -> None:
    """Refuse a file of JSON that was cut short, which its tool did not tell.

    Args:
        path: A file that holds one object.

    Raises:
        OSError: It does not end as an object does, or is not there.

    Example:
        >>> from tempfile import NamedTemporaryFile
        >>> with NamedTemporaryFile() as file:
        ...     _ = file.write(b'{"traceEvents": [')
        ...     file.flush()
        ...     check_whole(Path(file.name))
        Traceback (most recent call last):
        OSError: the file was cut short: is the disk full?
    """
    with path.open("rb") as file:
        file.seek(-min(_LAST, path.stat().st_size), os.SEEK_END)
        if not file.read().rstrip().endswith(b"}"):
            raise OSError("the file was cut short: is the disk full?")


def require(profiler: object, module: str) -> None:
    """Refuse to start a run without the tool.

    Args:
        profiler: Who needs it.
        module: The tool's package.

    Raises:
        ConfigError: It is not installed.
    """
    if not installed(module):
        problem = f"needs {module}, which is not installed: pip install {module}"
        raise ConfigError("callbacks", type(profiler).__name__, problem, None)


def run_python(*arguments: str) -> str:
    """Run a Python program in a process of its own: here it would hold the interpreter's lock.

    Args:
        *arguments: As after ``python`` on the command line.

    Returns:
        What it printed.

    Raises:
        OSError: It failed, with the last thing that it said.
        TimeoutExpired: It took longer than five minutes.
    """
    done = subprocess.run(  # noqa: S603  (our own arguments, and no shell)
        [sys.executable, "-P", *arguments],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        program = " ".join(arguments[:3])
        raise OSError(f"{program}: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout


def refuse_python_profiler(profiler: object) -> None:
    """Refuse to record while something else traces Python's calls: there is one hook for it.

    Args:
        profiler: Who is about to record.

    Raises:
        RecorderBusy: The hook is taken, by cProfile or by a VizTracer that is not ours.
    """
    if sys.version_info >= (3, 12):
        taken = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None
    else:
        taken = False
    if taken or sys.getprofile() is not None:
        remedy = "remove one of the two"
        raise RecorderBusy(type(profiler).__name__, "a profiler of Python's calls", remedy)


def _own_arguments(profiler: type) -> set[str]:
    return set(signature(profiler).parameters) - {"kwargs"}
