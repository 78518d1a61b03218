"""The trackers that are installed: MLflow's, W&B's, and those of other packages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from lightning_perf.errors import describe, warn
from lightning_perf.traces.names import safe
from lightning_perf.traces.uploads import NotHere
from lightning_perf.tracking.mlflow import MlflowRun
from lightning_perf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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
    kinds: list[type[Tracker]] = [MlflowRun, WandbRun]
    for entry in entry_points(group=GROUP):
        try:
            kinds.append(entry.load())
        except Exception as error:
            warn(f"the tracker {entry.value} could not be loaded ({describe(error)}).")
    return tuple(kinds)


#: What the name of a W&B artifact may not have, and the characters that it may have.
_REFUSED, _LONGEST = re.compile(r"[^A-Za-z0-9_.-]+"), 128


@dataclass(frozen=True)
class WandbRun(Tracker):
    """One W&B run. Each file is an artifact of its own, named after the run and the file.

    Only the process that owns the run can upload to it, so other ranks list their files for
    ``lightning-perf upload``, which resumes the run.
    """

    entity: str
    project: str
    run_id: str
    #: Whether this process is another one than the training's.
    later: bool = False

    @classmethod
    @override
    def of(cls, logger: Any) -> Self | None:
        if all(kind.__name__ != "WandbLogger" for kind in type(logger).__mro__):
            return None
        run = logger.experiment
        if run.disabled:
            return None
        own = cls(str(run.entity or ""), str(run.project or ""), str(run.id))
        vars(own)["_run"] = run
        return own

    @classmethod
    @override
    def at(cls, address: Mapping[str, str]) -> Self | None:
        if "wandb" not in address:
            return None
        entity, project, run_id = address["wandb"].split("/")
        return cls(entity, project, run_id, later=True)

    def __reduce__(self) -> tuple[type[WandbRun], tuple[str, str, str, bool]]:
        return WandbRun, (self.entity, self.project, self.run_id, self.later)

    @property
    @override
    def address(self) -> dict[str, str]:
        return {"wandb": f"{self.entity}/{self.project}/{self.run_id}"}

    @override
    def upload(self, path: Path, remote: str) -> None:
        run, wandb = self._run, import_module("wandb")
        name = safe(f"{self.run_id}-{_REFUSED.sub('-', remote)}", _LONGEST)
        artifact = wandb.Artifact(name, type="lightning_perf")
        artifact.add_file(str(path), name=remote.rpartition("/")[2])
        run.log_artifact(artifact)

    @override
    def problem(self) -> str | None:
        try:
            import_module("wandb")
        except ImportError as error:
            return f"{describe(error)}; pip install wandb"
        return None

    @cached_property
    def _run(self) -> Any:
        """The live run: the training's on rank 0, a resumed one later."""
        if not self.later:
            raise NotHere("the W&B run belongs to rank 0's process")
        return import_module("wandb").init(
            entity=self.entity or None, project=self.project, id=self.run_id, resume="allow"
        )
