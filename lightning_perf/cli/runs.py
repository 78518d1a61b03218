"""The commands about runs: start, record, watch, report and compare them."""

from __future__ import annotations

import json as json_format
import os
import platform
import re
import signal as signals
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import inf
from pathlib import Path, PurePosixPath
from shutil import which
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_perf.cli import Failure, check_output, print_json
from lightning_perf.core.cost import priced
from lightning_perf.errors import DAMAGE, ConfigError, describe, without_credentials
from lightning_perf.files import walked, write_text
from lightning_perf.schedule.triggers import PROC, USUAL, records_on, signal_number
from lightning_perf.system.process import is_alive, lives
from lightning_perf.terminal import new_console, say
from lightning_perf.tracking.summary import (
    RATES,
    RUNNING,
    panel,
    progress,
    read_summary,
    standing_hang,
    summaries_in,
    text_of,
)
from lightning_perf.units import duration, three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from psutil import Process
    from rich.console import Console, RenderableType

    from lightning_perf.diagnosis.compare import Change, Comparison
    from lightning_perf.tracking.runs import Run
    from lightning_perf.tracking.summary import Summary


def run(command: list[str], *, config: str | None = None) -> int:
    """Run a command with the always-on callbacks in each Trainer of Lightning.

    Write the command last: lightning-perf run python train.py. Two dashes may be written before
    it.

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
    if (program := which(command[0])) is None:
        text = " ".join(["lightning-perf run python", *command])
        hint = f". Try {text}" if command[0].endswith(".py") else ""
        raise Failure(f"{command[0]} is not a program{hint}", 127)  # as in a shell
    environment = os.environ | {"LIGHTNING_PERF": "1"}  # without what imports add
    if config is not None:
        environment["LIGHTNING_PERF"] = selected = str(Path(config).resolve())
        _check_callbacks(config, selected)
    if sys.platform == "win32":  # exec would return at once there, and lose the exit code
        signals.signal(signals.SIGINT, signals.SIG_IGN)  # Ctrl-C reaches the training, too
        return subprocess.call([program, *command[1:]], env=environment)  # noqa: S603  no shell
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


def capture(pid: int, *, signal: str = USUAL, children: bool = False, json: bool = False) -> int:
    """Make a running training record its next batches.

    The training needs a profiler with the schedule OnSignal, such as
    PyTorch(schedule=OnSignal(lasting='5ba')), which also sets how long it records.

    Args:
        pid: The process id of the training.
        signal: The signal of the schedule.
        children: Also signal its child processes, which are the other ranks with some strategies.
        json: Print JSON.
    """
    if not PROC.exists():
        by_hand = f"kill -USR2 {pid}" if USUAL == "SIGUSR2" else "Ctrl+Break in its console"
        raise Failure(
            "only Linux tells whether a process records on a signal, which ends it otherwise. If "
            f"its training has begun with a profiler that has OnSignal(), try {by_hand}", 1,
        )  # fmt: skip
    try:
        number = signal_number(signal)
        own_process(pid)
    except ConfigError as error:
        raise Failure(f"--signal {signal} {error.problem}. Try --signal {USUAL}", 1) from None
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
        return bool(process.username() == psutil.Process().username())
    return False


def descendants(pid: int) -> list[int]:
    """The ids of this user's processes that a process has started, and those that they have."""
    import psutil

    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in below if _is_own(child)]


#: Environment variables by which launchers identify a job to its ranks.
_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")


def ranks_beside(pid: int) -> list[int]:
    """The ids of the other ranks that a launcher, such as torchrun, has started on this machine."""
    import psutil

    def job(process: psutil.Process) -> list[str | None]:
        environment = process.environ()
        return [environment.get(name) for name in _JOB]

    found = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        own, parent = job(process), process.parent()
        for child in parent.children() if parent is not None and any(own) else ():
            with suppress(psutil.Error):  # it has ended
                if child.pid != pid and _is_own(child) and job(child) == own:
                    found.append(child.pid)
    return found


