"""Experiment trackers as places for files: the interface, which ones exist, and W&B."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from lightning_perf.errors import describe, warn
from lightning_perf.traces.uploads import NotHere, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: The group of entry points under which packages offer trackers.
GROUP = "lightning_perf.trackers"


class Tracker(ABC):
    """A run of an experiment tracker, to which files are uploaded.

    Rank 0 finds it by the trainer's loggers and broadcasts it, so it must pickle, without its
    connection. Metrics need no tracker: they go to every logger of the trainer.

    To add a tracker, subclass this and name the class as an entry point of the group
    ``lightning_perf.trackers`` in your package's ``pyproject.toml``::

        [project.entry-points."lightning_perf.trackers"]
        mine = "my_package:MyRun"

    Example:
        >>> from shutil import copyfile
        >>> class FolderRun(Tracker):
        ...     def __init__(self, folder):
        ...         self.folder = folder
        ...     @classmethod
        ...     def of(cls, logger):
        ...         return cls(logger.folder) if type(logger).__name__ == "MyLogger" else None
        ...     @classmethod
        ...     def at(cls, address):
        ...         return cls(address["my_folder"]) if "my_folder" in address else None
        ...     @property
        ...     def address(self):
        ...         return {"my_folder": self.folder}
        ...     def upload(self, path, remote):
        ...         copyfile(path, f"{self.folder}/{path.name}")
        >>> FolderRun.at({"my_folder": "/runs/7"}).address
        {'my_folder': '/runs/7'}
    """

    @classmethod
    @abstractmethod
    def of(cls, logger: Any) -> Self | None:
        """The run of a logger, on rank 0; None for loggers of another kind."""

    @classmethod
    @abstractmethod
    def at(cls, address: Mapping[str, str]) -> Self | None:
        """The run at an address, for ``lightning-perf upload``; None for another kind of address.

        Args:
            address: As `address` returned it in the training's process.
        """

    @property
    @abstractmethod
    def address(self) -> Mapping[str, str]:
        """What finds the run again from another process, without credentials."""

    @abstractmethod
    def upload(self, path: Path, remote: str) -> None:
        """Upload a file; called on a worker thread. Any exception is a failed attempt.

        Args:
            path: The local file.
            remote: Its name in the run, with ``/`` between folders.

        Raises:
            NotHere: The file cannot be uploaded by this process: it is listed for later.
        """

    def problem(self) -> str | None:
        """Why nothing can be uploaded now, found within seconds; None if nothing is known."""
        return None

    @property
    def target(self) -> Target:
        """The run as a target of the upload queue."""
        return Target(self.upload, self.address)


def trackers_of(loggers: Sequence[Any]) -> list[Tracker]:
    """The runs of loggers that take files, MLflow's first. Call it on rank 0."""
    if not loggers:
        return []  # without a search for the trackers of other packages
    return [run for kind in _kinds() for logger in loggers if (run := kind.of(logger)) is not None]


def tracker_at(address: Mapping[str, str]) -> Tracker | None:
    """The run at an address; None if no installed tracker knows it."""
    found = (kind.at(address) for kind in _kinds())
    return next((run for run in found if run is not None), None)


@cache
def _kinds() -> tuple[type[Tracker], ...]:
    from lightning_perf.tracking.mlflow import MlflowRun

    kinds: list[type[Tracker]] = [MlflowRun, WandbRun]
    for entry in entry_points(group=GROUP):
        try:
            kinds.append(entry.load())
        except Exception as error:
            warn(f"the tracker {entry.value} could not be loaded ({describe(error)}).")
    return tuple(kinds)


_REFUSED = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class WandbRun(Tracker):
    """One W&B run. Each file is an artifact of its own, named after the run and the file.

    Only the process that owns the run can upload to it, so other ranks list their files for
    ``lightning-perf upload``, which resumes the run.
    """

    entity: str
    project: str
    run_id: str
    #: Whether this is another process than the training's.
    later: bool = False

    @classmethod
    @override
    def of(cls, logger: Any) -> Self | None:
        if all(kind.__name__ != "WandbLogger" for kind in type(logger).__mro__):
            return None
        run = logger.experiment
        if run.disabled:
            return None
        found = cls(str(run.entity or ""), str(run.project or ""), str(run.id))
        vars(found)["_run"] = run
        return found

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
        artifact = wandb.Artifact(
            f"{self.run_id}-{_REFUSED.sub('-', remote)}", type="lightning_perf"
        )
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
