"""The tools behind the profilers: options, installation, and programs that process their files."""

from __future__ import annotations

import gc
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

from lightning_perf.background.worker import wait_until
from lightning_perf.checks import flag, whole
from lightning_perf.errors import ConfigError, describe

#: Bytes at the end of a JSON file that hold its last brace.
_END = 16
#: Seconds that a program may take.
_TIMEOUT = 300.0


def defaults(tool: Any) -> dict[str, Any]:
    """The arguments of a tool with their defaults; None where there is no default.

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
    """Refuse unknown options, and values of the wrong kind for a bool or an int.

    Args:
        profiler: The class of the profiler.
        options: Its ``**kwargs``.
        known: The arguments of the tool, with their defaults.
        tool: The name of the tool.

    Raises:
        ConfigError: Suggests the most similar option.

    Example:
        >>> class Tracer: ...
        >>> check_options(Tracer, {"log_gz": True}, {"log_gc": False}, "viztracer")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: log_gz=True is not an option of Tracer: did you mean \
log_gc?
    """
    for name, value in given(options).items():
        if name not in known:
            own = set(signature(profiler).parameters) - {"kwargs"}
            near = get_close_matches(name, sorted({*known, *own}), n=1)
            hint = (
                f": did you mean {near[0]}?" if near else f"; {tool} has {', '.join(sorted(known))}"
            )
            raise ConfigError(name, value, f"is not an option of {profiler.__name__}{hint}", None)
        if isinstance(known[name], bool):
            flag(name, value)
        elif isinstance(known[name], int) and not isinstance(value, float):
            whole(name, value, min(known[name], 1), str(known[name]))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are set: LightningCLI passes all arguments of the tool, as None."""
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def blaming(options: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of a tool about its options into a ``ConfigError``.

    Raises:
        ConfigError: The tool raised ``TypeError`` or ``ValueError``.

    Example:
        >>> with blaming({"min_duration": "x"}):
        ...     raise TypeError("min_duration must be a float")
        Traceback (most recent call last):
        lightning_perf.errors.ConfigError: options={'min_duration': 'x'} was refused \
(TypeError: min_duration must be a float).
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not options:
            raise
        problem = f"was refused ({describe(error)})"
        raise ConfigError("options", dict(options), problem, None) from error


def installed(module: str) -> bool:
    """Whether a package is installed; does not import it."""
    return find_spec(module) is not None


def require(profiler: object, module: str) -> None:
    """Refuse to start a run if a package is not installed.

    Raises:
        ConfigError: With the command that installs it.
    """
    if not installed(module):
        problem = f"needs {module}, which is not installed: pip install {module}"
        raise ConfigError("callbacks", type(profiler).__name__, problem, None)


def check_whole(path: Path) -> None:
    """Refuse a truncated JSON file, which tools leave without an error on a full disk.

    Raises:
        OSError: The file does not end with ``}``, or does not exist.

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
        file.seek(-min(_END, path.stat().st_size), os.SEEK_END)
        if not file.read().rstrip().endswith(b"}"):
            raise OSError("the file was cut short: is the disk full?")


@contextmanager
def no_collection(timeout: float = 5.0) -> Iterator[None]:
    """Disable garbage collection while a profiler starts or stops.

    memray and torch (``with_stack``) walk the stacks of all threads, and torch hooks them. If a
    collection runs Python code meanwhile, on this thread or as another one enters a function, the
    profiler reads frames and hooks that no longer exist: the process crashes.

    Args:
        timeout: Seconds to wait at most until a collection on another thread has ended.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        wait_until(_nothing_collects, timeout)
        yield
    finally:
        if enabled:
            gc.enable()


def _nothing_collects() -> bool:
    # While another thread collects, gc.collect() returns without calling the callbacks.
    ran: list[str] = []

    def note(phase: str, _: object) -> None:
        ran.append(phase)

    gc.callbacks.append(note)
    gc.collect(0)
    gc.callbacks.remove(note)
    return bool(ran)


def run_python(*arguments: str) -> str:
    """Run a Python program in a process of its own, so that training keeps the GIL.

    Args:
        *arguments: As after ``python`` on the command line.

    Returns:
        The standard output.

    Raises:
        OSError: It failed, with the end of its error message.
        TimeoutExpired: It took longer than five minutes.
    """
    done = subprocess.run(  # noqa: S603  (our own arguments, and no shell)
        [sys.executable, "-P", *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        program = " ".join(arguments[:3])
        raise OSError(f"{program}: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout
