"""Schedules by where a process stands: its ranks and its stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf.errors import ConfigError
from lightning_perf.schedule import checks
from lightning_perf.schedule.base import FOREVER, Context, Schedule

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lightning_perf.moment import Moment


class _Place(Schedule):
    """A schedule that is the same all through a stage."""

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """To the end of the stage."""
        return FOREVER


class GlobalRank(_Place):
    """On some ranks of the run.

    Args:
        ranks: One or more, from 0.

    Raises:
        ConfigError: If there is none, or one is not a rank of the run, which `setup` tells.
    """

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Check the ranks against the run."""
        _check_world(self.ranks, context.ranks.world_size, "processes in the run")

    def window(self, moment: Moment) -> Hashable | None:
        """Give the one window."""
        return 0 if moment.ranks.global_rank in self.ranks else None


class LocalRank(_Place):
    """On some ranks of each node.

    Args:
        ranks: One or more, from 0.

    Raises:
        ConfigError: If there is none, or one is not a rank of the node, which `setup` tells.
    """

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Check the ranks against the node."""
        _check_world(self.ranks, context.ranks.local_world_size, "processes on this node")

    def window(self, moment: Moment) -> Hashable | None:
        """Give the one window."""
        return 0 if moment.ranks.local_rank in self.ranks else None


class Stages(_Place):
    """In some stages.

    Args:
        stages: One or more of ``train``, ``validate``, ``test`` and ``predict``.

    Raises:
        ConfigError: If there is none, or one is unknown.
    """

    def __init__(self, stages: list[str] | str) -> None:
        self.stages = checks.stage_list("stages", stages)

    @property
    def shared(self) -> bool:
        """True: all ranks are in the same stage."""
        return True

    def window(self, moment: Moment) -> Hashable | None:
        """Give the stage."""
        return moment.stage if moment.stage in self.stages else None


def _check_world(ranks: list[int], size: int, what: str) -> None:
    beyond = [rank for rank in ranks if rank >= size]
    if beyond:
        raise ConfigError("ranks", ranks, f"goes beyond the {size} {what}", "0")
