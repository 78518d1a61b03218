"""Other recorders in this process, beside which ours must not run."""

from __future__ import annotations

import sys
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction

from lightning_perf.errors import RecorderBusy
from lightning_perf.run import compat

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext

#: A memray tracker that Memray did not start.
OTHER_MEMRAY = "another memray tracker"
_REMOVE = "remove one of the two"
#: Names of a step in Lightning's PyTorchProfiler.
_STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def refuse_torch_profiler(profiler: object, context: RunContext) -> None:
    """Refuse to start torch.profiler beside another one: each would empty the other's trace.

    Raises:
        RecorderBusy: Another one records, or will record the next batch.
    """
    refuse_lightnings(profiler, context)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise RecorderBusy(type(profiler).__name__, "another torch.profiler", _REMOVE)


def refuse_lightnings(profiler: object, context: RunContext) -> None:
    """Refuse to record the next batch beside Lightning's PyTorchProfiler.

    Raises:
        RecorderBusy: It records or warms up, or will start to in that batch.
    """
    name, theirs = compat.profiler_name(context.trainer), vars(context.trainer).get("profiler")
    if name == "PyTorchProfiler" and _takes_next(theirs, context.stage):
        raise RecorderBusy(type(profiler).__name__, f"Trainer(profiler={name}())")


def refuse_python_profiler(profiler: object) -> None:
    """Refuse to record while another tool has the hook for Python calls.

    Raises:
        RecorderBusy: cProfile, another VizTracer or an old memray has it.
    """
    other = python_profiler()
    if other is not None:
        raise RecorderBusy(type(profiler).__name__, other, _REMOVE)


def python_profiler() -> str | None:
    """The tool that has the hook for Python calls on this thread, or None.

    From Python 3.12 on, cProfile registers with ``sys.monitoring`` instead of ``sys.setprofile``.
    """
    hook = sys.getprofile()
    if type(hook).__module__.partition(".")[0] == "memray":  # memray < 1.17
        return OTHER_MEMRAY
    if hook is None and sys.version_info >= (3, 12):
        hook = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)
    return None if hook is None else "another Python profiler"


def _takes_next(theirs: Any, stage: str) -> bool:
    """Whether Lightning's profiler is active in the next batch, or becomes active at its end."""
    try:
        running, schedule = theirs.profiler, theirs._schedule
        if running is None:
            return False
        if running.current_action != ProfilerAction.NONE:
            return True
        if schedule is None:
            following = running.schedule(running.step_num + 1)
        else:
            following = _following(theirs, schedule, _STEPS[stage])
    except (AttributeError, AssertionError, NotImplementedError):
        return True  # an unknown version of Lightning: assume that it is active
    return bool(following != ProfilerAction.NONE)


def _following(theirs: Any, schedule: Any, step: str) -> ProfilerAction:
    """What Lightning's profiler does after the next batch, read from a copy of its schedule."""
    ahead = copy(schedule)  # a call counts the batch
    ahead.pre_step(step)
    theirs._schedule = ahead
    try:
        # With fewer batches than its schedule needs, it records all of them.
        overridden = theirs._should_override_schedule()
    finally:
        theirs._schedule = schedule
    following: ProfilerAction = ahead(0)
    return ProfilerAction.RECORD if overridden else following