def stacks(run: str, *, json: bool = False) -> int:
    """Show what a training does now: the stacks of all its threads, and of its child processes.

    The training needs Hang(), which is in always_on(), and Linux. If py-spy is installed, it shows
    C code and other processes, too. The training continues.

    Args:
        run (PID|RUN): The process id of the training or of its launcher, or a run of this machine:
            its folder, or its id or name in MLflow, with all ranks of this machine.
        json: Print JSON.
    """
    from lightning_perf.system.stacks import dump_of

    process = _process_of(run)
    try:
        pid = own_process(process["pid"])
    except LookupError as error:
        raise Failure(error, 1) from None
    if not lives(pid, _now(), process.get("started")):
        what = "has ended" if run == str(pid) else f"is another one: that of {run} has ended"
        raise Failure(f"process {pid} {what}", 1)
    # A process id means this process; a run, all of its ranks.
    ranks = [pid] if run == str(pid) else [pid, *ranks_beside(pid)]
    pids = dict.fromkeys(each for rank in ranks for each in (rank, *descendants(rank)))
    dumps = [dump_of(each, native=True) for each in pids]
    if not any(dump.text for dump in dumps):
        raise Failure(
            f"process {pid} and its children show no stacks: on Linux, trainings with Hang(), as "
            "in always_on(), do from their set-up on. Others need py-spy: pip install py-spy", 1,
        )  # fmt: skip
    if json:
        print_json([dump._asdict() for dump in dumps])
    else:
        missing = (
            "no stacks: it is no training and no forked data loader worker, or starts or ends\n"
        )
        say(*(f"process {pid}, {state}\n{text or missing}" for pid, state, text in dumps))
    return 0


def _process_of(run: str) -> Summary:
    """The process of a run, as its summary has it; raises `LookupError` if there is no run."""
    if run.isdecimal() and not Path(run).exists():
        return {"pid": int(run)}
    from lightning_perf.tracking.runs import find_run

    process = find_run(run, None).summary.get("process", {})
    if process.get("host") != platform.node():
        raise Failure(f"{run} runs on {process.get('host')}: name it there", 1)
    return {"pid": 0, **process}


#: Levels of folders below a process's own in which its run is found.
_LEVELS = 3
#: Seconds between reads of a folder, and of MLflow, which takes many requests each time.
_INTERVAL, _MLFLOW_INTERVAL = 1.0, 10.0


def watch(run: str | None = None, *, tracking_uri: str | None = None, json: bool = False) -> int:
    """Show a running training live.

    MFU, throughput, where the time goes, and the verdicts so far, until it ends. Where the output
    is not a terminal, one line per update.

    Args:
        run: The process id of a run or of its launcher, a run's folder, or a run's id or name
            in MLflow; by default the latest run below the current folder.
        tracking_uri (ADDRESS): The MLflow tracking address; by default MLFLOW_TRACKING_URI, or
            ./mlflow.db.
        json: Print a line of JSON per update.
    """
    from rich.live import Live

    console = new_console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not json else None
    seen = shown = None
    with live or nullcontext():
        for seen in _looks(run, tracking_uri):
            if live is not None:
                live.update(_view(seen), refresh=True)
            elif seen is not None and seen.summary != shown:
                shown = seen.summary
                say(json_format.dumps(_current(shown)) if json else _line(seen), flush=True)
    if seen is None:
        raise Failure("the training ended before its first report", 1)
    if seen.is_running:
        raise Failure("the run was killed before it ended", 1)
    return 0


class Seen(NamedTuple):
    """A summary, and when it was written."""

    summary: Summary
    #: Seconds since the epoch.
    updated: float

    @property
    def is_running(self) -> bool:
        """Whether the run continues, or was killed."""
        return bool(self.summary["status"] == RUNNING)


def _looks(run: str | None, tracking_uri: str | None) -> Iterator[Seen | None]:
    """The latest summary at each interval, until the run or its process has ended."""
    from lightning_perf.tracking import runs

    pid, file, path = None, None, Path(run or ".")
    if run is not None and run.isdecimal() and not path.exists():
        pid = own_process(int(run))
    elif path.is_file():
        file = path
    elif run is None or (local := runs.local_folders(run, tracking_uri)):
        file, count = runs.latest_in(runs.folder_of(path) if run is None else local[-1])
        if count > 1:
            say(f"{count} runs left a summary there: {file} is the latest one", file=sys.stderr)
    in_mlflow = pid is None and file is None
    seen: Seen | None = None
    while True:
        # Checked first, so that the summary that a process writes at its end is read.
        ended = _has_ended(pid, seen)
        if in_mlflow:
            seen = Seen(runs.find_run(run, tracking_uri).summary, _now())
        elif file is None and pid is not None:
            file = _file_of(pid)
        if file is not None:  # once found, it is kept: a run closes its folder at its end
            seen = Seen(read_summary(file), file.stat().st_mtime)
        yield seen
        if ended or (seen is not None and not seen.is_running):
            return
        time.sleep(_MLFLOW_INTERVAL if in_mlflow else _INTERVAL)


