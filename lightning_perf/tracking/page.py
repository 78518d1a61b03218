"""``report.html``: the results of a run on one page, from the content of its ``summary.json``."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from lightning_perf.charts import Areas, Heading, Links, Part, Table, page
from lightning_perf.charts.stacked import Row, costs, heatmap, stack
from lightning_perf.diagnosis.report import evidence_text
from lightning_perf.diagnosis.report import headline as verdict_headline
from lightning_perf.timing.totals import Share
from lightning_perf.traces.summary import facts, tables
from lightning_perf.tracking.summary import headline, main_stage, rows, verdicts_of
from lightning_perf.units import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_perf.tracking.summary import Summary

#: Averages of sensors, and how the page shows them.
SENSORS = {
    "cpu_util_simple": ("CPUs in use", "{:.0f}%".format),
    "cpu_iowait": ("CPUs waiting for I/O", "{:.0f}%".format),
    "process_cpu": ("CPU of this training (100% is one CPU)", "{:.0f}%".format),
    "free_memory": ("free memory", bytes_text),
    "gpu_util": ("GPUs in use", "{:.0f}%".format),
}
_TIME = "Where the time of a batch went"
#: Links of a kind at most, the latest.
_MOST_LINKS = 50


def report_page(summary: Summary) -> str:
    """The page about a run: of a summary that was read, or is being written."""
    return page(f"lightning_perf: {summary['run']}", _parts(summary))


def _parts(summary: Summary) -> Iterator[Part]:
    if speed := headline(summary):
        yield speed
    for verdict in verdicts_of(summary):
        yield Heading(verdict_headline(verdict))
        yield from filter(None, (verdict.advice, evidence_text(verdict)))
    if abstained := summary.get("abstained"):
        yield Heading("Not diagnosed")
        yield from (f"{code}: {why}." for code, why in abstained.items())
    main, _ = main_stage(summary)
    for stage, figures in summary["stages"].items():
        spent = (figures.get("whole_run") or {}).get("timings")
        if spent and "windows" in figures:  # not validation within a fit
            yield Heading(_TIME if stage == main else f"{_TIME}, {stage}")
            yield _chart(figures, spent)
    if culprits := summary.get("culprits"):
        yield Heading("Callbacks and loggers")
        # A later version may have written more fields.
        yield costs([Share(*(row[name] for name in Share._fields)) for row in culprits])
    yield from _ranks(summary)
    yield from _system(summary)
    yield from _captured(summary.get("capture") or {})
    yield from _links(summary)


def _chart(figures: Mapping[str, Any], spent: Mapping[str, float]) -> Areas:
    """The time of a stage over its steps. What no window has is after the last one."""
    whole, windows = figures["whole_run"], figures.get("windows") or {}
    names, kept = zip(*(windows.get("timings") or {"other": []}).items(), strict=True)
    columns = zip(windows.get("last") or (), windows.get("batches") or (), *kept, strict=False)
    counts, rows, rest = 0.0, list[Row](), dict(spent)
    for last, count, *seconds in columns:
        if count > 0:
            counts += count
            rows.append((int(last), {n: s / count for n, s in zip(names, seconds, strict=True)}))
            rest |= {n: rest.get(n, 0.0) - s for n, s in zip(names, seconds, strict=True)}
    batches = whole["batches"] - counts
    before: Mapping[str, float] = {}
    if batches < 1 and rows:
        batches = count
        _, before = rows.pop()
    # Windows are rounded.
    after = {n: max(s, 0.0) / max(batches, 1) + before.get(n, 0.0) for n, s in rest.items()}
    rows.append((int(whole["last"]), after))
    return stack(sorted(rows, key=lambda row: row[0]), int(whole["first"]))


def _ranks(summary: Summary) -> Iterator[Part]:
    ranks: Mapping[str, Any] = summary.get("ranks") or {}
    steps, lateness = ranks.get("last") or (), ranks.get("lateness") or ()
    if steps and lateness and {len(row) for row in lateness} == {len(steps)}:
        yield Heading("Ranks that the others wait for")
        yield heatmap(steps, lateness, int((summary.get("setup") or {}).get("world_size") or 1))


def _system(summary: Summary) -> Iterator[Part]:
    """What the run ran on, how fast it was, and averages of sensors."""
    known, figures = rows(summary)
    averages: Mapping[str, float] = summary.get("system") or {}
    known += [(label, text(averages[name])) for name, (label, text) in SENSORS.items()
              if name in averages]  # fmt: skip
    yield Heading("System")
    if figures:
        head, *body = figures
        yield Table([cell.replace("\n", ", ") for cell in head], body)
    # Costs have a table of their own.
    yield Table(("", "value"), [row for row in known if row[0] != "costs by name"])


def _captured(capture: Mapping[str, Any]) -> Iterator[Part]:
    """The summary of a captured trace, or why there is none; nothing if none was wanted."""
    if not capture:
        return
    yield Heading("Captured steps")
    if not {"events", "seconds", "steps"} <= capture.keys():
        yield f"There is no trace: {capture.get('missing', 'unknown')}."
        return
    yield Table(("", "value"), list(facts(capture)))
    for title, headings, cells in tables(capture):
        yield Heading(title)
        yield Table(headings, cells)
    yield from (f"Note: {note}." for note in capture.get("notes", ()))


def _links(summary: Summary) -> Iterator[Part]:
    own = summary.get("report", "")
    folder = posixpath.dirname(own) or "."
    for kind in ("traces", "pages"):
        files = [path for path in summary.get(kind) or () if path != own]
        linked = [path for path in files[-_MOST_LINKS:] if not posixpath.isabs(path)]
        if files:
            yield Heading(kind.capitalize())
            yield Links([(path, posixpath.relpath(path, folder)) for path in linked])
        if others := len(files) - len(linked):
            yield f"{others:,} more are listed in summary.json."
