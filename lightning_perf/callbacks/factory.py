"""Entry points at which Lightning asks for callbacks. They import nothing unless they are used."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_perf.callbacks.suite import EnvironmentSuite
    from lightning_perf.run.callback import PerfCallback

#: Environment variables: set by users, and by ``lightning-perf try`` for its processes.
_VARIABLE, _TRIAL = "LIGHTNING_PERF", "LIGHTNING_PERF_TRIAL"
#: Levels of lists and mappings in a file of callbacks.
_DEEPEST = 50


def callbacks() -> list[Any]:
    """The callbacks that the environment variable LIGHTNING_PERF selects; none without it.

    What cannot be used gives one warning, not an error: a variable of the shell must not end a
    training that does not know of it.
    """
    return _without_errors(selected)


def callbacks_of_pytorch_lightning() -> list[Any]:
    """As `callbacks`, for Trainers of the package pytorch_lightning."""
    return _without_errors(_accepted)


def _without_errors(select: Callable[[], list[Any]]) -> list[Any]:
    try:
        return select()
    except Exception as error:
        from lightning_perf.errors import ConfigError, describe, let_through

        let_through(error)
        why = str(error) if isinstance(error, ConfigError) else f"{_VARIABLE}: {describe(error)}."
        _warn_once(f"{why} The training run continues without lightning_perf.")
        return []


def _accepted() -> list[Any]:
    """The callbacks that a Trainer of pytorch_lightning accepts."""
    chosen, other = selected(), sys.modules["pytorch_lightning"]
    # Before 2.6 its Trainer raises "Expected a parent" for callbacks that are not its own. Builds
    # of a company may have a version that packaging does not read.
    old = [int(part) for part in re.findall(r"\d+", other.__version__)[:2]] < [2, 6]
    if chosen and old and _TRIAL not in os.environ and not isinstance(chosen[0], other.Callback):
        _warn_once(
            f"{_VARIABLE} is ignored: pytorch_lightning {other.__version__} was imported after "
            "lightning_perf: import it first, or update it to 2.6."
        )
        return []
    return chosen


def selected() -> list[Any]:
    """The callbacks that the environment variables select.

    Raises:
        ConfigError: The variable names a file that cannot be used.
    """
    if file := os.environ.get(_TRIAL):
        return _of_trial(file)
    value = os.environ.get(_VARIABLE, "").strip()
    return [] if value.lower() in ("", "0", "false", "no", "off") else [from_environment(value)]


@cache
def _of_trial(file: str) -> list[Any]:
    """The callbacks of a process that ``lightning-perf try`` has started, the same ones always."""
    try:
        from lightning_perf.callbacks.suite import EnvironmentSuite, always_on
        from lightning_perf.trials.trial import joined

        trial = joined(file)
        if trial.diagnoses:
            callbacks = always_on(show_summary=False).callbacks
            trial.suite = EnvironmentSuite(callbacks, show_summary=False)
    except Exception as error:  # without the trial, this would be a whole training
        print(f"lightning_perf: the trial cannot start: {error}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
        os._exit(1)
    return [trial, trial.suite] if trial.diagnoses else [trial]


@cache
def _warn_once(message: str) -> None:
    from lightning_perf.errors import warn

    warn(message)


def from_environment(value: str) -> EnvironmentSuite:
    """The callbacks that a value of the environment variable selects.

    Args:
        value: ``1``, or a YAML file with callbacks, as LightningCLI reads it.

    Raises:
        ConfigError: The file cannot be used; the message names the variable.
    """
    from lightning_perf.callbacks.suite import EnvironmentSuite, Suite, always_on
    from lightning_perf.errors import ConfigError

    if value.lower() in ("1", "true", "yes", "on"):
        return EnvironmentSuite(always_on().callbacks)
    if not Path(value).is_file():
        problem = f"is neither 1 nor a YAML file (looked in {os.getcwd()})"  # noqa: PTH109
        raise ConfigError(_VARIABLE, value, problem, "1")
    try:
        given = _instances(_listed(Path(value)))
        show = not any(isinstance(each, Suite) for each in given)  # otherwise as set in the suites
        return EnvironmentSuite(given, show)
    except Exception as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(_VARIABLE, value, f"cannot be used: {why}", None) from error


def _listed(file: Path) -> list[Any]:
    """The callbacks in a YAML file: a list, alone or under ``callbacks`` as in LightningCLI."""
    import yaml  # type: ignore[import-untyped]

    from lightning_perf.files import read_bytes

    text = read_bytes(file).decode()
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            # Aliases of aliases could make any number of values.
            raise ValueError("it has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:  # parsing takes long then
            raise ValueError("it is nested too deeply")
    content = yaml.safe_load(text)
    for key in ("trainer", "callbacks"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    if not content or not isinstance(content, list):
        raise ValueError("it is a file without a list of callbacks")
    return content


def _instances(listed: list[Any]) -> list[PerfCallback]:
    from jsonargparse import ArgumentParser

    from lightning_perf.run.callback import PerfCallback

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[PerfCallback])
    parsed = parser.parse_object({"callbacks": listed})
    # The name until jsonargparse 4.48, and since.
    instances = (getattr(parser, "instantiate", None) or parser.instantiate_classes)(parsed)
    callbacks: list[PerfCallback] = instances.callbacks
    return callbacks
