"""The command about traces of the PyTorch profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_perf.cli import (
    JSON,
    TRACKING_URI,
    Failure,
    argument,
    command,
    new_console,
    print_json,
)
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        "--window", "Which window if there are several, such as 12 for rank0.12.pt.trace.json.gz."
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
    with Progress(console=Console(stderr=True), transient=True) as progress:
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
    console.print(f"{target}: {len(traces)} ranks, {events:,} events", soft_wrap=True)
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        console.print(f"No traces of ranks {', '.join(map(str, missing[:10]))}{more}.")
    for trace in traces[1:]:
        if trace.error is None:
            console.print(f"rank {trace.rank}: nothing in common with rank 0, clock as it is")
            continue
        shift = abs(_shift(trace, traces[0]))
        text = duration(shift / 1e6) if shift else "nothing"
        error = duration(trace.error / 1e6)
        console.print(f"rank {trace.rank}: clock shifted by {text}, residual error {error}")
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
