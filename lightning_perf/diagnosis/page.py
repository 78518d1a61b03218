"""The report of a diagnosis as one HTML page that opens without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_perf.charts import Areas, Heading, Part, Table, page
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
#: What the page says of the machine.
_SENSORS = (
    ("cpu_util_simple", "CPUs in use", "{:.0f} %".format),
    ("cpu_iowait", "CPUs waiting for I/O", "{:.0f} %".format),
    ("process_cpu", "CPU of this training (100 % is one CPU)", "{:.0f} %".format),
    ("free_memory", "free memory", bytes_text),
)


def report_page(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None = None
) -> str:
    """The page, with a captured trace, or why there is none, unless none was wanted."""
    return page("Why this training is not faster", _parts(signals, findings, captured))


def _parts(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None
) -> Iterator[Part]:
    for verdict in findings.verdicts:
        yield Heading(headline(verdict))
        yield from filter(None, (verdict.advice, evidence_text(verdict)))
    if findings.abstained:
        yield Heading("Not diagnosed")
        yield from (f"{code}: {why}." for code, why in findings.abstained.items())
    if signals.windows:
        yield Heading("Where the time of a batch went")
        yield _timeline(signals)
        yield Heading("What named actions cost")
        yield _actions(signals)
        if machine := list(_machine(signals)):
            yield Heading("The machine")
            yield Table(("sensor", "mean"), machine)
        ours = overhead(signals)
        yield Heading("What lightning_perf cost")
        each, share = duration(ours["seconds_per_batch"]), ours["share"]
        yield f"{each} per batch in hooks, {share:.1%} of the time."
    if captured is not None:
        yield Heading("Captured steps")
    if isinstance(captured, str):
        yield f"There is no trace: {captured}."
    elif captured is not None:
        yield Table(("", "value"), list(facts(captured)))
        for title, headings, rows in tables(captured):
            yield Heading(title)
            yield Table(headings, rows)
        yield from (f"Note: {note}." for note in captured.notes)


def _timeline(signals: Signals) -> Areas:
    """Seconds per batch by category over the steps."""
    counts = np.maximum(signals.counts, 1)
    seconds = {name: signals.category(name) / counts for name in CATEGORIES}
    return stack([
        (window.step, {name: float(each[number]) for name, each in seconds.items()})
        for number, window in enumerate(signals.windows)
    ])  # fmt: skip


def _actions(signals: Signals) -> Table:
    wall = float(signals.wall.sum()) or 1.0
    # Waiting for a CPU is part of the others.
    rows = [row for row in signals.actions if row.stage not in ("", QUEUE)]
    rows.sort(key=signals.seconds, reverse=True)
    cells = []
    for row in rows[:_MOST_ACTIONS]:
        seconds, calls = signals.seconds(row), signals.actions[row].calls.sum()
        cells.append((" / ".join(row), duration(seconds), f"{calls:,.0f}", f"{seconds / wall:.1%}"))
    return Table(("action", "time", "calls", "share"), cells)


def _machine(signals: Signals) -> Iterator[tuple[str, str]]:
    for name, what, text in _SENSORS:
        value = signals.average(f"system/{name}")
        if value is not None:
            yield what, text(value)
    if signals.gpu_idle is not None:
        yield "GPUs in use", f"{1 - signals.gpu_idle:.0%}"
