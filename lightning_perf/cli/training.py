"""The commands about a training: start it, make it record, and watch it."""

from __future__ import annotations

import json as json_format
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, NamedTuple

from lightning_perf.cli import Failure, print_json
from lightning_perf.errors import ConfigError
from lightning_perf.schedule.triggers import records_on, signal_number
from lightning_perf.terminal import new_console, say
from lightning_perf.tracking.summary import FILE_NAME, RUNNING, panel, progress, read_summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from psutil import Process
    from rich.console import Console, RenderableType

    from lightning_perf.tracking.summary import Summary


def run(command: list[str], *, config: str | None = None) -> int:
    """Run a training with the always-on callbacks in each Trainer of Lightning.

    Write the training's command last: lightning-perf run python train.py. Two dashes may stand
    before it.

    Args:
        command: The program and its arguments.
        config (FILE): A YAML file with the callbacks to use instead, such as
            configs/always_on.yaml.
    """
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise Failure("there is no command. Try lightning-perf run python train.py")
    if config is not None and not Path(config).is_file():
        raise Failure(f"there is no file {config}")
    if which(command[0]) is None:
        raise Failure(f"{command[0]} is not a program", 127)  # as in a shell
    selected = "1" if config is None else str(Path(config).resolve())
    environment = os.environ | {"LIGHTNING_PERF": selected}  # without what imports add
    if config is not None:
        _check_callbacks(config, selected)
    return os.execvpe(command[0], command, environment)  # noqa: S606  no shell


def _check_callbacks(config: str, selected: str) -> None:
    """Refuse a file whose callbacks cannot be constructed, before the training begins without."""
    with suppress(ImportError):  # the command's Python may be another one
        from lightning_perf.callbacks.factory import from_environment

        try:
            from_environment(selected)
        except ConfigError as error:
            cause: BaseException = error
            while inner := cause.__cause__ or cause.__context__:
                cause = inner
            if not isinstance(cause, ImportError):
                raise Failure(f"{config} {error.problem}") from None


def capture(
    pid: int, *, signal: str = "SIGUSR2", children: bool = False, json: bool = False
) -> int:
    """Make a running training record its next batches.

    The training needs a profiler with the schedule OnSignal, such as
    PyTorch(schedule=OnSignal(lasting='5ba')), which also sets how long it records.

    Args:
        pid: The process id of the training.
        signal: The signal of the schedule.
        children: Also signal its child processes, which are the other ranks with some strategies.
        json: Print JSON.
    """
    try:
        number = signal_number(signal)
        own_process(pid)
    except ConfigError as error:
        raise Failure(f"--signal {signal} {error.problem}. Try --signal SIGUSR2", 1) from None
    except LookupError as error:
        raise Failure(error, 1) from None
    signalled = []
    for process in [pid, *(descendants(pid) if children else [])]:
        with suppress(OSError):  # it has ended meanwhile
            if records_on(process, number):
                os.kill(process, number)
                signalled.append(process)
    if not signalled:
        raise Failure(
            f"process {pid} does not record on {signal}, which could end it. Give its Trainer a "
            f"profiler such as PyTorch(schedule=OnSignal({signal!r}, lasting='5ba')); if it has "
            "one, wait until the training has begun, or name the child process that trains", 1,
        )  # fmt: skip
    if json:
        print_json({"signalled": signalled})
    else:
        say(*(f"signalled process {process} to record" for process in signalled))
    return 0


def own_process(pid: int) -> int:
    """The id of a process of this user; raises `LookupError` for others."""
    import psutil

    if not Path("/proc/self/fd").exists():
        raise LookupError("processes can be inspected on Linux only")
    try:
        process = psutil.Process(pid)
    except (psutil.Error, OverflowError, ValueError):
        raise LookupError(f"there is no process {pid} on this machine") from None
    if not _is_own(process):
        raise LookupError(f"process {pid} belongs to another user")
    return pid


def _is_own(process: Process) -> bool:
    """Whether a process is of this user, and lives."""
    import psutil

    with suppress(psutil.Error):  # it has ended, or may not be inspected
        return bool(process.uids().real == os.getuid())
    return False


def descendants(pid: int) -> list[int]:
    """The ids of this user's processes that a process has started, and those that they have."""
    import psutil

    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in below if _is_own(child)]


