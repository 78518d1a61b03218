"""The views of a diagnosis: text for the terminal, a JSON document, and an HTML page."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_perf.charts import Areas, Heading, Part, Table, page
from lightning_perf.charts.stacked import stack
from lightning_perf.diagnosis.rules import called, without_none
from lightning_perf.timing.clock import QUEUE
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.traces.summary import facts, tables
from lightning_perf.units import bytes_text, counted, duration, three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from lightning_perf.diagnosis import Findings, Verdict
    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.traces.summary import TraceSummary

#: Version of the JSON document.
VERSION = 1
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim", "healthy": "bold green"}
#: Units of values in the evidence, by the end of their names.
_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": duration,
    "share": lambda value: f"{value:.1%}",
    "bytes": bytes_text,
    "percent": lambda value: f"{value:.0f}%",
    "celsius": lambda value: f"{value:.0f} °C",
    "watts": lambda value: f"{value:.0f} W",
    "mhz": lambda value: f"{value:.0f} MHz",
}
#: What evidence is called in texts, beside its name in JSON.
_EVIDENCE = {
    "wait_seconds": "waiting for a batch",
    "step_seconds": "time per batch",
    "advised_step_seconds": "time per batch as advised",
    "first_step_seconds": "first batch",
    "median_step_seconds": "median batch",
    "before_seconds": "batch before",
    "after_seconds": "batch after",
    "compile_seconds": "compilation",
    "cpu_percent": "CPUs in use",
    "own_percent": "by this training",
    "iowait_percent": "CPUs waiting for I/O",
    "num_workers": "num_workers",
    "torch_threads": "threads of torch",
}
#: Lower bounds below this share are not shown.
_SHOWN = 1e-3
#: Maximum named actions in the list.
_MOST_ACTIONS = 20
#: Sensors of the machine, and how the page shows them.
_SENSORS = (
    ("cpu_util_simple", "CPUs in use", "{:.0f}%".format),
    ("cpu_iowait", "CPUs waiting for I/O", "{:.0f}%".format),
    ("process_cpu", "CPU of this training (100% is one CPU)", "{:.0f}%".format),
    ("free_memory", "free memory", bytes_text),
)


def panel(
    verdicts: Sequence[Verdict], abstained: Mapping[str, str] | None = None
) -> RenderableType:
    """A rich renderable: one block per verdict, and why other rules gave no answer."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    blocks: list[RenderableType] = []
    for verdict in verdicts:
        style = _STYLES.get("healthy" if verdict.code == "healthy" else verdict.severity, "")
        head = Text(headline(verdict))
        head.stylize(style, 0, len(verdict.code))
        blocks.append(head)
        lines = (Text(verdict.advice), Text(evidence_text(verdict), style="dim"))
        blocks += [Padding(line, (0, 0, 0, 2)) for line in lines if line]
    if abstained:
        reasons = "; ".join(f"{code}: {why}" for code, why in abstained.items())
        blocks.append(Text(f"Not diagnosed: {reasons}.", style="dim"))
    return Group(*blocks)


def headline(verdict: Verdict) -> str:
    """One line about a verdict.

    Example:
        >>> from lightning_perf.diagnosis import Verdict
        >>> headline(Verdict("callback-bound", "critical", 0.25, culprit="Plots.on_fit_start"))
        'callback-bound (critical): Plots.on_fit_start, 25% of the time, 1.33x faster without it'
    """
    text = verdict.code if verdict.code == "healthy" else f"{verdict.code} ({verdict.severity})"
    parts = [_culprit(verdict.culprit)] if verdict.culprit else []
    if verdict.rank is not None and verdict.culprit != f"rank {verdict.rank}":
        parts.append(f"rank {verdict.rank}")
    if verdict.share:
        parts.append(f"{verdict.share:.0%} of the time")
        how = "as advised" if "advised_step_seconds" in verdict.evidence else "without it"
        parts.append(f"{verdict.predicted_speedup:.2f}x faster {how}")
    return f"{text}: {', '.join(parts)}" if parts else text


def _culprit(name: str) -> str:
    stage, _, category = name.partition(".")
    return f"validation, mostly {category}" if stage == "validate" else called(name)


def evidence_text(verdict: Verdict) -> str:
    """The evidence on one line, with units.

    Example:
        >>> from lightning_perf.diagnosis import Verdict
        >>> evidence = {"lower_bound_share": 0.2, "first_step_seconds": 1.5, "calls": 4.0}
        >>> evidence_text(Verdict("warmup", "info", evidence=evidence))
        'It takes at least 20.0% of the time. Measured: first batch 1.50 s, calls 4.'
    """
    takes, measured = [], []
    for name, value in verdict.evidence.items():
        words, _, unit = name.rpartition("_")
        label = _EVIDENCE.get(name)
        if isinstance(value, str) or not isfinite(value):
            measured.append(f"{label or _words(name)} {value}")
        elif name == "lower_bound_share":
            takes += [f"at least {value:.1%} of the time"] if value >= _SHOWN else []
        elif name == "seconds_per_batch":
            takes.append(f"{duration(value)} per batch")
        elif unit in _UNITS and words:
            measured.append(f"{label or _words(words)} {_UNITS[unit](value)}")
        elif name.startswith("seconds_per_"):
            measured.append(f"{duration(value)} per {unit}")
        else:
            number = f"{value:,.0f}" if value == int(value) else three_digits(value)
            measured.append(f"{label or _words(name)} {number}")
    sentences = [f"It takes {' and '.join(takes)}."] if takes else []
    sentences += [f"Measured: {', '.join(measured)}."] if measured else []
    return " ".join(sentences)


