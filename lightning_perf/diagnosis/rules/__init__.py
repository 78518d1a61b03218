"""The rules. To apply one of your own as well, use ``Diagnosis(rules=[*RULES, mine])``."""

from lightning_perf.diagnosis.rules.base import Impact, Rule, judge
from lightning_perf.diagnosis.rules.input import EpochRestart, InputBound, TransferBound
from lightning_perf.diagnosis.rules.machine import (
    CpuSaturated,
    DeviceMemoryGrowth,
    HostMemoryGrowth,
    LaunchBound,
    LowGpuUtilization,
    SyncBound,
    Throttled,
)
from lightning_perf.diagnosis.rules.overhead import (
    CallbackBound,
    CheckpointBound,
    LoggerBound,
    ValidationBound,
)
from lightning_perf.diagnosis.rules.ranks import CommunicationBound, StragglerRule
from lightning_perf.diagnosis.rules.steps import (
    ComputeBound,
    GcPauses,
    PeriodicStall,
    Recompile,
    Slowdown,
    Warmup,
)

#: All rules of the package.
RULES: tuple[Rule, ...] = (
    InputBound(), TransferBound(), EpochRestart(),
    CallbackBound(), LoggerBound(), CheckpointBound(), ValidationBound(),
    Warmup(), Recompile(), GcPauses(), PeriodicStall(), Slowdown(),
    StragglerRule(), CommunicationBound(),
    HostMemoryGrowth(), DeviceMemoryGrowth(), CpuSaturated(),
    Throttled(), LaunchBound(), LowGpuUtilization(), SyncBound(), ComputeBound(),
)  # fmt: skip

__all__ = ["RULES", "Impact", "Rule", "judge"]
