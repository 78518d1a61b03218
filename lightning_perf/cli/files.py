"""The commands about files: traces of the PyTorch profiler, and uploads."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_perf.cli import (
    JSON,
    TRACKING_URI,
    Failure,
    argument,
    command,
    flag,
    new_console,
    print_json,
)
from lightning_perf.errors import describe
from lightning_perf.traces.names import remote_format
from lightning_perf.traces.uploads import FILE_NAME, PendingUpload, Target, taken_pending
from lightning_perf.tracking.tracker import STORE, check_store, store_target, tracker_at
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from lightning_perf.traces.combine import Collective, Trace

#: Collectives that are shown.
_MOST_SHOWN = 5


@command(
    argument("file", "The trace to summarize: .json or .json.gz.", nargs="?"),
    argument(
        "--combine",
        "Merge the traces of this folder, or of a run's id or name in MLflow.",
        metavar="FOLDER|RUN",
    ),
    argument("--output -o", "The file to write.", default="all.json.gz"),
    argument(
        "--window",
        "Which window if there are several, such as 12 for rank0.12.pt.trace.json.gz, and "
        "validate/12 for that of validation.",
    ),
    TRACKING_URI,
    JSON,
)
def trace(
    file: str | None,
    json: bool,
    combine: str | None,
    output: str,
    window: str | None,
    tracking_uri: str | None,
) -> int:
    """Summarize a trace of the PyTorch profiler, or merge those of all ranks into one for Perfetto."""  # noqa: E501
    from lightning_perf.traces.events import TraceError

    if file is not None and Path(file).is_dir():
        raise Failure(f"{file} is a folder. Try --combine {file}, or one of its files")
    try:
        if file is not None and combine is None:
            _summarize(Path(file), json)
        elif file is None and combine is not None:
            with tempfile.TemporaryDirectory(prefix="lightning_perf-") as scratch:
                _merge(_folder(combine, tracking_uri, Path(scratch)), window, Path(output), json)
        else:
            raise Failure("name either a trace or --combine FOLDER")
    except TraceError as error:
        raise Failure(error) from error
    return 0


def _summarize(path: Path, json: bool) -> None:
    from rich.table import Table

    from lightning_perf.traces.summary import facts, summarize, tables

    summary = summarize(path)
    if json:
        print_json(summary.as_dict())
        return
    console = new_console()
    grid = Table(show_header=False)
    for fact in facts(summary):
        grid.add_row(*fact)
    console.print(grid)
    for title, headings, rows in tables(summary):
        console.print(title, style="bold")
        table = Table(*headings)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in summary.notes:
        console.print(f"Note: {note}.", soft_wrap=True)


def _folder(what: str, tracking_uri: str | None, scratch: Path) -> Path:
    """The folder with the traces; those of a run in MLflow are downloaded."""
    if Path(what).is_dir():
        return Path(what)
    from lightning_perf.traces.combine import TRACE_NAME
    from lightning_perf.tracking.runs import download

    try:
        download(what, tracking_uri, scratch, TRACE_NAME)
    except LookupError as error:
        raise Failure(f"there is no folder {what}, and {error}") from error
    return scratch


def _merge(folder: Path, window: str | None, target: Path, json: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from lightning_perf.traces import combine

    traces = combine.find_window(folder, window)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=2 * len(traces))
        for trace in traces:
            combine.scan(trace)
            progress.advance(task)
        combine.check(traces)
        combine.align(traces)
        progress.update(task, description="writing")
        events = combine.write(traces, target, lambda: progress.advance(task))
    found = combine.collectives(traces)
    there = {trace.rank for trace in traces}
    missing = [rank for rank in range(traces[0].head["world_size"]) if rank not in there]
    if json:
        print_json({
            "file": str(target), "events": events, "missing_ranks": missing,
            "ranks": [
                {"rank": trace.rank, "clock_shift_us": _shift(trace, traces[0]),
                 "residual_error_us": trace.error}
                for trace in traces
            ],
            "collectives": [
                {"name": each.name, "number": each.number, "last_rank": each.last,
                 "waited_us": each.waited}
                for each in found
            ],
        })  # fmt: skip
        return
    console = new_console()
    ranks = counted(len(traces), "rank")
    console.print(f"{target}: {ranks}, {events:,} events", soft_wrap=True)
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        console.print(f"No traces of ranks {', '.join(map(str, missing[:10]))}{more}.")
    for trace in traces[1:]:
        if trace.error is None:
            console.print(f"rank {trace.rank}: nothing in common with rank 0, clock as it is")
            continue
        shift = abs(_shift(trace, traces[0]))
        text = f"shifted by {duration(shift / 1e6)}" if shift else "not shifted"
        error = duration(trace.error / 1e6)
        console.print(f"rank {trace.rank}: clock {text}, residual error {error}")
    _show_collectives(console, found, len(traces))


def _shift(trace: Trace, first: Trace) -> float:
    """Microseconds by which a rank's clock was shifted."""
    return trace.shift - (trace.base - first.base)


