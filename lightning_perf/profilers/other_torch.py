"""torch.profilers that are not ours: two at the same time would empty each other's traces."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction

from lightning_perf.errors import RecorderBusy
from lightning_perf.run import compat

if TYPE_CHECKING:
    from lightning_perf.run.context import RunContext

#: The end of Lightning's name for a step of each stage.
_STEPS = {
    "train": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def refuse_torch_profiler(profiler: object, context: RunContext) -> None:
    """Refuse to start torch.profiler while another one records, or is about to.

    Args:
        profiler: Who wants to start.
        context: The run.

    Raises:
        RecorderBusy: Another one has the batch that comes next.
    """
    refuse_lightnings(profiler, context)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        wanted = type(profiler).__name__
        raise RecorderBusy(wanted, "a torch.profiler that is not ours", "remove one of the two")


def refuse_lightnings(profiler: object, context: RunContext) -> None:
    """Refuse to record the batch that comes next if Lightning's PyTorchProfiler may.

    Args:
        profiler: Who wants to record.
        context: The run.

    Raises:
        RecorderBusy: Lightning's profiler records, warms up, or begins to in that batch.
    """
    name, theirs = compat.profiler_name(context.trainer), vars(context.trainer).get("profiler")
    if name == "PyTorchProfiler" and _takes_next(theirs, context.stage):
        raise RecorderBusy(type(profiler).__name__, f"Trainer(profiler={name}())")


def _takes_next(theirs: Any, stage: str) -> bool:
    """Whether Lightning's profiler does anything in the next batch or turns to it at its end."""
    try:
        running, phases = theirs.profiler, theirs._schedule
        if running is None:
            return False
        if running.current_action != ProfilerAction.NONE:
            return True
        if phases is None:
            following = running.schedule(running.step_num + 1)
        else:
            following = _following(theirs, phases, _STEPS[stage])
    except (AttributeError, AssertionError, NotImplementedError):
        return True  # another Lightning: nothing is known, so it is taken for busy
    return bool(following != ProfilerAction.NONE)


def _following(theirs: Any, phases: Any, step: str) -> ProfilerAction:
    """What Lightning's profiler turns to when the next batch ends, as a copy of its state says."""
    asked = copy(phases)  # asking it counts the batch
    asked.pre_step(step)
    theirs._schedule = asked
    try:
        # Where there are too few batches for its schedule, it records all of them.
        overridden = theirs._should_override_schedule()
    finally:
        theirs._schedule = phases
    following: ProfilerAction = asked(0)
    return ProfilerAction.RECORD if overridden else following
