"""Weights & Biases: files of a run as artifacts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from lightning_perf.errors import describe
from lightning_perf.traces.uploads import NotHere
from lightning_perf.tracking.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_KEY = "wandb"
#: The type of our artifacts.
_TYPE = "lightning_perf"
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
        if _KEY not in address:
            return None
        entity, project, run_id = address[_KEY].split("/")
        return cls(entity, project, run_id, later=True)

    def __reduce__(self) -> tuple[type[WandbRun], tuple[str, str, str, bool]]:
        return WandbRun, (self.entity, self.project, self.run_id, self.later)

    @property
    @override
    def address(self) -> dict[str, str]:
        return {_KEY: f"{self.entity}/{self.project}/{self.run_id}"}

    @override
    def upload(self, path: Path, remote: str) -> None:
        run, wandb = self._run, import_module("wandb")
        artifact = wandb.Artifact(f"{self.run_id}-{_REFUSED.sub('-', remote)}", type=_TYPE)
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