def _show_collectives(console: Console, found: Sequence[Collective], ranks: int) -> None:
    from rich.table import Table

    if not found:
        console.print("No collectives in these traces.")
        return
    table = Table("collective", "last rank", "the others waited (median)", title="Longest waits")
    for each in found[:_MOST_SHOWN]:
        others = [wait for rank, wait in each.waited.items() if rank != each.last]
        waited = duration(median(others) / 1e6)
        table.add_row(f"{each.name} #{each.number}", f"rank {each.last}", waited)
    console.print(table)
    ((most, times),) = Counter(each.last for each in found).most_common(1)
    share = times / len(found)
    console.print(
        f"Rank {most} came last to {share:.0%} of {len(found)} collectives of {ranks} ranks."
    )


# -- uploads --------------------------------------------------------------------------------------

_MISSING = "the file is missing; --forget-missing removes it from the list"


@command(
    argument("folder", "The folder to search for lists, with subfolders.", nargs="?", default="."),
    argument(
        "--tracking-uri",
        "The tracking address to use instead of the listed one, for example with a "
        "password. MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD work, too.",
    ),
    flag("--forget-missing", "Remove missing files from the lists."),
    flag(
        "--outside",
        "Also upload files outside of the folder of their list. Only for lists that you "
        "trust: they could name any of your files.",
    ),
    JSON,
)
def upload(
    folder: str,
    tracking_uri: str | None,
    forget_missing: bool,
    json: bool = False,
    outside: bool = False,
) -> int:
    """Upload the files listed in pending_uploads.jsonl, each to its MLflow run or store.

    The lists contain no passwords; those of stores are read from fsspec's settings.
    """
    if not Path(folder).is_dir():
        raise Failure(f"there is no folder {folder}")
    target_at = cache(_target)  # each is checked once
    send = partial(_send, tracking_uri=tracking_uri, outside=outside, target_at=target_at)
    forgotten = _MISSING if forget_missing else ""
    places = [*_places(folder)]
    sent = [each for place in places for each in _send_all(place, send, forgotten)]
    for path, error in sent:
        if error:
            gone = "the file is missing and was removed from the list"
            print(f"{path}: {gone if error == forgotten else error}", file=sys.stderr)
    done = sum(not error for _, error in sent)
    left = [each for each in sent if each[1] not in ("", forgotten)]
    if json:
        listed = [{"path": path, "error": error} for path, error in left]
        print_json({"uploaded": done, "left": listed})
    else:
        nothing = f"nothing to upload: there is no {FILE_NAME} below {folder}"
        print(f"{done} uploaded, {len(left)} left" if places else nothing)
    return 1 if left else 0


def _send_all(
    place: Path, send: Callable[[PendingUpload, Path], str], forgotten: str
) -> list[tuple[str, str]]:
    """Upload what a folder lists; returns each path, and why it was not uploaded.

    Entries stay listed for other reasons than the forgotten one.
    """
    from rich.console import Console
    from rich.progress import track

    console, sent = Console(stderr=True), []
    with taken_pending(place) as left:
        entries = list(left.items())
        for key, entry in track(
            entries, "uploading", console=console, disable=not console.is_terminal
        ):
            error = send(entry, place)
            sent.append((entry.path, error))
            if error in ("", forgotten):
                del left[key]
            else:
                left[key] = replace(entry, error=error)
    return sent


def _places(folder: str) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        # Hidden folders belong to other tools and may be large.
        below[:] = sorted(name for name in below if not name.startswith("."))
        if any(name.startswith(FILE_NAME) for name in files):
            yield Path(place)


def _send(
    entry: PendingUpload,
    place: Path,
    tracking_uri: str | None,
    outside: bool,
    target_at: Callable[[frozenset[tuple[str, str]]], Target | str],
) -> str:
    """Upload a file listed in the folder ``place``; returns why it stays listed, or nothing."""
    try:
        path = Path(entry.path).resolve()
        if not path.is_file():
            return _MISSING
        if not (outside or path.is_relative_to(place.resolve())):
            return "the file is outside of its list's folder; try --outside"
        remote_format(entry.remote.replace("{", "{{").replace("}", "}}"))
        address = dict(entry.target)
        if tracking_uri is not None and "tracking_uri" in address:
            address["tracking_uri"] = tracking_uri
        target = target_at(frozenset(address.items()))
        if isinstance(target, str):
            return target
        target.send(Path(entry.path), entry.remote)
    except Exception as error:  # of the target, or a path with a null byte
        return describe(error)
    return ""


def _target(items: frozenset[tuple[str, str]]) -> Target | str:
    """The target at an address, or why nothing can be sent to it."""
    address = dict(items)
    if STORE in address:
        check_store(address[STORE])
        return store_target(address[STORE]) or "its entry names no store"
    tracker = tracker_at(address)
    if tracker is None:
        return "its entry names no run that an installed tracker knows"
    return tracker.problem() or Target(tracker.upload_later, tracker.address)
