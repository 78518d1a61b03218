"""Why a run is slow: signals -> rules -> verdicts -> report. No torch, no Lightning."""

from lightning_perf.diagnosis.rules import CODES, RULES, FunctionRule, Impact, Rule, Verdict, judge
from lightning_perf.diagnosis.signals import Signals, Unknown

__all__ = [
    "CODES",
    "RULES",
    "FunctionRule",
    "Impact",
    "Rule",
    "Signals",
    "Unknown",
    "Verdict",
    "judge",
]
