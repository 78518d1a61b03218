"""Schedules by rank and stage."""

import pytest

from lightning_perf.core.progress import STAGES, Moment, Ranks, Timestamp
from lightning_perf.errors import ConfigError
from lightning_perf.schedule import Context, GlobalRank, LocalRank, Stages


def at(stage="train", **ranks):
    return Moment(stage, Timestamp(), Timestamp(), ranks=Ranks(**ranks))


def test_global_and_local_ranks_differ():
    """Global rank 5 may be local rank 1."""
    moment = at(global_rank=5, local_rank=1)
    assert GlobalRank(5)(moment)
    assert GlobalRank([0, 5])(moment)
    assert not GlobalRank(1)(moment)
    assert LocalRank(1)(moment)
    assert not LocalRank([0, 5])(moment)


@pytest.mark.parametrize("chosen", ["train", ["validate", "test"], ["predict"]])
def test_stages(chosen):
    """Only the given stages match, each with a window of its own."""
    schedule = Stages(chosen)
    found = [stage for stage in STAGES if schedule(at(stage))]
    assert found == ([chosen] if isinstance(chosen, str) else chosen)
    assert len({schedule.window(at(stage)) for stage in found}) == len(found)


def test_ranks_beyond_the_run_are_refused_at_setup():
    """`setup` refuses a rank that does not exist in the run."""
    context = Context(ranks=Ranks(world_size=4, local_world_size=2))
    GlobalRank(3).setup(context)
    LocalRank(1).setup(context)
    with pytest.raises(ConfigError, match="4 processes in the run"):
        (~GlobalRank([0, 4])).setup(context)
    with pytest.raises(ConfigError, match="2 processes on this node"):
        LocalRank(2).setup(context)


@pytest.mark.parametrize("ranks", [[], -1, [0, -1], "0", 1.0, True, None])
def test_ranks_refuse(ranks):
    """Anything but one or more whole numbers from 0 is refused."""
    for make in (GlobalRank, LocalRank):
        with pytest.raises(ConfigError, match="ranks"):
            make(ranks)


@pytest.mark.parametrize("stages", [[], "fit", ["train", "validation"], None])
def test_stages_refuse(stages):
    """Anything but Lightning's names of stages is refused."""
    with pytest.raises(ConfigError, match="stages"):
        Stages(stages)
