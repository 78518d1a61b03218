"""Schedules: which batches to record or report."""

from lightning_perf.schedule.base import (
    FOREVER,
    All,
    AnyOf,
    Context,
    Not,
    Schedule,
    as_schedule,
    walk,
)
from lightning_perf.schedule.intervals import (
    Always,
    At,
    Cyclic,
    Every,
    Fixed,
    GlobalRank,
    HasTag,
    LocalRank,
    Never,
    Stages,
)
from lightning_perf.schedule.triggers import Elapsed, OnSignal, OnSlowBatch, OnVerdict, Trigger

__all__ = [
    "FOREVER", "All", "Always", "AnyOf", "At", "Context", "Cyclic", "Elapsed", "Every", "Fixed",
    "GlobalRank", "HasTag", "LocalRank", "Never", "Not", "OnSignal", "OnSlowBatch", "OnVerdict",
    "Schedule", "Stages", "Trigger", "as_schedule", "walk",
]  # fmt: skip
