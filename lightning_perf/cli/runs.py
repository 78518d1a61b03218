"""The commands about runs: how fast one was, and compared with others."""

from __future__ import annotations

import re
import sys
from math import inf
from pathlib import Path, PurePosixPath
from shutil import which
from typing import TYPE_CHECKING, Any

from lightning_perf.cli import Failure, check_output, print_json
from lightning_perf.errors import without_credentials
from lightning_perf.files import write_text
from lightning_perf.terminal import new_console, say
from lightning_perf.tracking.summary import PAGE_NAME, RATES, SummaryError, panel, text_of
from lightning_perf.units import duration, three_digits, time_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from lightning_perf.diagnosis.compare import Change, Comparison
    from lightning_perf.tracking.runs import Run

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
    tracking_uri: str | None = None,
    json: bool = False,
) -> int:
    """Show how fast a run was, and the paths of its traces.

    Args:
        run: A run's id or name in MLflow, or a folder with its summary.json; by default the latest
            run in MLflow or below the current folder.
        html (FILE): Write the page of the run to this file.
        tracking_uri (ADDRESS): The MLflow tracking address; by default MLFLOW_TRACKING_URI, or
            ./mlflow.db.
        json: Print JSON.
    """
    from lightning_perf.tracking.runs import find_run

    console = new_console(soft_wrap=True)
    try:
        found = find_run(run, tracking_uri)
    except SummaryError:
        raise
    except LookupError as error:
        why = str(error).rstrip(".")
        advice = "" if why.endswith("?") else ". Try --tracking-uri ADDRESS"
        raise Failure(why + advice) from None
    if html is not None:
        from lightning_perf.tracking.page import report_page

        check_output(Path(html), b"<title>lightning_perf: ")
        write_text(
            Path(html), report_page({**found.summary, "report": "", "traces": [], "pages": []})
        )
    if json:
        say(text_of({**found.summary, "files": found.files}))
    else:
        _show_run(found, console)
    return 0


def _show_run(run: Run, console: Console) -> None:
    console.print(run.title, style="bold")
    if run.note:
        how = "its folder, such as ./NAME" if run.tracking_uri is None else "its id"
        console.print(f"{run.note}. Name another one by {how}.")
    console.print(panel(run.summary), soft_wrap=False)
    files = sorted(run.files, key=_natural)  # by batch
    traces = [path for path in files if path.endswith(_TRACE_FILES)]
    _list(
        console,
        "Traces: drag onto https://ui.perfetto.dev (processed in your browser, never uploaded):",
        [path for path in traces if _TRACES & set(PurePosixPath(path).parts)],
    )
    # The page about the run is last, so that it is always shown.
    pages = [path for path in files if path.endswith(".html")]
    pages.sort(key=lambda path: path.endswith(f"/{PAGE_NAME}"))
    where = "" if run.tracking_uri is None else " or among MLflow's artifacts"
    _list(console, f"Pages: open in a browser{where}:", pages)
    if run.tracking_uri is not None:
        uri = without_credentials(run.tracking_uri)
        how = "start MLflow and open the address that it prints"
        # In the environment of nox -s demo, for one, it is not on the PATH.
        beside = Path(sys.executable).with_name("mlflow")
        program = "mlflow" if which("mlflow") or not beside.exists() else str(beside)
        command = f"{program} ui --backend-store-uri {uri}"
        if uri.startswith(("http://", "https://")):
            how, command = "open MLflow", f"python -m webbrowser {uri}"
        console.print(f"To see the run and its charts, {how}:")
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
    if not baselines:
        raise Failure(f"there is no run to compare with. Try lightning-perf compare {run} BASELINE")
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
    for change in _shown(comparison):
        cells = _row(change, comparison.changes[0].before)
        table.add_row(*cells, style="" if change.certain else "dim")
    if not console.is_terminal:  # a log of CI is wider than rich assumes
        console.width = max(console.width, 120)
    console.print(table)
    for note in notes:
        console.print(f"Note: {note}.", soft_wrap=True)


def _headline(slowdown: Change) -> str:
    change, interval, name = _percent(slowdown), _percents(slowdown), slowdown.name
    if slowdown.low is None:
        return f"{change} per {name}, noise unknown"
    if not slowdown.certain:
        return f"no change beyond the noise ({interval} per {name})"
    word = "slower" if slowdown.difference > 0 else "faster"
    each = f"{duration(slowdown.before)} -> {duration(slowdown.after)} per {name}"
    return f"{word}: {each}, {change} ({interval})"


def _shown(comparison: Comparison) -> Iterator[Change]:
    """All rates, and the phases and culprits that changed most."""
    least = _LEAST_SHARE * comparison.changes[0].before
    kinds = dict.fromkeys(("phase", "culprit"), 0)
    for change in comparison.changes:
        if change.kind in kinds:
            kinds[change.kind] += 1
            if abs(change.difference) < least or kinds[change.kind] > _MOST_ROWS:
                continue
        yield change


def _row(row: Change, step: float) -> tuple[str, ...]:
    if row.kind == "rate":
        text: Callable[[float], str] = _share if row.name == "mfu" else three_digits
        name, change, interval = RATES[row.name][0], _percent(row), _percents(row)
    else:
        text = duration
        name = f"time per {row.name}" if row.kind == "step" else f"  {row.name}"
        # Of a phase or culprit, how much slower it makes the whole step.
        whole = (row.before if row.kind == "step" else step) or 1.0
        scale, unit = time_unit(max(map(abs, (row.low or 0, row.high or 0, row.difference))))
        change = f"{row.difference * scale:+.3g} {unit} ({row.difference / whole:+.1%})"
        interval = "unknown"
        if row.low is not None and row.high is not None:
            interval = f"{row.low * scale:+.3g} to {row.high * scale:+.3g} {unit}"
    return name, text(row.before), text(row.after), change, interval


def _share(value: float) -> str:
    return f"{three_digits(100 * value)}%"


def _percent(change: Change) -> str:
    return f"{change.relative(change.difference):+.1%}"


def _percents(change: Change) -> str:
    if change.low is None or change.high is None:
        return "unknown"
    return f"{change.relative(change.low):+.1%} to {change.relative(change.high):+.1%}"
