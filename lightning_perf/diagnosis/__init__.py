"""Why a run is slow: signals -> rules -> verdicts -> report. No torch, no Lightning."""

from lightning_perf.diagnosis.rules import RULES, Impact, Rule, judge
from lightning_perf.diagnosis.signals import Signals, Unknown
from lightning_perf.diagnosis.verdicts import CODES, Verdict

__all__ = ["CODES", "RULES", "Impact", "Rule", "Signals", "Unknown", "Verdict", "judge"]
