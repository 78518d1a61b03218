"""The report of a diagnosis as one HTML page that opens without a network."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from lightning_perf.charts.page import Areas, Heading, Part, Table, page
from lightning_perf.charts.stacked import stack
from lightning_perf.diagnosis.report import evidence_text, headline, overhead
from lightning_perf.timing.pauses import QUEUE
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.traces.summary import facts, tables
from lightning_perf.units import bytes_text, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_perf.diagnosis.rules import Findings
    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.traces.summary import TraceSummary

#: Named actions listed at most.
_MOST_ACTIONS = 20


def report_page(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None = None
) -> str:
    """The page, with a captured trace, or why there is none, unless none was wanted."""
    parts = chain(_parts(signals, findings), _captured(captured))
    return page("Why this training is not faster", parts)


def _captured(captured: TraceSummary | str | None) -> Iterator[Part]:
    if captured is None:
        return
    yield Heading("Captured steps")
    if isinstance(captured, str):
        yield f"There is no trace: {captured}."
        return
    yield Table(("", "value"), list(facts(captured)))
    for title, headings, rows in tables(captured):
        yield Heading(title)
        yield Table(headings, rows)
    yield from (f"Note: {note}." for note in captured.notes)


def _parts(signals: Signals, findings: Findings) -> Iterator[Part]:
    for verdict in findings.verdicts:
        yield Heading(headline(verdict))
        yield from filter(None, (verdict.advice, evidence_text(verdict)))
    if findings.abstained:
        yield Heading("Not diagnosed")
        yield from (f"{code}: {why}." for code, why in findings.abstained.items())
    if not signals.windows:
        return
    yield Heading("Where the time of a batch went")
    yield timeline(signals)
    yield Heading("What named actions cost")
    yield _actions(signals)
    yield from _system(signals)
    ours = overhead(signals)
    yield Heading("What lightning_perf cost")
    each, share = duration(ours["seconds_per_batch"]), ours["share"]
    yield f"{each} per batch in hooks, {share:.1%} of the time."


def timeline(signals: Signals) -> Areas:
    """Seconds per batch by category over the steps."""
    counts = [max(window.batches, 1) for window in signals.windows]
    seconds = {name: signals.category(name) for name in CATEGORIES}
    rows = [
        (window.step, {name: float(each[number]) / count for name, each in seconds.items()})
        for number, (window, count) in enumerate(zip(signals.windows, counts, strict=True))
    ]
    return stack(rows)


def _actions(signals: Signals) -> Table:
    wall = float(signals.wall.sum()) or 1.0
    costs = [
        (float(each.seconds.sum()), row, int(each.calls.sum()))
        for row, each in signals.actions.items()
        if row.stage not in ("", QUEUE)  # waiting for a CPU is part of the others
    ]
    rows = [
        (f"{row.stage} / {row.category} / {row.name}", duration(spent), f"{calls:,}",
         f"{spent / wall:.1%}")
        for spent, row, calls in sorted(costs, key=lambda each: -each[0])[:_MOST_ACTIONS]
    ]  # fmt: skip
    return Table(("action", "time", "calls", "share"), rows)


def _system(signals: Signals) -> Iterator[Part]:
    rows = []
    for name, text in {
        "cpu_util_simple": "CPUs in use",
        "cpu_iowait": "CPUs waiting for I/O",
        "process_cpu": "CPU of this training (100 % is one CPU)",
    }.items():
        value = signals.average(f"system/{name}")
        if value is not None:
            rows.append((text, f"{value:.0f} %"))
    free = signals.average("system/free_memory")
    if free is not None:
        rows.append(("free memory", bytes_text(free)))
    if signals.gpu_idle is not None:
        rows.append(("GPUs in use", f"{1 - signals.gpu_idle:.0%}"))
    if rows:
        yield Heading("The machine")
        yield Table(("sensor", "mean"), rows)
