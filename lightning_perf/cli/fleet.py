"""The command that shows all runs of a server or a folder."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_perf.checks import amount
from lightning_perf.cli import Failure, check_output, print_json
from lightning_perf.errors import without_credentials
from lightning_perf.files import write_text
from lightning_perf.terminal import new_console, say
from lightning_perf.units import counted, three_digits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_perf.tracking.fleet import FleetRun
    from lightning_perf.tracking.summary import SummaryError

_HEADINGS = (
    "run", "state", "device hours", "wasted", "MFU", "goodput", "first verdict", "culprit",
)  # fmt: skip
#: Summaries that are named if they cannot be read.
_MOST_NAMED = 3


def runs(
    place: str | None = None,
    *,
    experiment: str | None = None,
    since: str | None = None,
    limit: int = 20,
    html: str | None = None,
    json: bool = False,
) -> int:
    """Show all runs, those that waste the most device hours first.

    A run wastes the share of its device hours that its verdicts explain, or those that went into no
    step that was kept; one that is silent wastes all time since its last sign of life.

    Args:
        place: An MLflow tracking address, or a folder with runs below it; by default
            MLFLOW_TRACKING_URI, ./mlflow.db, or the current folder.
        experiment (NAME): Only runs of this experiment of MLflow, by its name or id.
        since (TIME): Only runs that began within this time, such as 2w or 12h; in a folder, those
            that were active in it.
        limit (N): How many runs to show; 20 by default. Summaries are read of these alone.
        html (FILE): Write a page with them to this file.
        json: Print JSON.
    """
    from lightning_perf.tracking import fleet

    if limit < 1:
        raise Failure(f"--limit {limit} is below 1")
    start, where = _start(since), _where(place)
    if isinstance(where, Path):
        if experiment is not None:
            raise Failure(f"--experiment is of MLflow, and {where} is a folder")
        unreadable: list[SummaryError] = []
        found = fleet.in_folder(where, start, unreadable)
        if unreadable:
            first = "; ".join(map(str, unreadable[:_MOST_NAMED]))
            more = ", among others" if len(unreadable) > _MOST_NAMED else ""
            left = counted(len(unreadable), "file")
            say(f"left out {left} that cannot be read as a summary: {first}{more}", file=sys.stderr)
        shown, count = found[:limit], len(found)
    else:
        shown, count = fleet.in_mlflow(where, experiment, start, limit)
    if not count:
        raise Failure(f"there is no run of lightning_perf in {without_credentials(str(where))}")
    head = f"{len(shown):,} of {counted(count, 'run')} in {without_credentials(str(where))}"
    if html is not None:
        from lightning_perf.charts import Table, page

        check_output(Path(html), b'name="generator" content="lightning_perf"')
        table = Table(_HEADINGS, [_cells(run) for run in shown])
        write_text(Path(html), page("Runs by wasted device hours", [head, table]))
    if json:
        print_json({"count": count, "runs": [run.as_dict() for run in shown]})
    elif html is None:
        _show(head, shown)
    return 0


def _start(since: str | None) -> float:
    """The time in seconds since the epoch; 0 without a limit."""
    if since is None:
        return 0.0
    number, unit = amount(since.strip())
    if unit != "sec":
        raise Failure(f"--since {since} is not a time, such as 2w, 7d or 12h")
    return max(time.time() - float(number), 0.0)  # noqa: TID251 (as MLflow has it)


def _where(place: str | None) -> Path | str:
    """A folder, or the address of MLflow."""
    from lightning_perf.tracking import runs

    if place is None:
        if runs.address() or Path("mlflow.db").is_file():
            return runs.default_tracking_uri()
        return Path()
    if Path(place).is_dir():
        return Path(place)
    if place.endswith(".db") and Path(place).is_file():
        return f"sqlite:///{Path(place).absolute()}"  # MLflow keeps databases open by address
    if re.match(r"\w[\w+.-]*:", place) or place == "databricks":
        return place
    raise Failure(f"{place} is neither a folder nor an address of MLflow")


def _cells(run: FleetRun) -> tuple[str, ...]:
    shares = ("" if each is None else f"{each:.1%}" for each in (run.mfu, run.goodput))
    hours = (run.device_hours + run.silent_hours, run.wasted_hours)
    return (
        f"{run.run}\n{run.place}", run.state, *map(three_digits, hours), *shares, run.verdict,
        run.culprit,
    )  # fmt: skip


def _show(head: str, shown: Sequence[FleetRun]) -> None:
    from rich.table import Table

    console = new_console()
    if not console.is_terminal:
        console.width = max(console.width, 200)
    console.print(f"{head}, by wasted device hours", style="bold", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        number = heading in _HEADINGS[2:6]
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for run in shown:
        table.add_row(*_cells(run))
    console.print(table)
    console.print("lightning-perf report shows one of them, by its id or folder.", soft_wrap=True)