def _file_of(pid: int) -> Path | None:
    """The summary of the latest run of a process and its children; None before the first report."""
    files: list[tuple[bool, float, Path]] = []
    for process in [pid, *descendants(pid)]:
        for folder in _folders_of(process):
            with suppress(OSError):
                for file, summary in summaries_in(folder):
                    its = summary.get("process", {}).get("pid") == process
                    updated = file.stat().st_mtime
                    # An older file is that of another process, which may have had the same id.
                    start = summary["process"].get("started") if its else None
                    if (its or PROC.exists()) and lives(process, updated, start):
                        files.append((its, updated, file))
    return max(files)[-1] if files else None


def _folders_of(pid: int) -> Iterator[Path]:
    """The folders that may be those of a process's runs.

    On Linux, these are the folders that it has open; elsewhere, those below its working folder.
    """
    import psutil

    with suppress(OSError, psutil.Error):  # the process has ended
        if not PROC.exists():
            yield from (folder for folder, _ in walked(Path(psutil.Process(pid).cwd()), _LEVELS))
            return
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                yield link.readlink()


def _has_ended(pid: int | None, seen: Seen | None) -> bool:
    """Whether the process that the user has named has ended, else that of a summary, if here."""
    if pid is not None:
        return not lives(pid, _now())
    return seen is not None and is_alive(seen.summary.get("process", {}), seen.updated) is False


def _now() -> float:
    return time.time()  # noqa: TID251 (as files and processes have it)


def _line(seen: Seen) -> str:
    now = time.strftime("%H:%M:%S", time.localtime(seen.updated))
    hang = standing_hang(seen.summary) if seen.is_running else None
    state = f"hangs: {hang['text']}" if hang else progress(seen.summary)
    return f"{now} {seen.summary['run']} {seen.summary['status']}: {state}"


def _current(summary: Summary) -> Summary:
    """A summary without the history of its windows, which grows."""
    stages = summary.get("stages", {})
    now = {
        stage: {k: v for k, v in each.items() if k != "windows"} for stage, each in stages.items()
    }
    return {**summary, "stages": now}


