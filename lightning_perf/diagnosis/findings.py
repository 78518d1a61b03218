"""From signals to verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_perf.diagnosis.rules import RULES
from lightning_perf.diagnosis.signals import Unknown
from lightning_perf.diagnosis.verdicts import Verdict, ranked
from lightning_perf.errors import describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_perf.diagnosis.rules import Rule
    from lightning_perf.diagnosis.signals import Signals

#: Batches that a diagnosis needs.
FEWEST_BATCHES = 30


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong, and what is not known."""

    #: The most costly first; a single ``healthy`` if nothing is wrong; empty if nothing is known.
    verdicts: Sequence[Verdict] = ()
    #: Why rules gave no answer, by their codes.
    abstained: Mapping[str, str] = field(default_factory=dict)


def diagnose(signals: Signals, rules: Sequence[Rule] = RULES) -> Findings:
    """Apply rules to what was measured.

    A rule that fails, or cannot tell, is listed with its reason.

    Args:
        signals: What was measured.
        rules: The rules.

    Example:
        >>> from lightning_perf.diagnosis.signals import Signals
        >>> diagnose(Signals(windows=[])).abstained
        {'all': '0 batches were measured, and a diagnosis needs 30'}
    """
    if signals.batches < FEWEST_BATCHES:
        why = f"{signals.batches} batches were measured, and a diagnosis needs {FEWEST_BATCHES}"
        return Findings(abstained={"all": why})
    if not signals.wall.sum() > 0:
        return Findings(abstained={"all": "the time of the batches was not measured"})
    found: list[Verdict] = []
    abstained: dict[str, str] = {}
    for rule in rules:
        try:
            found += rule(signals)
        except Unknown as why:
            abstained[rule.code] = str(why)
        except Exception as error:
            abstained[rule.code] = f"the rule failed ({describe(error)})"
    return Findings(ranked(found), abstained)