def watch(run: str | None = None, *, tracking_uri: str | None = None, json: bool = False) -> int:
    """Show a running training live.

    MFU, throughput, where the time goes, and the verdicts so far, until it ends. Where the output
    is not a terminal, one line per update.

    Args:
        run: The process id of a training or of its launcher, a run's folder, or a run's id or name
            in MLflow; by default the latest run below the current folder.
        tracking_uri (ADDRESS): The MLflow tracking address; by default MLFLOW_TRACKING_URI, or
            ./mlflow.db.
        json: Print a line of JSON per update.
    """
    console = new_console()
    source = _source(run, tracking_uri)
    seen = _print(source, json) if json or not console.is_terminal else _show(source, console)
    if seen is None:
        raise Failure("the training ended before its first report", 1)
    if seen.is_running:
        raise Failure("the training was killed before its run ended", 1)
    return 0


# -- sources of summaries ----------------------------------------------------------------------


class Seen(NamedTuple):
    """A summary, and when it was written."""

    summary: Summary
    #: Seconds since the epoch.
    updated: float

    @property
    def is_running(self) -> bool:
        """Whether the run continues, or was killed."""
        return bool(self.summary["status"] == RUNNING)


@dataclass(frozen=True)
class Source:
    """Where a run's summary is read."""

    #: The latest summary; None before the first one.
    read: Callable[[], Seen | None]
    #: Whether a newer summary than the given one may still be written.
    alive: Callable[[Seen | None], bool] = lambda _: True
    #: Seconds between reads.
    interval: float = 1.0


def _source(run: str | None, tracking_uri: str | None) -> Source:
    """The source of the run that the argument names."""
    from lightning_perf.tracking import runs

    path = Path(run or ".")
    if run is not None and run.isdecimal() and not path.exists():
        return process_source(own_process(int(run)))
    if run is None or path.is_file():
        return folder_source(runs.folder_of(path))
    if local := runs.local_folders(run, tracking_uri):
        return folder_source(local[-1])
    # Each read takes many requests.
    return Source(lambda: Seen(runs.find_run(run, tracking_uri).summary, _now()), interval=10.0)


def folder_source(folder: Path) -> Source:
    """Watch a run's folder; on the training's machine, until its process has ended."""

    def alive(seen: Seen | None) -> bool:
        process = {} if seen is None else seen.summary.get("process", {})
        if seen is None or process.get("host") != platform.node():
            return True
        return _lives(process.get("pid"), seen.updated)

    return Source(lambda: _read(folder), alive)


def process_source(pid: int) -> Source:
    """Watch the run folder that a process or a child of it has open, until the process ends."""
    folder: Path | None = None

    def read() -> Seen | None:
        nonlocal folder
        folder = folder or _folder_of(pid)  # a run closes its folder at its end
        return None if folder is None else _read(folder)

    return Source(read, lambda _: _lives(pid, _now()))


def _read(folder: Path) -> Seen:
    path = folder / FILE_NAME
    return Seen(read_summary(path), path.stat().st_mtime)


def _folder_of(pid: int) -> Path | None:
    """The folder of the latest run of a process and its children; None before the first report."""
    folders: list[tuple[float, Path]] = []
    for process in [pid, *descendants(pid)]:
        with suppress(OSError):  # the process has ended
            for link in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    folder = link.readlink()
                    folders.append(((folder / FILE_NAME).stat().st_mtime, folder))
    return max(folders)[1] if folders else None


def _now() -> float:
    return time.time()  # noqa: TID251 (as files and processes have it)


def _lives(pid: int | None, since: float) -> bool:
    """Whether the process is alive, and was started before a point in time."""
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
        # Checked first, so that the summary that a process writes at its end is read.
        alive = source.alive(seen)
        seen = source.read() or seen
        yield seen
        if not alive or (seen is not None and not seen.is_running):
            return
        time.sleep(source.interval)


def _print(source: Source, json: bool) -> Seen | None:
    """Print one line per update; return the last summary."""
    seen = last = None
    for seen in _looks(source):
        if seen is not None and (last is None or seen.summary != last.summary):
            last = seen
            now = time.strftime("%H:%M:%S", time.localtime(seen.updated))
            line = f"{now} {seen.summary['run']} {seen.summary['status']}: {progress(seen.summary)}"
            say(json_format.dumps(_current(seen.summary)) if json else line, flush=True)
    return seen


def _current(summary: Summary) -> Summary:
    """A summary without the history of its windows, which grows."""
    stages = summary.get("stages", {})
    now = {
        stage: {k: v for k, v in each.items() if k != "windows"} for stage, each in stages.items()
    }
    return {**summary, "stages": now}


def _show(source: Source, console: Console) -> Seen | None:
    """Redraw a view at each read; return the last summary."""
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
    head = Text(f"{state}, updated {age:.0f} s ago" if seen.is_running else state, style="bold")
    return Group(head, panel(seen.summary))
