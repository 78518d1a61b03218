"""Schedules: which batches to record or report."""

from lightning_perf.schedule.base import FOREVER, All, AnyOf, Context, Not, Schedule
from lightning_perf.schedule.conditions import Elapsed, GlobalRank, HasTag, LocalRank, Stages
from lightning_perf.schedule.cycles import Cyclic, Fixed
from lightning_perf.schedule.intervals import Always, At, Every, Never
from lightning_perf.schedule.parse import as_schedule
from lightning_perf.schedule.triggers import OnSignal, OnSlowBatch, OnVerdict, Trigger

__all__ = [
    "FOREVER",
    "All",
    "Always",
    "AnyOf",
    "At",
    "Context",
    "Cyclic",
    "Elapsed",
    "Every",
    "Fixed",
    "GlobalRank",
    "HasTag",
    "LocalRank",
    "Never",
    "Not",
    "OnSignal",
    "OnSlowBatch",
    "OnVerdict",
    "Schedule",
    "Stages",
    "Trigger",
    "as_schedule",
]
