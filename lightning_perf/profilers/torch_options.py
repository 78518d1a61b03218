"""What users write for arguments of torch.profiler that YAML cannot hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import _ExperimentalConfig as ExperimentalConfig  # type: ignore[attr-defined]

from lightning_perf.errors import ConfigError
from lightning_perf.profilers.tools import given

_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}


def torch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``torch.profiler.profile``, with names and mappings made what torch takes.

    Args:
        options: As the user gave them, those that are None left out.

    Raises:
        ConfigError: An activity or an experimental option that torch does not know.

    Example:
        >>> torch_options({"activities": ["cpu"], "acc_events": None})
        {'activities': [<ProfilerActivity.CPU: 0>]}
    """
    made = given(options)
    if "activities" in made:
        made["activities"] = _activities(made["activities"])
    if isinstance(config := made.get("experimental_config"), Mapping):
        unknown = {key: value for key, value in config.items() if not _is_taken({key: value})}
        if unknown:
            problem = f"holds {unknown}, which torch {torch.__version__} does not take"
            raise ConfigError("experimental_config", config, problem, "{'verbose': True}")
        made["experimental_config"] = ExperimentalConfig(**config)
    return made


def _is_taken(config: Mapping[str, Any]) -> bool:
    """Whether this torch knows an experimental option: they differ from release to release."""
    try:
        ExperimentalConfig(**config)
    except TypeError:
        return False
    return True


def _activities(named: Any) -> list[Any]:
    """Activities, or mappings from them to what they shall collect."""
    if isinstance(named, str) or not isinstance(named, Iterable):
        raise _unknown(named)
    return [
        {_activity(name, named): types for name, types in item.items()}
        if isinstance(item, Mapping)
        else _activity(item, named)
        for item in named
    ]


def _activity(name: Any, given: Any) -> ProfilerActivity:
    if isinstance(name, ProfilerActivity):
        return name
    try:
        return _ACTIVITIES[name.lower()]
    except (AttributeError, KeyError):
        raise _unknown(given) from None


def _unknown(value: Any) -> ConfigError:
    problem = f"is no list of activities out of {', '.join(_ACTIVITIES)}"
    return ConfigError("activities", value, problem, "['cpu', 'cuda']")