def _view(seen: Seen | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if seen is None:
        return Text("waiting for the first report")
    age = max(_now() - seen.updated, 0.0)
    state = f"{seen.summary['run']}: {seen.summary['status']}"
    head = Text(f"{state}, updated {age:.0f} s ago" if seen.is_running else state, style="bold")
    return Group(head, panel(seen.summary))


# -- reports -----------------------------------------------------------------------------------
#: The folders and suffixes of traces that Perfetto opens.
_TRACES, _TRACE_FILES = {"torch_traces", "viztracer"}, (".json", ".json.gz")
#: The most files of a kind that are shown.
_MOST_FILES = 5
#: The smallest change of a phase or culprit that is shown, as a share of the step; the most rows.
_LEAST_SHARE, _MOST_ROWS = 0.002, 8


def report(
    run: str | None = None,
    *,
    html: str | None = None,
    price_per_gpu_hour: str | None = None,
    kg_co2_per_kwh: str | None = None,
    tracking_uri: str | None = None,
    json: bool = False,
) -> int:
    """Show how fast a run was, what it cost, and the paths of its traces.

    Args:
        run: A run's id or name in MLflow, or a folder with its summary.json; by default the latest
            run in MLflow or below the current folder.
        html (FILE): Write the page of the run to this file.
        price_per_gpu_hour (PRICE): Show what the run cost in money; by default
            LIGHTNING_PERF_PRICE_PER_GPU_HOUR.
        kg_co2_per_kwh (KG): Show its CO2; by default LIGHTNING_PERF_KG_CO2_PER_KWH.
        tracking_uri (ADDRESS): The MLflow tracking address; by default MLFLOW_TRACKING_URI, or
            ./mlflow.db.
        json: Print JSON.
    """
    from lightning_perf.tracking.runs import find_run

    console = new_console(soft_wrap=True)
    found = find_run(run, tracking_uri)
    if "cost" in found.summary:
        try:
            cost = priced(found.summary["cost"], price_per_gpu_hour, kg_co2_per_kwh)
        except ConfigError as error:
            raise Failure(f"{error.value} {error.problem}, such as 2.5") from None
        found = replace(found, summary={**found.summary, "cost": cost})
    if html is not None:
        from lightning_perf.tracking.page import report_page

        check_output(Path(html), b'name="generator" content="lightning_perf"')
        with _damage_named(found):
            page = report_page({**found.summary, "report": "", "traces": [], "pages": []})
        write_text(Path(html), page)
    if json:
        say(text_of({**found.summary, "files": found.files}))
    else:
        _show_run(found, console)
    return 0


@contextmanager
def _damage_named(run: Run) -> Iterator[None]:
    """Name the run whose figures have the right types, but contradict each other."""
    try:
        yield
    except DAMAGE as error:
        raise Failure(f"the summary of {run.title} is damaged ({describe(error)})") from error


#: Where `mlflow ui` serves by default.
_UI = "http://127.0.0.1:5000"


def _show_run(run: Run, console: Console) -> None:
    with _damage_named(run):
        shown = panel(run.summary)
    console.print(run.title, style="bold")
    if run.note:
        how = (
            "its folder or file, such as ./NAME/summary.json"
            if run.tracking_uri is None
            else "its id"
        )
        console.print(f"{run.note}. Name another one by {how}.")
    if run.unread:
        console.print(f"There may be a later run: {run.unread}.", soft_wrap=True)
    console.print(shown, soft_wrap=False)
    files = sorted(run.files, key=_natural)  # by batch
    traces = [path for path in files if path.endswith(_TRACE_FILES)]
    _list(
        console,
        "Traces: drag onto https://ui.perfetto.dev (processed in your browser, never uploaded):",
        [path for path in traces if _TRACES & set(PurePosixPath(path).parts)],
    )
    # The page about the run is last, so that it is always shown.
    pages = [path for path in files if path.endswith(".html")]
    pages.sort(key=lambda path: path == run.report)
    where = "" if run.tracking_uri is None else " or among MLflow's artifacts"
    _list(console, f"Pages: open in a browser{where}:", pages)
    if run.tracking_uri is not None:
        uri = without_credentials(run.tracking_uri)
        is_server = uri.startswith(("http://", "https://"))
        console.print(f"To see the run and its charts, {'open' if is_server else 'start MLflow'}:")
        if not is_server:
            console.print(f"  mlflow ui --backend-store-uri {uri}", style="bold")
            console.print("and open:")
            uri = _UI
        console.print(f"  {uri.rstrip('/')}/{run.page}", style="bold")


def _list(console: Console, headline: str, paths: Sequence[str]) -> None:
    """Print the latest files, one per line."""
    if paths:
        console.print(headline)
    for path in paths[-_MOST_FILES:]:
        console.print(f"  {path}")
    if len(paths) > _MOST_FILES:
        console.print(f"  and {len(paths) - _MOST_FILES:,} more")


def _natural(path: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers by value: 53 before 103."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", path)]


def compare(
    run: str,
    baselines: list[str],
    *,
    threshold: str | None = None,
    tracking_uri: str | None = None,
    json: bool = False,
) -> int:
    """Compare the speed of a run with that of others.

    The exit code is 1 if it is slower than --threshold allows.

    Args:
        run: The run to compare: an MLflow run's id or name, or a folder with a summary.json.
        baselines: The runs to compare it with, given in the same way. Several show the usual
            spread.
        threshold: Exit with code 1 if a batch takes longer by more than this, with 95% confidence:
            such as 5%.
        tracking_uri (ADDRESS): The MLflow tracking address; by default MLFLOW_TRACKING_URI, or
            ./mlflow.db.
        json: Print JSON.
    """
    from lightning_perf.diagnosis.compare import Measured, compare
    from lightning_perf.tracking.runs import find_run
    from lightning_perf.tracking.summary import main_stage

    limit = None if threshold is None else _fraction(threshold)
    runs = {name: find_run(name, tracking_uri) for name in [run, *baselines]}
    summaries = {name: found.summary for name, found in runs.items()}
    stages = {name: main_stage(summary) for name, summary in summaries.items()}
    about, _ = stages[run]
    for name, (stage, _) in stages.items():
        if stage != about:
            raise Failure(f"{run} is about {about}, and {name} about {stage}")
    measured = [Measured(name, stages[name][1]) for name in [run, *baselines]]
    comparison = compare(measured[0], measured[1:])
    shared = [f"{name}: {found.note} ({found.title})" for name, found in runs.items() if found.note]
    notes = [*comparison.notes, *shared, *_other_setup(summaries)]
    slower = None if limit is None else comparison.slower_than(limit)
    if json:
        print_json({
            "run": run, "baselines": baselines, "threshold": limit, "slower": slower,
            "changes": [change.as_dict() for change in comparison.changes], "notes": notes,
        })  # fmt: skip
    else:
        _show_changes(run, baselines, comparison, notes)
    if limit is not None and slower is None:
        raise Failure("the threshold cannot be checked: a run has too few windows")
    return int(bool(slower))


