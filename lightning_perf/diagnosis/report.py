"""Verdicts in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from lightning_perf.diagnosis.verdicts import Verdict

_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def panel(verdicts: Sequence[Verdict]) -> RenderableType:
    """A rich renderable: one block per verdict, the most costly first.

    Args:
        verdicts: As `Diagnosis.verdicts`.
    """
    from rich.console import Group
    from rich.text import Text

    blocks: list[RenderableType] = []
    for verdict in verdicts:
        head = Text(f"{verdict.code}", style=_STYLES.get(verdict.severity, ""))
        if verdict.share:
            head.append(
                f"  {verdict.share:.0%} of the time, {verdict.predicted_speedup:.2f}x faster without it"
            )
        if verdict.culprit:
            head.append(f"  {verdict.culprit}", style="bold")
        blocks += [head, *([Text(f"  {verdict.advice}")] if verdict.advice else [])]
    return Group(*blocks)
