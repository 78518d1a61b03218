"""PyTorch Lightning callbacks that show how fast training runs, and record why it is not faster.

Names are resolved at first use: importing this package imports neither torch nor MLflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_perf.callbacks.diagnosis import Diagnosis as Diagnosis
    from lightning_perf.callbacks.export import OpenTelemetry as OpenTelemetry
    from lightning_perf.callbacks.export import Prometheus as Prometheus
    from lightning_perf.callbacks.flops import Flops as Flops
    from lightning_perf.callbacks.hang import Hang as Hang
    from lightning_perf.callbacks.speed_monitor import SpeedMonitor as SpeedMonitor
    from lightning_perf.callbacks.suite import Suite as Suite
    from lightning_perf.callbacks.suite import always_on as always_on
    from lightning_perf.callbacks.system_metrics import SystemMetrics as SystemMetrics
    from lightning_perf.callbacks.timings import Timings as Timings
    from lightning_perf.core.progress import Moment as Moment
    from lightning_perf.core.progress import Timestamp as Timestamp
    from lightning_perf.core.time import Time as Time
    from lightning_perf.core.time import TimeUnit as TimeUnit
    from lightning_perf.core.window import Window as Window
    from lightning_perf.diagnosis import Verdict as Verdict
    from lightning_perf.errors import ConfigError as ConfigError
    from lightning_perf.errors import PerfWarning as PerfWarning
    from lightning_perf.errors import RecorderBusy as RecorderBusy
    from lightning_perf.profilers.base import Profiler as Profiler
    from lightning_perf.profilers.memory_snapshot import MemorySnapshot as MemorySnapshot
    from lightning_perf.profilers.memray import Memray as Memray
    from lightning_perf.profilers.pytorch import PyTorch as PyTorch
    from lightning_perf.profilers.viztracer import VizTracer as VizTracer
    from lightning_perf.run.window_callback import WindowCallback as WindowCallback
    from lightning_perf.schedule import All as All
    from lightning_perf.schedule import Always as Always
    from lightning_perf.schedule import AnyOf as AnyOf
    from lightning_perf.schedule import At as At
    from lightning_perf.schedule import Cyclic as Cyclic
    from lightning_perf.schedule import Elapsed as Elapsed
    from lightning_perf.schedule import Every as Every
    from lightning_perf.schedule import Fixed as Fixed
    from lightning_perf.schedule import GlobalRank as GlobalRank
    from lightning_perf.schedule import HasTag as HasTag
    from lightning_perf.schedule import LocalRank as LocalRank
    from lightning_perf.schedule import Never as Never
    from lightning_perf.schedule import Not as Not
    from lightning_perf.schedule import OnSignal as OnSignal
    from lightning_perf.schedule import OnSlowBatch as OnSlowBatch
    from lightning_perf.schedule import OnVerdict as OnVerdict
    from lightning_perf.schedule import Schedule as Schedule
    from lightning_perf.schedule import Stages as Stages
    from lightning_perf.tracking.tracker import Tracker as Tracker

_HOMES = {
    "callbacks.diagnosis": ["Diagnosis"],
    "callbacks.export": ["OpenTelemetry", "Prometheus"],
    "callbacks.flops": ["Flops"],
    "callbacks.hang": ["Hang"],
    "callbacks.speed_monitor": ["SpeedMonitor"],
    "callbacks.suite": ["Suite", "always_on"],
    "callbacks.system_metrics": ["SystemMetrics"],
    "callbacks.timings": ["Timings"],
    "core.window": ["Window"],
    "diagnosis": ["Verdict"],
    "errors": ["ConfigError", "PerfWarning", "RecorderBusy"],
    "profilers.memory_snapshot": ["MemorySnapshot"],
    "profilers.memray": ["Memray"],
    "profilers.base": ["Profiler"],
    "profilers.pytorch": ["PyTorch"],
    "profilers.viztracer": ["VizTracer"],
    "run.window_callback": ["WindowCallback"],
    "schedule": [
        "All", "Always", "AnyOf", "At", "Cyclic", "Elapsed", "Every", "Fixed", "GlobalRank",
        "HasTag", "LocalRank", "Never", "Not", "OnSignal", "OnSlowBatch", "OnVerdict",
        "Schedule", "Stages",
    ],
    "core.time": ["Time", "TimeUnit"],
    "tracking.tracker": ["Tracker"],
    "core.progress": ["Moment", "Timestamp"],
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from lightning_perf.tracking.summary import installed_version

        return installed_version()
    home = _HOME_OF.get(name)
    if home is None:
        from lightning_perf.errors import did_you_mean

        text = f"module {__name__!r} has no attribute {name!r}. {did_you_mean(name, __all__)}"
        # Without the module, Python does not add a hint of its own to a traceback.
        raise AttributeError(text.rstrip(". "), name=name, obj=None)
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