def _fraction(text: str) -> float:
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    # 5 alone means 5 % to most users, and not 500 %.
    if not 0 <= value < (inf if percent else 1):
        raise Failure(f"--threshold {text} is not a share, such as 5% or 0.05")
    return value


def _other_setup(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What differs between the set-ups of the runs, besides their speed."""
    for name, summary in summaries.items():
        if summary["status"] != "finished":
            yield f"{name}: {summary['status']}"
    setups = [summary.get("setup", {}) for summary in summaries.values()]
    setups = [setup | (setup.get("versions") or {}) for setup in setups]
    for setup in setups:  # a measured peak varies, and MFU with it
        if "peak_flops" in setup:
            setup["peak_flops"] = f"{float(setup['peak_flops']) / 1e12:.2g} TFLOP/s"
    for key in setups[0]:
        if key != "versions":
            now, *before = [str(setup.get(key, "unknown")) for setup in setups]
            if others := sorted(set(before) - {now}):
                yield f"{key} differs: {', '.join(others)} before, {now} now"


# -- the view -------------------------------------------------------------------------------------


def _show_changes(
    run: str, baselines: Sequence[str], comparison: Comparison, notes: Sequence[str]
) -> None:
    from rich.table import Table

    console = new_console()
    before = baselines[0] if len(baselines) == 1 else f"{len(baselines)} runs"
    headline = f"{run} compared with {before}: {_headline(comparison.slowdown)}"
    console.print(headline, style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column(overflow="fold")  # names are never cut
    for heading in ("before", "now", "change", "95% interval"):
        table.add_column(heading, no_wrap=True)
    step = _step(comparison)
    for change in _shown(comparison):
        cells = _cells(change, step)
        table.add_row(*cells, style="" if change.certain else "dim")
    if not console.is_terminal:  # a log of CI is wider than rich assumes
        console.width = max(console.width, 120)
    console.print(table)
    for note in notes:
        console.print(f"Note: {note}.", soft_wrap=True)


def _step(comparison: Comparison) -> float:
    """The time of a batch before, of which the changes of phases and culprits are shares."""
    return next(each.before for each in comparison.changes if each.name == "batch")


def _headline(slowdown: Change) -> str:
    *_, change, interval = _cells(slowdown, slowdown.before)
    if slowdown.low is None:
        return f"{change} per {slowdown.name}, noise unknown"
    if not slowdown.certain:
        return f"no change beyond the noise ({interval} per {slowdown.name})"
    word = "slower" if slowdown.difference > 0 else "faster"
    each = f"{duration(slowdown.before)} -> {duration(slowdown.after)} per {slowdown.name}"
    return f"{word}: {each}, {change} ({interval})"


def _shown(comparison: Comparison) -> Iterator[Change]:
    """All rates, and the phases and culprits that changed most."""
    least = _LEAST_SHARE * _step(comparison)
    kinds = dict.fromkeys(("phase", "culprit"), 0)
    for change in comparison.changes:
        if change.kind in kinds:
            kinds[change.kind] += 1
            if abs(change.difference) < least or kinds[change.kind] > _MOST_ROWS:
                continue
        yield change


def _cells(change: Change, step: float) -> tuple[str, ...]:
    """A row of the table. Changes of a phase or culprit are shares of the whole ``step``."""
    text: Callable[[float], str] = duration
    name, whole = f"  {change.name}", step
    if change.kind == "step":
        name, whole = f"time per {change.name}", change.before
    elif change.kind == "rate":
        name, whole = RATES[change.name][0], change.before
        text = _share if change.name == "mfu" else three_digits
    low, high, difference = (
        "unknown" if each is None else f"{each / (whole or 1.0):+.1%}"
        for each in (change.low, change.high, change.difference)
    )
    interval = low if low == "unknown" else f"{low} to {high}"
    return name, text(change.before), text(change.after), difference, interval


def _share(value: float) -> str:
    return f"{three_digits(100 * value)}%"
