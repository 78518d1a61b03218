"""The trackers that are installed: MLflow's, and those of other packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import describe, warn
from lightning_perf.tracking.mlflow import MlflowRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.tracking.tracker import Tracker

#: The group of entry points under which packages offer trackers.
GROUP = "lightning_perf.trackers"


def trackers_of(
    loggers: Sequence[Any], kinds: Sequence[type[Tracker]] | None = None
) -> list[Tracker]:
    """The runs of loggers that take files, MLflow's first. Call it on rank 0."""
    runs: list[Tracker] = []
    for kind in (kinds or installed()) if loggers else ():  # searches other packages
        try:
            runs += [run for logger in loggers if (run := kind.of(logger)) is not None]
        except Exception as error:
            warn(f"{kind.__name__} cannot store files of this run ({describe(error)}).")
    return runs


def tracker_at(address: Mapping[str, str]) -> Tracker | None:
    """The run at an address; None if no installed tracker knows it."""
    runs = (kind.at(address) for kind in installed())
    return next((run for run in runs if run is not None), None)


@cache
def installed() -> tuple[type[Tracker], ...]:
    """The kinds of trackers; a warning names those that cannot be imported."""
    kinds: list[type[Tracker]] = [MlflowRun]
    for entry in entry_points(group=GROUP):
        try:
            kinds.append(entry.load())
        except Exception as error:
            warn(f"the tracker {entry.value} could not be loaded ({describe(error)}).")
    return tuple(kinds)
