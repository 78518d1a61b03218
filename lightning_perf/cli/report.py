"""``lightning-perf report``: the speed, times and files of a run in MLflow."""

from __future__ import annotations

import os
import re
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.errors import without_credentials
from lightning_perf.timing.totals import CATEGORIES, windows_of
from lightning_perf.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from jsonargparse import ArgumentParser
    from rich.console import Console
    from rich.table import Table

    from lightning_perf.tracking.runs import Run

#: The folders and suffixes of traces that Perfetto opens.
_TRACES, _TRACE_FILES = {"torch_traces", "viztracer"}, (".json", ".json.gz")
#: The most files of a kind and the most categories of time that are shown.
_MOST_FILES, _MOST_CATEGORIES = 5, 5


def parser() -> ArgumentParser:
    """The arguments of the command."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description="Show how fast a run was, and the paths of its traces.")
    parser.add_argument("run", nargs="?", help="The run id in MLflow; by default the latest run.")
    parser.add_argument(
        "--tracking_uri",
        type=str,
        default=None,
        help="The MLflow tracking address; by default MLFLOW_TRACKING_URI, or ./mlflow.db.",
    )
    return parser


def run(run: str | None, tracking_uri: str | None) -> int:
    """Print the report.

    Returns:
        The exit code: 2 if the run cannot be read.
    """
    from rich.console import Console

    from lightning_perf.tracking.runs import default_tracking_uri, read_run

    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    uri = tracking_uri or default_tracking_uri()
    try:
        found = read_run(run, uri, [f"timings/{name}" for name in CATEGORIES])
    except LookupError as error:
        why = str(error).rstrip(".")
        print(f"lightning-perf report: {why}. Try --tracking_uri ADDRESS.", file=sys.stderr)  # noqa: T201
        return 2
    # Paths are meant to be copied, so lines are not wrapped. Names may look like markup.
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    _show(found, console)
    return 0


def _show(run: Run, console: Console) -> None:
    console.print(f"{run.name} ({run.run_id})", style="bold")
    console.print(_table(run), soft_wrap=False)
    _list(
        console,
        "Traces: drag onto https://ui.perfetto.dev (processed in your browser, never uploaded):",
        [path for path in _files(run, *_TRACE_FILES) if _TRACES & set(PurePosixPath(path).parts)],
    )
    # The chart of the run is last, so that it is always shown.
    pages = sorted(_files(run, ".html"), key=lambda path: path.endswith("/timings.html"))
    _list(console, "Pages: open in a browser or among MLflow's artifacts:", pages)
    console.print(
        "To see the run and its charts, start MLflow and open the address that it prints:"
    )
    console.print(f"  {_ui_command(run.tracking_uri)}", style="bold")


def _list(console: Console, headline: str, paths: Sequence[str]) -> None:
    """Print the latest files, one per line."""
    if paths:
        console.print(headline)
    for path in paths[-_MOST_FILES:]:
        console.print(f"  {path}")
    if len(paths) > _MOST_FILES:
        console.print(f"  and {len(paths) - _MOST_FILES:,} more")


def _ui_command(uri: str) -> str:
    if uri.startswith(("http://", "https://")):
        return f"python -m webbrowser {without_credentials(uri)}"
    return f"mlflow ui --backend-store-uri {uri}"


def _table(run: Run) -> Table:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in _rows(run):
        table.add_row(name, value)
    return table


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    def metric(key: str, text: str, scale: float = 1.0) -> Iterator[str]:
        if key in run.metrics:
            yield text.format(run.metrics[key] / scale)

    for name, values in {
        "status": iter(() if run.status == "FINISHED" else (run.status.lower(),)),
        "batches/s": metric("throughput/batches_per_sec", "{:,.2f}"),
        "samples/s": metric("throughput/samples_per_sec", "{:,.1f}"),
        "tokens/s": metric("throughput/tokens_per_sec", "{:,.0f}"),
        "TFLOP/s per device": metric("throughput/device/flops_per_sec", "{:.3g}", 1e12),
        "FLOPs per batch": metric("batch_flops", "{:.4g}"),
        "MFU (last window)": metric("throughput/device/mfu", "{:.1%}"),
        "peak": _peak(run),
        "devices": _device(run),
        **_times(run),
    }.items():
        text = "\n".join(values)
        if text:
            yield name, text


def _peak(run: Run) -> Iterator[str]:
    peak = run.params.get("lightning_perf/peak_flops")
    if peak is not None:
        source = run.params.get("lightning_perf/peak_source", "")
        precision = run.params.get("lightning_perf/precision", "")
        yield f"{float(peak) / 1e12:.3g} TFLOP/s per device, {precision} ({source})"


def _device(run: Run) -> Iterator[str]:
    if device := run.params.get("lightning_perf/device"):
        yield f"{run.params.get('lightning_perf/world_size', '1')} x {device}"


def _times(run: Run) -> dict[str, Iterator[str]]:
    """The times of the whole run and of its last report."""
    windows = run.summary.get("timings") or windows_of(run.points)
    whole, last = windows.get("whole_run"), windows.get("last_window")
    found = {}
    if whole:
        found["where the time went"] = _shares(whole, "the whole run, ")
    if last and last != whole:
        found["in the last window"] = _shares(last)
    return found


def _shares(window: Mapping[str, Any], what: str = "") -> Iterator[str]:
    """The steps of a window, and the categories with the largest shares of its time."""
    spent, batches = window["seconds"], window["batches"] or 1
    whole = sum(spent.values())
    if not whole > 0:
        return
    yield f"{what}steps {window['first']} to {window['last']}"
    for name in sorted(spent, key=lambda name: -spent[name])[:_MOST_CATEGORIES]:
        if spent[name] > 0:
            each = duration(spent[name] / batches)
            yield f"{spent[name] / whole:6.1%}  {name} ({each} per batch)"


def _files(run: Run, *endings: str) -> list[str]:
    """The paths of files with these suffixes, in the order of batches."""
    root = run.artifact_uri.removeprefix("file://").rstrip("/")
    found = sorted((path for path in run.artifacts if path.endswith(endings)), key=_natural)
    return [f"{root}/{path}" for path in found]


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts numbers by value: 53 before 103."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", path)]
