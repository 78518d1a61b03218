"""Entry points at which Lightning asks for callbacks. They import nothing unless they are used."""

from __future__ import annotations

import os
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_perf.callbacks.suite import EnvironmentSuite
    from lightning_perf.errors import ConfigError
    from lightning_perf.run.callback import PerfCallback

_VARIABLE = "LIGHTNING_PERF"
#: Values in a file of callbacks: aliases of aliases could make any number of them.
_MOST_VALUES = 10_000


def callbacks() -> list[Any]:
    """The callbacks that the environment variable LIGHTNING_PERF selects; none without it.

    What cannot be used gives one warning, not an error: a variable of the shell must not end a
    training that does not know of it.
    """
    return _guarded(selected)


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The same for the package pytorch_lightning, which pip may install in any version."""
    return _guarded(_selected_for_pytorch_lightning)


def _guarded(select: Callable[[], list[Any]]) -> list[Any]:
    try:
        return select()
    except Exception as error:
        from lightning_perf.errors import ConfigError, describe

        why = str(error) if isinstance(error, ConfigError) else f"{_VARIABLE}: {describe(error)}."
        _warn_once(f"{why} The training continues without lightning_perf.")
        return []


def selected() -> list[Any]:
    """The same.

    Raises:
        ConfigError: The variable names a file that cannot be used.
    """
    value = os.environ.get(_VARIABLE, "").strip()
    if value.lower() in ("", "0", "false", "no", "off"):
        return []
    return [*from_environment(value)]


def from_environment(value: str) -> list[EnvironmentSuite]:
    """The callbacks that a value of the environment variable selects.

    Args:
        value: ``1``, or a YAML file with callbacks, as LightningCLI reads it.

    Raises:
        ConfigError: The file cannot be used; the message names the variable.
    """
    from lightning_perf.callbacks.suite import EnvironmentSuite, Suite, always_on
    from lightning_perf.errors import ConfigError

    if value.lower() in ("1", "true", "yes", "on"):
        return [EnvironmentSuite(always_on().callbacks)]
    given = _read(value)
    show = not any(isinstance(each, Suite) for each in given)  # otherwise as set in the suites
    try:
        return [EnvironmentSuite(given, show)]
    except ConfigError as error:
        raise _unusable(value, error) from error


def _read(value: str) -> list[PerfCallback]:
    content = written_callbacks(value)
    from jsonargparse import ArgumentError, ArgumentParser

    from lightning_perf.run.callback import PerfCallback

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[PerfCallback])
    try:
        parsed = parser.parse_object({"callbacks": content})
        # The name until jsonargparse 4.48, and since.
        instances = (getattr(parser, "instantiate", None) or parser.instantiate_classes)(parsed)
    except (ArgumentError, ValueError, TypeError) as error:
        raise _unusable(value, error) from error
    callbacks: list[PerfCallback] = instances.callbacks
    return callbacks


def _unusable(value: str, error: Exception) -> ConfigError:
    from lightning_perf.errors import ConfigError

    why = " ".join(str(error).split()).rstrip(".")
    return ConfigError(_VARIABLE, value, f"cannot be used: {why}", None)


def written_callbacks(file: str) -> list[Any]:
    """The callbacks in a YAML file: a list, alone or under ``callbacks`` as in LightningCLI.

    Raises:
        ConfigError: There is no such file, it is not YAML, or it has no list.
    """
    import yaml  # type: ignore[import-untyped]

    from lightning_perf.errors import ConfigError
    from lightning_perf.files import read_bytes

    if not Path(file).is_file():
        problem = f"is neither 1 nor a YAML file (looked in {os.getcwd()})"  # noqa: PTH109
        raise ConfigError(_VARIABLE, file, problem, "1")
    try:
        text = read_bytes(Path(file)).decode()
        if not _values(yaml.compose(text, yaml.SafeLoader), {}) < _MOST_VALUES:
            raise ValueError(f"with its aliases it has more than {_MOST_VALUES:,} values")
        content = yaml.safe_load(text)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(_VARIABLE, file, f"cannot be used: {why}", None) from error
    for key in ("trainer", "callbacks"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    if not content or not isinstance(content, list):
        problem = "is a file without a list of callbacks"
        raise ConfigError(_VARIABLE, file, problem, "configs/always_on.yaml")
    return content


def _values(node: Any, known: dict[int, float]) -> float:
    """The values of a node of YAML if each alias is a copy; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = inf
        parts = node.value if isinstance(getattr(node, "value", None), list) else ()
        flat = (each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
        known[id(node)] = 1 + sum(_values(each, known) for each in flat)
    return known[id(node)]


@cache
def _warn_once(message: str) -> None:
    from lightning_perf.errors import warn

    warn(message)


def _selected_for_pytorch_lightning() -> list[Any]:
    chosen = selected()
    if chosen:
        from importlib.metadata import version

        installed = version("pytorch-lightning")
        # Before 2.6 they raise "Expected a parent" for callbacks of the package lightning.
        if [int(part) for part in installed.split(".")[:2]] < [2, 6]:
            _warn_once(
                f"LIGHTNING_PERF is ignored: pytorch_lightning is {installed}, not 2.6 or later"
            )
            return []
    return chosen
