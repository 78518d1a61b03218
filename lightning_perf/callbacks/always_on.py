"""The callbacks that may stay on in every run: in one line, or from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_perf.callbacks.diagnosis import Diagnosis
from lightning_perf.callbacks.flops import Flops
from lightning_perf.callbacks.speed_monitor import SpeedMonitor
from lightning_perf.callbacks.suite import Suite
from lightning_perf.callbacks.system_metrics import SystemMetrics
from lightning_perf.callbacks.timings import Timings
from lightning_perf.errors import ConfigError
from lightning_perf.run.callback import PerfCallback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_VARIABLE = "LIGHTNING_PERF"


def always_on(show_summary: bool = True) -> Suite:
    """A `Suite` of the callbacks that cost little: throughput, MFU, times, hardware, diagnosis.

    Args:
        show_summary: Whether to print the summary of the run at its end, on rank 0.

    Raises:
        ConfigError: ``show_summary`` is not a bool.

    Example:
        >>> import lightning as L
        >>> from lightning_perf import always_on
        >>> trainer = L.Trainer(callbacks=[always_on()], logger=False)
    """
    parts: list[PerfCallback] = [
        SpeedMonitor(),
        Flops(schedule="every 50ba"),
        Timings(),
        SystemMetrics(),
        Diagnosis(terminal=show_summary),
    ]
    return Suite(parts, show_summary)


class EnvironmentSuite(Suite):
    """What the environment variable LIGHTNING_PERF adds to a Trainer.

    Parts of a kind that the Trainer has already are left out, since a run has one of each kind.
    """

    def __init__(self, callbacks: list[PerfCallback], show_summary: bool = True) -> None:
        super().__init__(callbacks, show_summary)
        self._all = self.callbacks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others = [each for each in trainer.callbacks if isinstance(each, PerfCallback)]  # type: ignore[attr-defined]
        # Lightning adds to the user's list itself: a list of an earlier Trainer has its suite.
        suites = [each for each in others if isinstance(each, EnvironmentSuite)]
        repeated = suites[0] is not self
        kinds = {type(part) for each in others if each not in suites for part in each.parts}
        self.callbacks = [part for part in self._all if not (repeated or type(part) in kinds)]
        left_out = [type(part).__name__ for part in self._all if type(part) in kinds]
        if left_out and not repeated:
            names = ", ".join(left_out)
            rank_zero_info(f"{_VARIABLE}: the Trainer has its own {names}.")
        if self.callbacks:
            super().setup(trainer, pl_module, stage)


def from_environment(value: str) -> list[EnvironmentSuite]:
    """The callbacks that a value of the environment variable asks for.

    Args:
        value: ``1``, or a YAML file with callbacks, as LightningCLI reads it.

    Raises:
        ConfigError: The file cannot be used; the message names the variable.
    """
    if value.lower() in ("1", "true", "yes", "on"):
        return [EnvironmentSuite(always_on().callbacks)]
    given = _read(value)
    suites = [each for each in given if isinstance(each, Suite)]
    show = any(suite.show_summary for suite in suites) if suites else True
    try:
        parts = [part for each in given
                 for part in (each.callbacks if isinstance(each, Suite) else [each])]  # fmt: skip
        return [EnvironmentSuite(parts, show)]
    except ConfigError as error:
        raise _unusable(value, error) from error


def _read(value: str) -> list[PerfCallback]:
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import ArgumentError, ArgumentParser

    if not Path(value).is_file():
        problem = f"is neither 1 nor a YAML file (looked in {os.getcwd()})"  # noqa: PTH109
        raise ConfigError(_VARIABLE, value, problem, "1")
    try:
        content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unusable(value, error) from error
    nodes = _nodes(content)
    if not nodes:
        problem = "is a file without a list of callbacks"
        raise ConfigError(_VARIABLE, value, problem, "configs/always_on.yaml")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[PerfCallback])
    try:
        found = parser.instantiate(parser.parse_object({"callbacks": nodes}))
    except (ArgumentError, ValueError, TypeError) as error:
        raise _unusable(value, error) from error
    callbacks: list[PerfCallback] = found.callbacks
    return callbacks


def _nodes(content: Any) -> Any:
    """The callbacks of a file: those of a Trainer, under ``callbacks``, or the whole file."""
    for key in ("trainer", "callbacks"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return content if isinstance(content, list) else None


def _unusable(value: str, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())
    return ConfigError(_VARIABLE, value, f"cannot be used: {why}", None)
