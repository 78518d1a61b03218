"""What recorders ask of the tools that they drive: are they here, are they free, what they take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from lightning_perf.checks import flag, whole
from lightning_perf.errors import ConfigError, RecorderBusy, describe

#: Bytes in which a file of JSON ends, blanks included.
_LAST = 16
#: What a tracker is called that somebody else has started.
FOREIGN_MEMRAY = "a memray that is not ours"
#: Seconds that the making of one file may take.
_PATIENCE = 300.0


def defaults(tool: Any) -> dict[str, Any]:
    """The arguments of a tool, with what they are by default.

    Args:
        tool: Its class.

    Example:
        >>> def profile(activities=None, with_modules=False): ...
        >>> defaults(profile)
        {'activities': None, 'with_modules': False}
    """
    arguments = signature(tool).parameters.values()
    return {
        each.name: None if each.default is Parameter.empty else each.default for each in arguments
    }


def check_options(
    profiler: type, options: Mapping[str, Any], known: Mapping[str, Any], tool: str
) -> None:
    """Refuse options that the tool does not know, with the nearest one that is known.

    Where the tool has a switch or a whole number, the option must be one, too.

    Args:
        profiler: The class that was given the options.
        options: What it was given beyond its own arguments.
        known: What the tool takes, with its defaults.
        tool: Its name.

    Raises:
        ConfigError: An option of another name or kind.

    Example:
        >>> class Tracer: ...
        >>> check_options(Tracer, {"log_gz": True}, {"log_gc": False}, "viztracer")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: log_gz=True is no option of Tracer: did you mean log_gc?
    """
    for name, value in options.items():
        # LightningCLI sees through to the tool's arguments, and hands all of them over.
        if value is None:
            continue
        if name not in known:
            near = get_close_matches(name, sorted({*known, *_own_arguments(profiler)}), n=1)
            told = f"; {tool} has {', '.join(sorted(known))}"
            told = f": did you mean {near[0]}?" if near else told
            raise ConfigError(name, value, f"is no option of {profiler.__name__}{told}", None)
        if isinstance(known[name], bool):
            flag(name, value)
        elif isinstance(known[name], int) and not isinstance(value, float):
            whole(name, value, min(known[name], 1), str(known[name]))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those that LightningCLI wrote down as None."""
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def blaming(options: Mapping[str, Any]) -> Iterator[None]:
    """Tell what a tool does not take as what it is: an error of who gave it.

    Args:
        options: What the user gave the tool.

    Raises:
        ConfigError: The tool raised ``TypeError`` or ``ValueError``.

    Example:
        >>> with blaming({"min_duration": "x"}):
        ...     raise TypeError("min_duration must be a float")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: options={'min_duration': 'x'} was not taken \
(TypeError: min_duration must be a float).
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not options:
            raise
        problem = f"was not taken ({describe(error)})"
        raise ConfigError("options", dict(options), problem, None) from error


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
    other = python_profiler()
    if other is not None:
        raise RecorderBusy(type(profiler).__name__, other, "remove one of the two")


def python_profiler() -> str | None:
    """What traces Python's calls on this thread, or None.

    From Python 3.12 on profilers such as cProfile register with ``sys.monitoring`` and do not set
    the hook of ``sys.setprofile``.
    """
    hook = sys.getprofile()
    if type(hook).__module__.partition(".")[0] == "memray":  # before 1.17 or so it takes the hook
        return FOREIGN_MEMRAY
    if hook is None and sys.version_info >= (3, 12):
        hook = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
    return None if hook is None else "a profiler of Python's calls"


def _own_arguments(profiler: type) -> set[str]:
    return set(signature(profiler).parameters) - {"kwargs"}