def _words(name: str) -> str:
    return name.replace("_", " ").replace("cpu", "CPU").replace("gpu", "GPU").replace("sm ", "SM ")


def document(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None = None
) -> dict[str, Any]:
    """The content of ``diagnosis.json``, with a captured trace as in `report_page`."""
    timings: dict[str, Any] = {}
    if signals.windows:
        first, last = signals.windows[0], signals.windows[-1]
        timings = {
            "first_batch": first.first.batch, "last_batch": last.last.batch, "step": last.step,
            "batches": signals.batches, "wall_seconds": float(signals.wall.sum()),
            "seconds": {name: float(signals.category(name).sum()) for name in CATEGORIES},
        }  # fmt: skip
    content = {
        "version": VERSION,
        "verdicts": [verdict.as_dict() for verdict in findings.verdicts],
        "abstained": dict(findings.abstained),
        "timings": timings,
        "system": without_none(
            **{name: signals.average(f"system/{name}") for name, *_ in _SENSORS}
        ),
        "overhead": overhead(signals),
    }
    if isinstance(captured, str):
        content["capture"] = {"missing": captured}
    elif captured is not None:
        content["capture"] = captured.as_dict()
    return content


def overhead(signals: Signals) -> dict[str, float]:
    """The time of our own callbacks in their hooks, on rank 0."""
    ours = [row for row in signals.actions if row.name.partition(".")[0] in signals.setup.ours]
    seconds = float(signals.total(ours).seconds.sum())
    wall = float(signals.wall.sum())
    return {
        "seconds": seconds,
        "seconds_per_batch": seconds / max(signals.batches, 1),
        "share": seconds / wall if wall else 0.0,
    }


def report_page(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None = None
) -> str:
    """The page; if a capture was wanted, with its summary or the reason why there is none."""
    return page("Why this training is not faster", _parts(signals, findings, captured))


def _parts(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None
) -> Iterator[Part]:
    if signals.windows:
        yield _speed(signals)
    for verdict in findings.verdicts:
        yield Heading(headline(verdict))
        yield from filter(None, (verdict.advice, evidence_text(verdict)))
    if findings.abstained:
        yield Heading("Not diagnosed")
        yield from (f"{code}: {why}." for code, why in findings.abstained.items())
    if signals.windows:
        yield Heading("Where the time of a batch went")
        yield _timeline(signals)
        yield Heading("Time by named action")
        yield _actions(signals)
        if machine := list(_machine(signals)):
            yield Heading("The machine")
            yield Table(("sensor", "mean"), machine)
        ours = overhead(signals)
        yield Heading("What lightning_perf cost")
        per_batch, share = duration(ours["seconds_per_batch"]), ours["share"]
        yield f"{per_batch} per batch in hooks, {share:.1%} of the time."
    if captured is not None:
        yield Heading("Captured batches")
    if isinstance(captured, str):
        yield f"There is no trace: {captured}."
    elif captured is not None:
        yield Table(("", "value"), list(facts(captured)))
        for title, headings, rows in tables(captured):
            yield Heading(title)
            yield Table(headings, rows)
        yield from (f"Note: {note}." for note in captured.notes)


def _speed(signals: Signals) -> str:
    """How fast the training is, on what."""
    setup, mfu = signals.setup, signals.mfu
    utilization = "" if mfu is None else f"MFU {mfu:.1%}, "
    step, batches = duration(signals.step_seconds), counted(signals.batches, "batch")
    devices = f"{setup.world_size} x {setup.device}, {setup.precision}"
    return f"{utilization}{step} per batch after the warm-up, {batches} ({devices})."


def _timeline(signals: Signals) -> Areas:
    """Seconds per batch by category over the steps."""
    counts = np.maximum(signals.counts, 1)
    seconds = {name: signals.category(name) / counts for name in CATEGORIES}
    return stack([
        (window.step, {name: float(series[number]) for name, series in seconds.items()})
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
        where = ", ".join(part for part in row[:2] if part != row.name)
        times = f"{calls:,.0f}" if calls else ""  # the rest of a span that began in another stage
        cells.append((f"{row.name} ({where})", duration(seconds), times, f"{seconds / wall:.1%}"))
    return Table(("action", "time", "calls", "share"), cells)


def _machine(signals: Signals) -> Iterator[tuple[str, str]]:
    for name, label, text in _SENSORS:
        value = signals.average(f"system/{name}")
        if value is not None:
            yield label, text(value)
    if signals.gpu_idle is not None:
        yield "GPUs in use", f"{1 - signals.gpu_idle:.0%}"
