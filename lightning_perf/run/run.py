"""What a run and its callbacks see of each other; the engine behind it is `RunContext`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from lightning.pytorch import Trainer

    from lightning_perf.background import Worker
    from lightning_perf.core.progress import Ranks
    from lightning_perf.run.destination import Reporting
    from lightning_perf.run.windows import Windows


class Run(Protocol):
    """A run, as its summary sees it."""

    trainer: Trainer
    members: list[Any]
    ranks: Ranks
    windows: Windows
    reporting: Reporting
    file_worker: Worker

    @property
    def run_name(self) -> str:
        """The run's name in files and reports, the same on every rank."""

    @property
    def leaves_files(self) -> bool:
        """Whether this run has something to leave: files, and a description."""

    def setup(self) -> dict[str, object]:
        """Device, its peak if it is known, precision and strategy."""

    def write_files(
        self, folder: str, files: Mapping[str, Callable[[Path], None]], stage: str, **options: Any
    ) -> None:
        """Write files of the run, if it has something to leave."""

    def on_close(self, finish: Callable[[], None]) -> None:
        """Call a function at the end of the run, after the workers have stopped."""


class Member(Protocol):
    """A callback, as its run sees it: a `PerfCallback`."""

    keeps_progress: bool
    show_summary: bool
    _disabled: bool
    units: Mapping[str, str]

    @property
    def state_key(self) -> str:
        """Its key in checkpoints."""

    def overrides(self, method: str) -> bool:
        """Whether it has a lifecycle method of its own."""

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of it; None if that fails."""

    def summary_sections(self) -> Mapping[str, Any]:
        """What it adds to the summary."""

    def disable(self, method: str, error: Exception) -> None:
        """Switch it off for the rest of the run."""

    def leave(self, reason: str) -> None:
        """Leave the run."""
