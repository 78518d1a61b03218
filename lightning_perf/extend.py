"""What authors of callbacks, profilers, schedules, trackers and diagnosis rules import.

These names and the public ones of ``lightning_perf`` are stable; all others may change.
"""

from lightning_perf.checks import flag, needs, rank_list, stage_list, times, whole
from lightning_perf.core.progress import Limits, Moment, Ranks, Timestamp
from lightning_perf.core.time import Time, TimeUnit
from lightning_perf.core.window import Window
from lightning_perf.diagnosis import RULES, FunctionRule, Impact, Rule, Signals, Unknown, Verdict
from lightning_perf.errors import ConfigError, PerfWarning, RecorderBusy
from lightning_perf.flops.external import flop_formula
from lightning_perf.profilers.base import Names, Profiler, Recorded, Recording
from lightning_perf.profilers.tools import defaults, refuse_python_profiler, refuse_torch_profiler
from lightning_perf.run.run import Run
from lightning_perf.run.window_callback import WindowCallback
from lightning_perf.run.windows import Signal
from lightning_perf.schedule import FOREVER, Context, Schedule, Trigger, as_schedule
from lightning_perf.traces.uploads import NotHere
from lightning_perf.tracking.notify import post
from lightning_perf.tracking.tracker import Tracker
from lightning_perf.trials.changes import CHANGES, Change, Seen

__all__ = [
    "CHANGES", "FOREVER", "RULES", "Change", "ConfigError", "Context", "FunctionRule", "Impact",
    "Limits", "Moment", "Names", "NotHere", "PerfWarning", "Profiler", "Ranks", "Recorded",
    "RecorderBusy", "Recording", "Rule", "Run", "Schedule", "Seen", "Signal", "Signals", "Time",
    "TimeUnit", "Timestamp", "Tracker", "Trigger", "Unknown", "Verdict", "Window", "WindowCallback",
    "as_schedule", "defaults", "flag", "flop_formula", "needs", "post", "rank_list",
    "refuse_python_profiler", "refuse_torch_profiler", "stage_list", "times", "whole",
]  # fmt: skip
