"""What a diagnosis leaves: a block in the terminal, and a JSON document."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from lightning_perf.diagnosis.rules.base import known
from lightning_perf.timing.totals import CATEGORIES
from lightning_perf.units import bytes_text, duration, three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from lightning_perf.diagnosis.rules import Findings
    from lightning_perf.diagnosis.signals import Signals
    from lightning_perf.diagnosis.verdicts import Verdict
    from lightning_perf.traces.summary import TraceSummary

#: Version of the JSON document.
VERSION = 1
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim", "healthy": "bold green"}
#: What a value is, by the end of its name in the evidence.
_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": duration,
    "share": lambda value: f"{value:.1%}",
    "bytes": bytes_text,
    "percent": lambda value: f"{value:.0f} %",
    "celsius": lambda value: f"{value:.0f} °C",
    "watts": lambda value: f"{value:.0f} W",
    "mhz": lambda value: f"{value:.0f} MHz",
}


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
        lines = (evidence_text(verdict), verdict.advice)
        blocks += [Padding(Text(line), (0, 0, 0, 2)) for line in lines if line]
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
    parts = [verdict.culprit] if verdict.culprit else []
    if verdict.rank is not None and verdict.culprit != f"rank {verdict.rank}":
        parts.append(f"rank {verdict.rank}")
    if verdict.share:
        parts.append(f"{verdict.share:.0%} of the time")
        parts.append(f"{verdict.predicted_speedup:.2f}x faster without it")
    return f"{text}: {', '.join(parts)}" if parts else text


def evidence_text(verdict: Verdict) -> str:
    """The evidence on one line, with units.

    Example:
        >>> from lightning_perf.diagnosis import Verdict
        >>> evidence = {"first_step_seconds": 1.5, "seconds_per_call": 0.0271}
        >>> evidence_text(Verdict("warmup", "info", evidence=evidence))
        'first step 1.50 s, 27.1 ms per call'
    """
    found = []
    for name, value in verdict.evidence.items():
        words, _, unit = name.rpartition("_")
        if isinstance(value, str) or not isfinite(value):
            found.append(f"{name.replace('_', ' ')} {value}")
        elif unit in _UNITS and words:
            found.append(f"{words.replace('_', ' ')} {_UNITS[unit](value)}")
        elif name.startswith("seconds_per_"):
            found.append(f"{duration(value)} per {unit}")
        else:
            number = f"{value:,.0f}" if value == int(value) else three_digits(value)
            found.append(f"{name.replace('_', ' ')} {number}")
    return ", ".join(found)


def document(
    signals: Signals, findings: Findings, captured: TraceSummary | str | None = None
) -> dict[str, Any]:
    """The content of ``diagnosis.json``, with a captured trace as in `report_page`."""
    timings: dict[str, Any] = {}
    if signals.windows:
        first, last = signals.windows[0], signals.windows[-1]
        timings = {
            "first_batch": first.first.batch,
            "last_batch": last.last.batch,
            "step": last.step,
            "batches": signals.batches,
            "wall_seconds": float(signals.wall.sum()),
            "seconds": {name: float(signals.category(name).sum()) for name in CATEGORIES},
        }
    sensors = ("cpu_util_simple", "cpu_iowait", "process_cpu", "free_memory")
    found = {
        "version": VERSION,
        "verdicts": [verdict.as_dict() for verdict in findings.verdicts],
        "abstained": dict(findings.abstained),
        "timings": timings,
        "system": known(**{name: signals.average(f"system/{name}") for name in sensors}),
        "overhead": overhead(signals),
    }
    if isinstance(captured, str):
        found["capture"] = {"missing": captured}
    elif captured is not None:
        found["capture"] = captured.as_dict()
    return found


def overhead(signals: Signals) -> dict[str, float]:
    """What our own callbacks cost in their hooks, on rank 0."""
    ours = [row for row in signals.actions if row.name.partition(".")[0] in signals.setup.ours]
    seconds = float(signals.total(ours).seconds.sum())
    wall = float(signals.wall.sum())
    return {
        "seconds": seconds,
        "seconds_per_batch": seconds / max(signals.batches, 1),
        "share": seconds / wall if wall else 0.0,
    }
