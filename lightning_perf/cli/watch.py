"""``lightning-perf watch``: a running training, live in the terminal."""

from __future__ import annotations

import json as json_format
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jsonargparse import ArgumentParser

from lightning_perf.cli import add_tracking_uri, fail
from lightning_perf.cli.capture import descendants, own_process
from lightning_perf.tracking.summary import FILE_NAME, RUNNING, panel, progress, read_summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from lightning_perf.tracking.summary import Summary

#: Seconds between reads of a file, and of MLflow, where each read takes many requests.
_FILE_INTERVAL, _MLFLOW_INTERVAL = 1.0, 10.0


def parser() -> ArgumentParser:
    """The arguments of the command."""
    parser = ArgumentParser(
        description="Show a running training live. MFU, throughput, where the time goes, and the "
        "verdicts so far, until it ends. Where the output is not a terminal, one line per update."
    )
    parser.add_argument(
        "run",
        nargs="?",
        help="The process id of a training or of its launcher, a run's folder, or a run's id or "
        "name in MLflow; by default the latest run below the current folder.",
    )
    add_tracking_uri(parser)
    parser.add_argument("--json", action="store_true", help="Print a line of JSON per update.")
    return parser


def run(run: str | None, tracking_uri: str | None, json: bool) -> int:
    """Show the run until it ends; code 1 if it was killed, 2 if there is no such run."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    try:
        source = _source(run, tracking_uri)
        if json or not console.is_terminal:
            return _print(source, json)
        return _show(source, console)
    except LookupError as error:
        return fail("watch", error)


# -- where the figures come from --------------------------------------------------------------


class Seen(NamedTuple):
    """A summary, and when it was written."""

    summary: Summary
    #: Seconds since the epoch.
    updated: float

    @property
    def runs(self) -> bool:
        """Whether the run goes on, or was killed."""
        return bool(self.summary["status"] == RUNNING)


class FolderSource:
    """A run's folder."""

    interval = _FILE_INTERVAL

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: Seen | None = None

    def read(self) -> Seen:
        """The file."""
        path = self._folder / FILE_NAME
        self._seen = Seen(read_summary(path), path.stat().st_mtime)
        return self._seen

    def alive(self) -> bool:
        """Whether the training's process lives; that of another machine is unknown."""
        process = self._seen.summary.get("process", {}) if self._seen is not None else {}
        if self._seen is None or process.get("host") != platform.node():
            return True
        return _lives(process.get("pid"), self._seen.updated)


class ProcessSource:
    """A training's process, or one that started it."""

    interval = _FILE_INTERVAL

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._folder: Path | None = None

    def read(self) -> Seen | None:
        """The file in the folder that the process, or one below it, holds open."""
        self._folder = self._folder or _folder_of(self._pid)
        return FolderSource(self._folder).read() if self._folder is not None else None

    def alive(self) -> bool:
        """Whether the process lives."""
        return _lives(self._pid, _now())


class MlflowSource:
    """A run in MLflow."""

    interval = _MLFLOW_INTERVAL

    def __init__(self, run: str, tracking_uri: str) -> None:
        self._run, self._uri = run, tracking_uri

    def read(self) -> Seen | None:
        """What its metrics say."""
        from lightning_perf.tracking.runs import read_run

        found = read_run(self._run, self._uri)
        return None if found is None else Seen(found.summary, _now())

    def alive(self) -> bool:
        """MLflow does not say."""
        return True


#: ``interval`` is the seconds between looks. ``read`` returns the latest summary, or None before
#: the first one. ``alive`` is whether something may write another one.
Source: TypeAlias = FolderSource | ProcessSource | MlflowSource


def _source(run: str | None, tracking_uri: str | None) -> Source:
    """What to watch."""
    from lightning_perf.tracking.runs import default_tracking_uri, latest_folder

    path = Path(run or ".")
    if run is not None and run.isdecimal() and not path.exists():
        if not Path("/proc/self/fd").exists():
            raise LookupError("process ids can be watched on Linux only. Give the run's folder")
        return ProcessSource(own_process(int(run)))
    if path.exists():
        folder = path.parent if path.is_file() else path
        found = folder if (folder / FILE_NAME).exists() else latest_folder(folder)
        if found is None:
            raise LookupError(
                f"there is no {FILE_NAME} below {folder}. Give a process id, a run's folder, or a "
                "run's id or name in MLflow"
            )
        return FolderSource(found)
    assert run is not None  # `.` exists
    local = latest_folder(Path(), run) if tracking_uri is None else None
    if local is not None:
        return FolderSource(local)
    return MlflowSource(run, tracking_uri or default_tracking_uri())


def _folder_of(pid: int) -> Path | None:
    """The folder of the latest run of a process and those below it; None if none has reported."""
    found: list[tuple[float, Path]] = []
    for each in [pid, *descendants(pid)]:
        with suppress(OSError):  # the process has ended
            for link in Path(f"/proc/{each}/fd").iterdir():
                with suppress(OSError):
                    folder = link.readlink()
                    found.append(((folder / FILE_NAME).stat().st_mtime, folder))
    return max(found)[1] if found else None


def _now() -> float:
    return time.time()  # noqa: TID251 (as files and processes have it)


def _lives(pid: int | None, since: float) -> bool:
    """Whether a process runs that was started before a point in time."""
    import psutil

    try:
        process = psutil.Process(pid)
        # The id may have been given to a later process.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since
    except (psutil.Error, TypeError, ValueError, OverflowError):  # no such id
        return False


# -- views ------------------------------------------------------------------------------------


def _looks(source: Source) -> Iterator[Seen | None]:
    """Yield the latest summary at each interval, until the run or its process has ended."""
    seen: Seen | None = None
    while True:
        # Asked first, so that what a process writes at its end is read.
        alive = source.alive()
        seen = source.read() or seen
        yield seen
        if not alive or (seen is not None and not seen.runs):
            return
        time.sleep(source.interval)


def _print(source: Source, json: bool) -> int:
    """One line per update."""
    seen = last = None
    for seen in _looks(source):
        if seen is not None and (last is None or seen.summary != last.summary):
            last = seen
            now = time.strftime("%H:%M:%S", time.localtime(seen.updated))
            line = f"{now} {seen.summary['run']} {seen.summary['status']}: {progress(seen.summary)}"
            print(json_format.dumps(seen.summary) if json else line, flush=True)
    return _code(seen)


def _show(source: Source, console: Console) -> int:
    """A view that is drawn anew at each look."""
    from rich.live import Live

    seen = None
    with Live(console=console, auto_refresh=False) as live:
        for seen in _looks(source):
            live.update(_view(seen), refresh=True)
    return _code(seen)


def _view(seen: Seen | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if seen is None:
        return Text("waiting for the first report")
    age = max(_now() - seen.updated, 0.0)
    state = f"{seen.summary['run']}: {seen.summary['status']}"
    head = Text(f"{state}, updated {age:.0f} s ago" if seen.runs else state, style="bold")
    return Group(head, panel(seen.summary))


def _code(seen: Seen | None) -> int:
    if seen is not None and not seen.runs:
        return 0
    why = "ended before its first report" if seen is None else "was killed before its run ended"
    return fail("watch", f"the training {why}", 1)
