"""Verdicts as text: a headline, the evidence, and a panel for the terminal."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from lightning_perf.diagnosis.rules import called
from lightning_perf.units import bytes_text, duration, three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType

    from lightning_perf.diagnosis import Verdict

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
#: Labels of evidence in texts, by its name in JSON.
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
    "with_waiting_share": "with its waiting for a CPU",
    "own_percent": "by this run",
    "foreign_percent": "by other programs",
    "iowait_percent": "CPUs waiting for I/O",
    "num_workers": "num_workers",
    "torch_threads": "threads of torch",
}
#: Numbers that the advice has in words.
_IN_ADVICE = {"advised_workers", "advised_log_every_n_steps", "advised_every_n_train_steps"}
#: Lower bounds below this share are not shown.
_SHOWN = 1e-3
#: Lower bounds below this part of the share are in the headline.
_UNCERTAIN = 1 / 2


def panel(
    verdicts: Sequence[Verdict], abstained: Mapping[str, str] | None = None
) -> RenderableType:
    """A rich renderable: one block per verdict, and why other rules gave no answer."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    blocks: list[RenderableType] = []
    for verdict in verdicts:
        style = _STYLES.get(severity(verdict), "")
        head = Text(headline(verdict))
        head.stylize(style, 0, len(verdict.code))
        blocks.append(head)
        lines = (Text(verdict.advice), Text(evidence_text(verdict), style="dim"))
        blocks += [Padding(line, (0, 0, 0, 2)) for line in lines if line]
    if abstained:
        reasons = "; ".join(f"{code}: {why}" for code, why in abstained.items())
        blocks.append(Text(f"Not diagnosed: {reasons}.", style="dim"))
    return Group(*blocks)


def severity(verdict: Verdict) -> str:
    """``critical``, ``warning``, ``info`` or ``healthy``, by which views choose a colour."""
    return "healthy" if verdict.code == "healthy" else verdict.severity


def headline(verdict: Verdict) -> str:
    """One line about a verdict.

    Example:
        >>> from lightning_perf.diagnosis import Verdict
        >>> headline(Verdict("callback-bound", "critical", 0.25, culprit="Plots.on_fit_start"))
        'callback-bound (critical): Plots.on_fit_start, 25% of the time, 1.33x faster without it'
    """
    text = verdict.code if verdict.code == "healthy" else f"{verdict.code} ({verdict.severity})"
    cost = cost_text(verdict)
    return f"{text}: {cost}" if cost else text


def cost_text(verdict: Verdict) -> str:
    """The culprit, its share of the time and the speed-up; empty if none is known.

    Example:
        >>> from lightning_perf.diagnosis import Verdict
        >>> cost_text(Verdict("callback-bound", "critical", 0.25, culprit="Plots.on_fit_start"))
        'Plots.on_fit_start, 25% of the time, 1.33x faster without it'
    """
    parts = [_culprit(verdict.culprit)] if verdict.culprit else []
    if verdict.rank is not None and not (verdict.culprit or "").startswith("rank"):
        parts.append(f"rank {verdict.rank}")
    if verdict.share:
        least = float(verdict.evidence.get("lower_bound_share", verdict.share))
        between = f"between {least:.0%} and " if least < _UNCERTAIN * verdict.share else ""
        parts.append(f"{between}{verdict.share:.0%} of the time")
        how = "as advised" if "advised_step_seconds" in verdict.evidence else "without it"
        # In evidence, beside advice whose effect depends on what other programs do.
        bound = "at least " if how == "as advised" and "foreign_percent" in verdict.evidence else ""
        faster = f"{bound}{verdict.predicted_speedup:.2f}x faster {how}"
        parts.append("which is over" if verdict.predicted_speedup == 1 else faster)
    return ", ".join(parts)


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
        if name in _IN_ADVICE:
            continue
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
