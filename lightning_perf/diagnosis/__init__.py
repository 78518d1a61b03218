"""Why a run is slow: signals -> rules -> verdicts -> report. Pure: no torch, no Lightning."""

from lightning_perf.diagnosis.verdicts import CODES, Verdict

__all__ = ["CODES", "Verdict"]
