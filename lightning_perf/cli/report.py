"""Show how fast a run was, and the paths of its traces."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from lightning_perf.cli import JSON, TRACKING_URI, Failure, argument, new_console
from lightning_perf.errors import without_credentials
from lightning_perf.tracking.summary import SummaryError, panel, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from lightning_perf.tracking.runs import Run

#: The folders and suffixes of traces that Perfetto opens.
_TRACES, _TRACE_FILES = {"torch_traces", "viztracer"}, (".json", ".json.gz")
#: The most files of a kind that are shown.
_MOST_FILES = 5

ARGUMENTS = {
    "run": argument(
        "A run's id or name in MLflow, or a folder with its summary.json; by default the "
        "latest run in MLflow or below the current folder.",
        nargs="?",
    ),
    **TRACKING_URI,
    **JSON,
}


def run(run: str | None, tracking_uri: str | None, json: bool) -> int:
    """Print the report; the exit code is 2 if the run cannot be read."""
    from lightning_perf.tracking.runs import find_run

    console = new_console(soft_wrap=True)
    try:
        found = find_run(run, tracking_uri)
    except SummaryError:
        raise
    except LookupError as error:
        why = str(error).rstrip(".")
        raise Failure(f"{why}. Try --tracking-uri ADDRESS") from None
    if json:
        print(text_of({**found.summary, "files": found.files}))
    else:
        _show(found, console)
    return 0


def _show(run: Run, console: Console) -> None:
    console.print(run.title, style="bold")
    console.print(panel(run.summary), soft_wrap=False)
    files = sorted(run.files, key=_natural)  # by batch
    traces = [path for path in files if path.endswith(_TRACE_FILES)]
    _list(
        console,
        "Traces: drag onto https://ui.perfetto.dev (processed in your browser, never uploaded):",
        [path for path in traces if _TRACES & set(PurePosixPath(path).parts)],
    )
    # The chart of the run is last, so that it is always shown.
    pages = [path for path in files if path.endswith(".html")]
    pages.sort(key=lambda path: path.endswith("/timings.html"))
    where = "" if run.tracking_uri is None else " or among MLflow's artifacts"
    _list(console, f"Pages: open in a browser{where}:", pages)
    if (uri := run.tracking_uri) is not None:
        console.print(
            "To see the run and its charts, start MLflow and open the address that it prints:"
        )
        command = f"mlflow ui --backend-store-uri {uri}"
        if uri.startswith(("http://", "https://")):
            command = f"python -m webbrowser {without_credentials(uri)}"
        console.print(f"  {command}", style="bold")


def _list(console: Console, headline: str, paths: Sequence[str]) -> None:
    """Print the latest files, one per line."""
    if paths:
        console.print(headline)
    for path in paths[-_MOST_FILES:]:
        console.print(f"  {path}")
    if len(paths) > _MOST_FILES:
        console.print(f"  and {len(paths) - _MOST_FILES:,} more")


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts numbers by value: 53 before 103."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", path)]
