"""HTML pages that are made of recordings, off the training thread, and lie beside them."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_perf.profilers.profiler import Finish, Profiler
from lightning_perf.trace import TraceWriter

if TYPE_CHECKING:
    from lightning_perf.timestamp import Timestamp
    from lightning_perf.trainer.driver import Driver


class PageProfiler(Profiler):
    """A profiler that can make a page of each recording; subclasses write ``render``."""

    _pages: TraceWriter | None = None

    @property
    @abstractmethod
    def makes_pages(self) -> bool:
        """Whether pages are wanted."""

    @abstractmethod
    def render(self, source: Path, page: Path) -> None:
        """Make a page, on the worker thread.

        Args:
            source: The recording.
            page: The HTML file to write.
        """

    @override
    def prepare(self, driver: Driver) -> None:
        super().prepare(driver)
        self._pages = None
        if self.makes_pages and self._writer is not None:
            remote = self.remote_file_name
            remote = None if remote is None else _html(remote)
            self._pages = self.new_writer(driver, _html(self.filename), remote, False)

    @override
    def save(self, path: Path, timestamp: Timestamp, stage: str, finish: Finish | None) -> None:
        if self._pages is not None:
            # Before the recording: the one worker moves that away when its turn comes.
            page = self._pages.spool(stage)
            self._pages.write(page, timestamp, stage, partial(self.render, path, page))
        super().save(path, timestamp, stage, finish)


def _html(name: str) -> str:
    """The page's name: that of the recording, with a suffix that browsers know.

    Example:
        >>> _html("{run_name}/rank{rank}.{batch}.bin")
        '{run_name}/rank{rank}.{batch}.html'
    """
    folder, slash, file = name.removesuffix(".gz").rpartition("/")
    stem, _, suffix = file.rpartition(".")
    return f"{folder}{slash}{file if '}' in suffix or not stem else stem}.html"
