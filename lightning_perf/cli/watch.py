"""Show a running training live.

MFU, throughput, where the time goes, and the verdicts so far, until it ends. Where the output is
not a terminal, one line per update.
"""

from __future__ import annotations

import json as json_format
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.cli import TRACKING_URI, Failure, argument, flag, new_console
from lightning_perf.cli.capture import descendants, own_process
from lightning_perf.tracking.summary import FILE_NAME, RUNNING, panel, progress, read_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from lightning_perf.tracking.summary import Summary

ARGUMENTS = {
    "run": argument(
        "The process id of a training or of its launcher, a run's folder, or a run's id or "
        "name in MLflow; by default the latest run below the current folder.",
        nargs="?",
    ),
    **TRACKING_URI,
    "--json": flag("Print a line of JSON per update."),
}


def run(run: str | None, tracking_uri: str | None, json: bool) -> int:
    """Show the run until it ends; code 1 if it was killed, 2 if there is no such run."""
    console = new_console()
    source = _source(run, tracking_uri)
    seen = _print(source, json) if json or not console.is_terminal else _show(source, console)
    if seen is None:
        raise Failure("the training ended before its first report", 1)
    if seen.runs:
        raise Failure("the training was killed before its run ended", 1)
    return 0


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


@dataclass(frozen=True)
class Source:
    """Where a run's summary is read."""

    #: The latest summary; None before the first one.
    read: Callable[[], Seen | None]
    #: Whether something may write another one than that seen last.
    alive: Callable[[Seen | None], bool] = lambda _: True
    #: Seconds between looks.
    interval: float = 1.0


def _source(run: str | None, tracking_uri: str | None) -> Source:
    """What to watch."""
    from lightning_perf.tracking.runs import (
        default_tracking_uri,
        folder_of,
        latest_folder,
        read_run,
    )

    path = Path(run or ".")
    if run is not None and run.isdecimal() and not path.exists():
        return process_source(own_process(int(run)))
    if path.exists():
        return folder_source(folder_of(path))
    assert run is not None  # `.` exists
    local = latest_folder(Path(), run) if tracking_uri is None else None
    if local is not None:
        return folder_source(local)
    uri = tracking_uri or default_tracking_uri()
    # Each read takes many requests.
    return Source(lambda: Seen(read_run(run, uri).summary, _now()), interval=10.0)


def folder_source(folder: Path) -> Source:
    """A run's folder, until the training's process has ended, if it is of this machine."""

    def alive(seen: Seen | None) -> bool:
        process = {} if seen is None else seen.summary.get("process", {})
        if seen is None or process.get("host") != platform.node():
            return True
        return _lives(process.get("pid"), seen.updated)

    return Source(lambda: _read(folder), alive)


def process_source(pid: int) -> Source:
    """The folder that a process, or one below it, holds open, until the process has ended."""
    folder: Path | None = None

    def read() -> Seen | None:
        nonlocal folder
        folder = folder or _folder_of(pid)  # at its end, a run closes its folder
        return None if folder is None else _read(folder)

    return Source(read, lambda _: _lives(pid, _now()))


def _read(folder: Path) -> Seen:
    path = folder / FILE_NAME
    return Seen(read_summary(path), path.stat().st_mtime)


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
        alive = source.alive(seen)
        seen = source.read() or seen
        yield seen
        if not alive or (seen is not None and not seen.runs):
            return
        time.sleep(source.interval)


def _print(source: Source, json: bool) -> Seen | None:
    """One line per update; returns the last one."""
    seen = last = None
    for seen in _looks(source):
        if seen is not None and (last is None or seen.summary != last.summary):
            last = seen
            now = time.strftime("%H:%M:%S", time.localtime(seen.updated))
            line = f"{now} {seen.summary['run']} {seen.summary['status']}: {progress(seen.summary)}"
            print(json_format.dumps(seen.summary) if json else line, flush=True)
    return seen


def _show(source: Source, console: Console) -> Seen | None:
    """A view that is drawn anew at each look; returns the last one."""
    from rich.live import Live

    seen = None
    with Live(console=console, auto_refresh=False) as live:
        for seen in _looks(source):
            live.update(_view(seen), refresh=True)
    return seen


def _view(seen: Seen | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if seen is None:
        return Text("waiting for the first report")
    age = max(_now() - seen.updated, 0.0)
    state = f"{seen.summary['run']}: {seen.summary['status']}"
    head = Text(f"{state}, updated {age:.0f} s ago" if seen.runs else state, style="bold")
    return Group(head, panel(seen.summary))
