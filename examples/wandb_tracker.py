"""Files of a run as artifacts in Weights & Biases: a tracker in a package of your own.

Metrics go to a ``WandbLogger`` without it. Copy this file into your package, and name the class as
an entry point in the package's ``pyproject.toml``::

    [project.entry-points."lightning_perf.trackers"]
    wandb = "my_package.wandb_tracker:WandbRun"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_perf import Tracker
from lightning_perf.extend import NotHere

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: What the name of a W&B artifact may not have, and the characters that it may have.
_REFUSED, _LONGEST = re.compile(r"[^A-Za-z0-9_.-]+"), 128


@dataclass(frozen=True)
class WandbRun(Tracker):
    """One W&B run. Each file is an artifact of its own, named after the run and the file.

    Only the process that owns the run can upload to it, so other ranks list their files for
    ``lightning-perf upload --to wandb://ENTITY/PROJECT``, which resumes the run.
    """

    entity: str
    project: str
    run_id: str
    #: Whether this process is another one than the training's.
    later: bool = False

    @classmethod
    def of(cls, logger: Any) -> WandbRun | None:
        """The run of a WandbLogger."""
        if all(kind.__name__ != "WandbLogger" for kind in type(logger).__mro__):
            return None
        run = logger.experiment
        if run.disabled:
            return None
        own = cls(str(run.entity or ""), str(run.project or ""), str(run.id))
        vars(own)["_run"] = run
        return own

    @classmethod
    def at(cls, address: Mapping[str, str]) -> WandbRun | None:
        """The run at an address of W&B."""
        if "wandb" not in address:
            return None
        entity, project, run_id = address["wandb"].split("/")
        return cls(entity, project, run_id, later=True)

    def __reduce__(self) -> tuple[type[WandbRun], tuple[str, str, str, bool]]:
        """Pickle without the live run, which belongs to this process."""
        return WandbRun, (self.entity, self.project, self.run_id, self.later)

    @property
    def address(self) -> dict[str, str]:
        """Where `lightning-perf upload` finds the run."""
        return {"wandb": f"{self.entity}/{self.project}/{self.run_id}"}

    def upload(self, path: Path, remote: str) -> None:
        """Log a file as an artifact."""
        run, wandb = self._run, import_module("wandb")
        name = _REFUSED.sub("-", f"{self.run_id}-{remote}")
        if len(name) > _LONGEST:  # two long names must not become one
            name = f"{name[: _LONGEST - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
        artifact = wandb.Artifact(name, type="lightning_perf")
        artifact.add_file(str(path), name=remote.rpartition("/")[2])
        run.log_artifact(artifact)

    def problem(self) -> str | None:
        """Why no file can be uploaded, before the first one is tried."""
        try:
            import_module("wandb")
        except ImportError as error:
            return f"{error}; pip install wandb"
        return None

    @cached_property
    def _run(self) -> Any:
        """The live run: the training's on rank 0, a resumed one later."""
        if not self.later:
            raise NotHere("the W&B run belongs to rank 0's process")
        return import_module("wandb").init(
            entity=self.entity or None, project=self.project, id=self.run_id, resume="allow"
        )
